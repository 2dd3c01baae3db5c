"""Real stage workers over real arenas, chained by a driver that plays daemons and edges."""

import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from lensemble import gguf, stage_chunk
from lensemble.edge.arena import Arena, Region
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId, SlotIndex
from lensemble.model_facts import ModelFacts, manifest_digest, tensors_for
from lensemble.model_header import facts_of, parts_of
from lensemble.stage_chunk import Chunk, Kind, Sampling
from lensemble.wire.stages import TensorPart
from lensemble_node import signals, stage_signals
from lensemble_node.engine_environment import stage_environment

INBOUND, OUTBOUND, WEIGHTS = EdgeId(21), EdgeId(22), EdgeId(23)
GREEDY = Sampling()
_NODES = NodeId("a" * 64), NodeId("b" * 64)
Said = TypeVar("Said")


class Model(msgspec.Struct, frozen=True):
    """A model file and what its header says."""

    path: Path
    facts: ModelFacts
    tensors: tuple[TensorPart, ...]

    @classmethod
    def open(cls, path: Path) -> "Model":
        header = gguf.parse_file(path)
        return cls(path, facts_of(header), parts_of(header))


class Cut(msgspec.Struct, frozen=True):
    """How a run is provisioned."""

    ctx: int = 96
    sessions: int = 2
    rows: int = 8


class StageProcess:
    """The pipes, the arena and the rings of one stage's worker."""

    def __init__(
        self,
        model: Model,
        span: tuple[int, int],
        cache_dir: Path,
        cut: Cut,
        *,
        memory_bytes: int = 0,
        slots: int = 2,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.model, self.span, self.cut, self.cache_dir = model, span, cut, cache_dir
        self.arena = Arena.create(64 << 20)
        self.capacity = stage_chunk.capacity_bytes(cut.rows, model.facts.hidden)
        self.slots = slots
        self.process = subprocess.Popen(
            [
                sys.executable, "-P", "-X", "faulthandler", "-m", "lensemble_node.worker.inference",
                f"--arena-fd={self.arena.fd}", f"--arena-bytes={self.arena.nbytes}",
                f"--memory-bytes={memory_bytes}", "--niceness=0", f"--parent={os.getpid()}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self.arena.fd,),
            env=environment or stage_environment(cache_dir),
        )  # fmt: skip
        self.inbound = self.lease(INBOUND)
        self.outbound = self.lease(OUTBOUND)
        self.computed: list[stage_signals.Computed] = []
        self.refused: list[stage_signals.RefusedChunk] = []
        self.hosted: stage_signals.Hosted | None = None
        self.phases: list[stage_signals.Advanced] = []
        self._turn = itertools.cycle(range(slots))
        self._lines = bytearray()

    def lease(self, edge: EdgeId) -> Region:
        region = self.arena.lease(EdgeSpec(edge, *_NODES, self.capacity, self.slots))
        assert region is not None
        return region

    def host_command(self, **changes: object) -> stage_signals.Host:
        first, last = self.span
        facts = self.model.facts
        host = stage_signals.Host(
            model=facts.canonical().decode(),
            manifest_digest=manifest_digest(facts, self.model.tensors),
            tensors=tensors_for(facts, self.model.tensors, first, last),
            first=first,
            last=last,
            stage=0,
            stages=1,
            source="path",
            place=str(self.model.path),
            cache_dir=str(self.cache_dir),
            cache_bytes=0,
            inbound=INBOUND,
            outbound=OUTBOUND,
            weights=0,
            ctx=self.cut.ctx,
            sessions=self.cut.sessions,
            rows=self.cut.rows,
            device="",
        )
        return msgspec.structs.replace(host, **changes)

    def begin(self, **changes: object) -> None:
        """Host and attach; the worker fetches, loads and compiles from here on."""
        self.tell(self.host_command(**changes), *self.attachments())

    def attachments(self) -> list[signals.Attach]:
        return [
            self.attachment(INBOUND, "rx", self.inbound),
            self.attachment(OUTBOUND, "tx", self.outbound),
        ]

    def attachment(
        self, edge: EdgeId, direction: Literal["rx", "tx"], region: Region
    ) -> signals.Attach:
        return signals.Attach(
            edge=edge,
            direction=direction,
            offset=region.offset,
            capacity_bytes=self.capacity,
            slots=self.slots,
        )

    def ready(self) -> stage_signals.Hosted:
        """Wait until it is hosted."""
        self.hosted = self.hear_until(stage_signals.Hosted)
        return self.hosted

    def tell(self, *commands: signals.SignalLine) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(map(signals.line, commands)))
        self.process.stdin.flush()

    def hear(self, timeout_s: float = 180.0) -> stage_signals.Event:
        assert self.process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._lines:
            left = until - time.monotonic()
            assert left > 0, "the worker says nothing"
            if select.select([self.process.stdout], [], [], left)[0]:
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise EOFError(self.end())
                self._lines += piece
        line, _, rest = self._lines.partition(b"\n")
        self._lines = rest
        event = stage_signals.parse_event(bytes(line))
        self._note(event)
        return event

    def _note(self, event: stage_signals.Event) -> None:
        match event:
            case stage_signals.Computed():
                self.computed.append(event)
            case stage_signals.RefusedChunk():
                self.refused.append(event)
            case stage_signals.Advanced():
                self.phases.append(event)

    def hear_until(self, kind: type[Said]) -> Said:
        while True:
            event = self.hear()
            if isinstance(event, kind):
                return event
            assert not isinstance(event, stage_signals.StageFailed), event

    def give(self, raw: bytes | memoryview) -> bytes | None:
        """Land a chunk; what comes out, if anything."""
        slot = next(self._turn)
        self.inbound.slot(SlotIndex(slot))[: len(raw)] = raw
        self.tell(signals.Ready(edge=INBOUND, slot=slot, extent=len(raw)))
        out = None
        while True:
            event = self.hear()
            if isinstance(event, signals.Filled):
                out = bytes(self.outbound.slot(SlotIndex(event.slot))[: event.extent])
                self.tell(signals.Released(edge=event.edge, slot=event.slot))
            elif isinstance(event, signals.Consumed):
                return out

    def stop(self) -> tuple[int, str]:
        self.tell(signals.Stop())
        return self.end()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors.decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self.arena.close()


class Chain:
    """Stages in a row, and the coordinator's part before the first and after the last."""

    def __init__(self, stages: Sequence[StageProcess], cut: Cut) -> None:
        self.stages = list(stages)
        self.cut = cut
        self._steps = itertools.count(1)

    def step(
        self, tokens: Sequence[int], start: int, session: int = 0, how: Sampling | None = None
    ) -> tuple[int, float] | None:
        """One chunk through all stages: token and log-probability, if asked for."""
        step = next(self._steps)
        chunk = Chunk(Kind.TOKENS, session, len(tokens), start, step, how)
        raw: bytes | None = tokens_chunk(chunk, tokens)
        for stage in self.stages:
            assert raw is not None, [each.refused for each in self.stages]
            raw = stage.give(raw)
        if raw is None:
            assert how is None, [each.refused for each in self.stages]
            return None
        answer, payload = stage_chunk.read(memoryview(raw))
        assert (answer.kind, answer.step, answer.session) == (Kind.RESULT, step, session)
        token, logprob = stage_chunk.RESULT.unpack(payload)
        return token, logprob

    def prefill(self, prompt: Sequence[int], session: int, how: Sampling) -> tuple[int, float]:
        result = None
        for start in range(0, len(prompt), self.cut.rows):
            piece = prompt[start : start + self.cut.rows]
            ending = start + self.cut.rows >= len(prompt)
            result = self.step(piece, start, session, how if ending else None)
        assert result is not None
        return result

    def generate(
        self, prompt: Sequence[int], count: int, session: int = 0, how: Sampling = GREEDY
    ) -> list[int]:
        return [token for token, _ in self.stream(prompt, count, session, how)]

    def stream(
        self, prompt: Sequence[int], count: int, session: int = 0, how: Sampling = GREEDY
    ) -> Iterator[tuple[int, float]]:
        """Tokens one by one, with their log-probabilities."""
        recent = list(prompt)
        drawn = self.prefill(prompt, session, at(how, 0, recent))
        for index in range(count):
            yield drawn
            if index + 1 == count:
                return
            recent.append(drawn[0])
            again = self.step([drawn[0]], len(recent) - 1, session, at(how, index + 1, recent))
            assert again is not None
            drawn = again


def at(how: Sampling, index: int, recent: Sequence[int]) -> Sampling:
    kept = tuple(recent[-stage_chunk.MAX_RECENT :]) if how.repeat_penalty != 1 else ()
    return msgspec.structs.replace(how, index=index, recent=kept)


def tokens_chunk(chunk: Chunk, tokens: Sequence[int]) -> bytes:
    slot = bytearray(chunk.header_bytes + 4 * len(tokens))
    begin = stage_chunk.write(chunk, memoryview(slot))
    memoryview(slot)[begin:].cast("I")[:] = memoryview(
        b"".join(token.to_bytes(4, "little") for token in tokens)
    ).cast("I")
    return bytes(slot)


@contextmanager
def chain(
    model: Model,
    cuts: Sequence[int],
    cache_dir: Path,
    cut: Cut | None = None,
    device: str = "",
) -> Iterator[Chain]:
    """Stages that end at each of ``cuts`` and at the last layer, all started at once."""
    cut = cut or Cut()
    bounds = [0, *cuts, model.facts.layers]
    with ExitStack() as stack:
        stages = []
        for span in itertools.pairwise(bounds):
            stage = StageProcess(
                model, span, cache_dir, cut, environment=stage_environment(cache_dir, device)
            )
            stack.callback(stage.close)
            stage.begin()
            stages.append(stage)
        for stage in stages:
            stage.ready()
        yield Chain(stages, cut)
