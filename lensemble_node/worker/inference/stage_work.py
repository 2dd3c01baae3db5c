"""The loop of a stage's worker: gets its weights ready, then computes one chunk after the other.

Chunks are commands and come in the order in which they landed.  Whatever else is said is answered
between two steps of long work; ``Stop`` ends that at once.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path

import msgspec

from lensemble import stage_chunk
from lensemble.edge.arena import Arena
from lensemble.errors import (
    ChunkRefused,
    ContractViolation,
    FrameError,
    LensembleError,
    WorkerFault,
)
from lensemble.model_facts import ModelFacts
from lensemble.stage_chunk import Chunk, Kind
from lensemble_node import signals, stage_signals
from lensemble_node.worker.inference import sampling
from lensemble_node.worker.inference.computation import FLOAT_BYTES, Computation, Payload
from lensemble_node.worker.inference.fetch import Order, Watch
from lensemble_node.worker.inference.intake import Weights
from lensemble_node.worker.inference.model import Layers
from lensemble_node.worker.inference.weights import Ranges, mapped, obtain
from lensemble_node.worker.pace import Pace
from lensemble_node.worker.port import Port
from lensemble_node.worker.rings import Ring, Rings

MAX_BACKLOG = 64
"""Chunks that wait: no edge has more slots."""


class _Stopped(Exception):
    """The daemon said stop."""


class _Dropped(Exception):
    """The edge that the work in hand is for is gone."""


class StageWorker:
    """Obeys ``port`` with the slots of ``arena`` until told to stop."""

    def __init__(self, port: Port[stage_signals.Command], arena: Arena) -> None:
        self._port = port
        self._rings = Rings(arena)
        self._host: stage_signals.Host | None = None
        self._computation: Computation | None = None
        self._chunks: deque[signals.Ready] = deque()
        self._supplied: deque[signals.Ready] = deque()
        self._weights: Weights | None = None
        """Open for as long as this process lives, so that nothing prunes them."""

        self._pace = Pace()

    def run(self) -> None:
        """Work until ``Stop``.

        Raises:
            DaemonGone: the pipes are closed.
            LensembleError: the stage cannot go on; it was said.
        """
        try:
            host = self._await_host()
            computation = self._prepare(host)
            while True:
                while not self._chunks:
                    self._take(self._port.wait())
                self._answer(host, computation, self._chunks.popleft())
        except _Stopped:
            self._say_kernels()
        except LensembleError as error:
            self._port.say(
                stage_signals.StageFailed(
                    code=error.code, message=error.message, remediation=error.remediation
                )
            )
            raise

    # ---- commands ----

    def _await_host(self) -> stage_signals.Host:
        while self._host is None:
            self._take(self._port.wait())
        return self._host

    def _look(self) -> None:
        """Take what has come meanwhile; called between two steps of long work."""
        while (command := self._port.look()) is not None:
            self._take(command)

    def _take(self, command: stage_signals.Command) -> None:
        match command:
            case signals.Stop():
                raise _Stopped
            case stage_signals.Host():
                if self._host is not None:
                    raise WorkerFault("a worker hosts one stage, and was told of a second")
                self._host = command
            case signals.Ready():
                self._queue(command)
            case signals.Attach():
                self._rings.attach(command)
                self._port.say(signals.Attached(edge=command.edge))
            case signals.Detach(edge=edge):
                self._detach(edge)
            case signals.Released():
                self._released(command)

    def _released(self, command: signals.Released) -> None:
        ring = self._rings.ring(command.edge)
        if ring is not None:
            ring.released(command.slot)

    def _queue(self, ready: signals.Ready) -> None:
        weights = self._host is not None and ready.edge == self._host.weights
        backlog = self._supplied if weights else self._chunks
        if len(backlog) >= MAX_BACKLOG:
            raise WorkerFault(f"more than {MAX_BACKLOG} chunks wait")
        backlog.append(ready)

    def _detach(self, edge: int) -> None:
        self._rings.detach(edge)
        self._chunks = deque(ready for ready in self._chunks if ready.edge != edge)
        self._supplied = deque(ready for ready in self._supplied if ready.edge != edge)
        if self._computation is not None:
            self._computation.forget(edge)
        self._port.say(signals.Detached(edge=edge))

    # ---- getting ready ----

    def _prepare(self, host: stage_signals.Host) -> Computation:
        began = time.monotonic()
        try:
            facts = msgspec.json.decode(host.model, type=ModelFacts)
        except msgspec.DecodeError as error:
            raise ContractViolation(f"not the facts of a model of this build: {error}") from error

        def loading(done: int, total: int) -> None:
            self._advanced("loading", done, total)

        def compiling(done: int, total: int) -> None:
            self._advanced("compiling", done, total)

        self._weights = weights = self._obtain(host, facts)
        layers = Layers(
            facts,
            (host.first, host.last),
            (host.ctx, host.rows, host.sessions),
            mapped(weights, host.tensors),
            loading,
        )
        self._computation = computation = Computation(layers, compiling)
        # What the engine made stays for ever: nothing is gained by searching it for rubbish.
        gc.collect()
        gc.freeze()
        self._port.say(
            stage_signals.Hosted(
                weights_bytes=layers.weights_bytes,
                resident_bytes=resident_bytes(),
                fetched_bytes=weights.fetched_bytes,
                seconds=time.monotonic() - began,
            )
        )
        return computation

    def _obtain(self, host: stage_signals.Host, facts: ModelFacts) -> Weights:
        def should_stop() -> bool:
            self._look()
            return False

        order = Order(
            facts=facts,
            manifest_digest=host.manifest_digest,
            tensors=host.tensors,
            source=host.source,
            place=host.place,
            cache_dir=Path(host.cache_dir),
            cache_bytes=host.cache_bytes,
        )
        watch = Watch(progress=self._advanced, should_stop=should_stop)
        return obtain(order, watch, self._supply)

    def _supply(self, ranges: Ranges) -> Generator[memoryview, None, None]:
        """Say what is wanted of the weights edge; its chunks, until it is detached."""
        edge = 0 if self._host is None else self._host.weights
        self._port.say(stage_signals.Wants(ranges=ranges))
        attached = self._rings.ring(edge)
        while ranges and (attached is None or self._rings.ring(edge) is attached):
            if not self._supplied:
                self._take(self._port.wait())
                attached = attached or self._rings.ring(edge)
                continue
            ready = self._supplied.popleft()
            if attached is None:
                raise WorkerFault(f"a chunk of edge {edge}, which is not attached")
            try:
                yield attached.slot(ready.slot)[: ready.extent]
            finally:
                self._port.say(signals.Consumed(edge=edge, slot=ready.slot))

    def _advanced(self, phase: stage_signals.Phase, done: int, total: int) -> None:
        """Say how far it is, not too often, and hear what has come."""
        if done == total or self._pace.due():
            self._port.say(stage_signals.Advanced(phase=phase, done=done, total=total))
        self._look()

    # ---- chunks ----

    def _answer(
        self, host: stage_signals.Host, computation: Computation, ready: signals.Ready
    ) -> None:
        ring = self._rings.ring(ready.edge)
        if ring is None:
            return
        began, chunk = time.monotonic_ns(), None
        said: list[stage_signals.Event] = []
        try:
            chunk, payload = stage_chunk.read(ring.slot(ready.slot)[: ready.extent])
            computation.check(chunk, payload)
            begin = ready.extent - len(payload)
            given = self._payload(ring, ready.slot, begin, computation.row_bytes)
            if computation.layers.heads:
                said += self._ending(host, computation, chunk, given)
            else:
                said += self._passing(host, computation, chunk, given)
        except (ChunkRefused, FrameError) as error:
            said.append(
                stage_signals.RefusedChunk(
                    step=0 if chunk is None else chunk.step, code=error.code, message=error.message
                )
            )
        except _Dropped:
            pass
        else:
            said.append(
                stage_signals.Computed(
                    step=chunk.step,
                    rows=chunk.rows,
                    began_ns=began,
                    ended_ns=time.monotonic_ns(),
                )
            )
        if self._rings.ring(ready.edge) is ring:
            said.append(signals.Consumed(edge=ready.edge, slot=ready.slot))
        self._port.say(*said)

    def _passing(
        self, host: stage_signals.Host, computation: Computation, chunk: Chunk, given: Payload
    ) -> list[stage_signals.Event]:
        """Activations, computed straight into the slot they leave in."""
        ring, slot = self._empty_slot(host.outbound)
        onward = msgspec.structs.replace(chunk, kind=Kind.ACTIVATIONS)
        begin = stage_chunk.write(onward, ring.slot(slot))
        row_bytes = FLOAT_BYTES * computation.layers.facts.hidden
        computation.forward(chunk, given, self._payload(ring, slot, begin, row_bytes))
        extent = begin + chunk.rows * row_bytes
        return [signals.Filled(edge=ring.edge, slot=slot, extent=extent)]

    def _ending(
        self, host: stage_signals.Host, computation: Computation, chunk: Chunk, given: Payload
    ) -> list[stage_signals.Event]:
        """A token, where one is asked for."""
        if chunk.sampling is not None:
            sampling.check(chunk.sampling)
        computation.forward(chunk, given, None)
        if chunk.sampling is None:
            return []
        drawn = sampling.draw(computation.logits(chunk.rows - 1), chunk.sampling)
        ring, slot = self._empty_slot(host.outbound)
        result = Chunk(Kind.RESULT, chunk.session, 1, chunk.start + chunk.rows, chunk.step)
        begin = stage_chunk.write(result, ring.slot(slot))
        stage_chunk.RESULT.pack_into(ring.slot(slot), begin, *drawn)
        extent = begin + stage_chunk.RESULT.size
        return [signals.Filled(edge=ring.edge, slot=slot, extent=extent)]

    def _payload(self, ring: Ring, slot: int, begin: int, row_bytes: int) -> Payload:
        """What begins at ``begin`` of a slot, with room for as many rows as are computed."""
        host = self._host
        memory = ring.slot(slot)[begin:]
        if host is None or len(memory) < host.rows * row_bytes:
            raise WorkerFault(
                f"slots of edge {ring.edge} have {ring.capacity_bytes} bytes, too few for a chunk"
            )
        return Payload((ring.edge, slot, begin), memory)

    def _empty_slot(self, edge: int) -> tuple[Ring, int]:
        """A slot of ``edge`` to fill, waiting for one if need be."""
        ring = self._rings.ring(edge)
        while ring is not None and self._rings.ring(edge) is ring:
            self._look()
            if ring.free:
                return ring, ring.free.popleft()
            self._take(self._port.wait())
        raise _Dropped

    def _say_kernels(self) -> None:
        if self._computation is not None:
            made, since = self._computation.compiled, self._computation.compiled_since
            print(f"kernels: {made} before the first chunk, {since} since", file=sys.stderr)  # noqa: T201


def resident_bytes() -> int:
    """Memory of this process that is in use, from the kernel's own count."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
        for line in rollup:
            if line.startswith("Rss:"):
                return int(line.split()[1]) << 10
    raise WorkerFault("the kernel does not say how much memory this process has")
