"""The layers of a stage, compiled: from the payload of one slot straight into that of another.

Chunks are computed in two shapes, one row and ``rows`` rows; a chunk in between is padded with
zeros where it lies.  The causal mask keeps the padding out of what is computed, and the next chunk
overwrites what it left in the caches.
"""

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lensemble.errors import ChunkRefused
from lensemble.stage_chunk import ALIGNMENT, Chunk, Kind
from lensemble_node.worker.inference import engine
from lensemble_node.worker.inference.engine import Float32, Replay, Tensor
from lensemble_node.worker.inference.model import Layers

FLOAT_BYTES = 4
_KERNELS_PER_SHAPE = 14


@dataclass(frozen=True)
class Payload:
    """Where a chunk's payload lies: ``memory`` begins at a multiple of ``ALIGNMENT`` bytes.

    ``key`` is edge, slot and offset, and names the place until ``Computation.forget``.
    """

    key: tuple[int, int, int]
    memory: memoryview


class Computation:
    """Takes chunks of a session in order of their positions, each session on its own.

    Args:
        layers: what is computed.
        compiled: told of each step: how many, of about how many; equal once it is done.
    """

    def __init__(self, layers: Layers, compiled: Callable[[int, int], None]) -> None:
        self.layers = layers
        self._held = [0] * layers.sessions
        """Positions of each session that the caches hold."""

        self._tensors: dict[tuple[tuple[int, int, int], int, bool], Tensor] = {}
        width = layers.facts.hidden
        self._shapes = tuple(dict.fromkeys((layers.rows, 1)))
        self._scratch_in = _memory(layers.rows * width * FLOAT_BYTES)
        self._scratch = _memory(layers.rows * width * FLOAT_BYTES)
        self._outcome = np.frombuffer(self._scratch, np.float32).reshape(layers.rows, width)
        self._replays = {rows: Replay(layers.forward) for rows in self._shapes}
        self._kernels = engine.KernelCount()
        self._compile(compiled)
        self.compiled = self._kernels.made
        """Kernels made before the first chunk."""

    def _compile(self, compiled: Callable[[int, int], None]) -> None:
        """Capture every shape; a layer that is traced and a kernel that is made are a step each."""
        layers, done = self.layers, itertools.count(1)
        traced = len(self._shapes) * (layers.last - layers.first)
        kernels = _KERNELS_PER_SHAPE * len(self._shapes) + layers.embeds + 2 * layers.heads

        def step() -> None:
            count = next(done)
            compiled(count, max(traced + kernels, count + 1))

        layers.traced = self._kernels.made_one = step
        for rows in self._shapes:
            self._run(rows, Payload((-1, 0, 0), self._scratch_in), self._payload(), (0, 0))
        if layers.heads:
            self._prepare_head()
        layers.traced = self._kernels.made_one = _nothing
        last = next(done) - 1
        compiled(last, last)

    @property
    def row_bytes(self) -> int:
        """Of one row of an inbound payload."""
        return FLOAT_BYTES * (1 if self.layers.embeds else self.layers.facts.hidden)

    @property
    def compiled_since(self) -> int:
        """Kernels made since; 0, or the time of a chunk is not what it should be."""
        return self._kernels.made - self.compiled

    def check(self, chunk: Chunk, payload: memoryview) -> None:
        """Whether ``chunk`` can be computed.

        Raises:
            ChunkRefused: it cannot; the message has what is wrong.
        """
        layers, rows = self.layers, chunk.rows
        wanted = Kind.TOKENS if layers.embeds else Kind.ACTIVATIONS
        if chunk.kind != wanted:
            raise ChunkRefused(f"a chunk of {chunk.kind.name}; this stage takes {wanted.name}")
        if not 1 <= rows <= layers.rows:
            raise ChunkRefused(f"a chunk of {rows} rows; 1 to {layers.rows} are computed at once")
        if chunk.session >= layers.sessions:
            raise ChunkRefused(f"session {chunk.session}; there are {layers.sessions}")
        if chunk.start + rows > layers.ctx:
            raise ChunkRefused(
                f"{rows} rows from position {chunk.start} on; the context ends at {layers.ctx}"
            )
        held = self._held[chunk.session]
        if chunk.start > held:
            raise ChunkRefused(
                f"position {chunk.start} of session {chunk.session}, of which {held} were "
                "computed: a chunk is missing"
            )
        self._check_payload(rows, payload)

    def _check_payload(self, rows: int, payload: memoryview) -> None:
        if len(payload) != rows * self.row_bytes:
            raise ChunkRefused(f"{len(payload)} bytes of payload, not {rows * self.row_bytes}")
        if self.layers.embeds:
            most = int(np.frombuffer(payload, "<u4").max())
            if most >= self.layers.facts.vocabulary:
                raise ChunkRefused(f"token {most}; there are {self.layers.facts.vocabulary}")

    def forward(self, chunk: Chunk, given: Payload, into: Payload | None) -> None:
        """Compute a checked ``chunk`` whose payload is ``given``, into the payload ``into``.

        Both have room for ``rows`` rows.  Without ``into`` the outcome is what ``logits`` takes.
        """
        shape = 1 if chunk.rows == 1 else self.layers.rows
        padding = given.memory[chunk.rows * self.row_bytes : shape * self.row_bytes]
        padding[:] = bytes(len(padding))
        # Until it is done the caches hold no more than what came before.
        self._held[chunk.session] = chunk.start
        self._run(shape, given, into or self._payload(), (chunk.start, chunk.session))
        self._held[chunk.session] = chunk.start + chunk.rows

    def forget(self, edge: int) -> None:
        """The memory of ``edge`` is another from here on."""
        self._tensors = {key: each for key, each in self._tensors.items() if key[0][0] != edge}

    def logits(self, row: int) -> Float32:
        """Of row ``row`` of the latest ``forward`` without ``into``: (vocabulary,).

        Overwritten by the next call.
        """
        self._row[:] = self._outcome[row]
        self._head((self._row_tensor, self._logits_tensor))
        return self._logits

    # ---- tensors ----

    def _payload(self) -> Payload:
        return Payload((-2, 0, 0), self._scratch)

    def _run(self, rows: int, given: Payload, into: Payload, at: tuple[int, int]) -> None:
        layers = self.layers
        self._replays[rows](
            (
                self._tensor(given, rows, tokens=layers.embeds),
                self._tensor(into, rows, tokens=False),
            ),
            (layers.start, at[0]),
            (layers.session, at[1]),
        )

    def _tensor(self, payload: Payload, rows: int, *, tokens: bool) -> Tensor:
        """The tensor at a place: made once, and then it costs nothing to compute on it."""
        key = (payload.key, rows, tokens)
        tensor = self._tensors.get(key)
        if tensor is None:
            if tokens:
                tensor = engine.tokens_over(payload.memory, rows)
            else:
                tensor = engine.over(payload.memory, rows, self.layers.facts.hidden)
            self._tensors[key] = tensor
        return tensor

    def _prepare_head(self) -> None:
        facts = self.layers.facts
        row, logits = (_memory(n * FLOAT_BYTES) for n in (facts.hidden, facts.vocabulary))
        self._row, self._logits = (np.frombuffer(memory, np.float32) for memory in (row, logits))
        self._row_tensor = engine.over(row, 1, facts.hidden)
        self._logits_tensor = engine.over(logits, 1, facts.vocabulary)
        self._head = Replay(self.layers.logits)
        self._head((self._row_tensor, self._logits_tensor))


def _nothing() -> None:
    pass


def _memory(nbytes: int) -> memoryview:
    """Zeros from the start of a page on; they live as long as a view of them."""
    padded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    return memoryview(mmap.mmap(-1, padded))[:nbytes]
