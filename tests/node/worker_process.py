"""A real worker process over a real arena, driven line by line as its daemon would."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lensemble import blob, seeds
from lensemble.edge.arena import Arena, Region
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import Digest, EdgeId, NodeId, SlotIndex
from lensemble.params import parameter_digest
from lensemble.workload import NoopTask, Workload, initial_parameters, layout
from lensemble_node import signals
from lensemble_node.supervisor import Launch

FEDERATION = "5" * 32
NODE = NodeId("a" * 64)
COORDINATOR = NodeId("c" * 64)
STATE_EDGE, UPDATE_EDGE = EdgeId(11), EdgeId(12)


def noop(parameters: int = 10_000) -> Workload:
    return Workload(name="noop", task=NoopTask(parameters=parameters))


class WorkerProcess:
    """The pipes, the arena and the two rings of one worker."""

    def __init__(
        self,
        state_dir: Path,
        workload: Workload,
        capacity_bytes: int = 1 << 16,
        **launch: object,
    ) -> None:
        self.workload = workload
        self.layout = layout(workload)
        self.state_dir = state_dir
        self.capacity_bytes = capacity_bytes
        self.arena = Arena.create(64 << 20)
        self.launch = Launch(self.arena.fd, self.arena.nbytes, **launch)
        self.process = subprocess.Popen(
            self.launch.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self.arena.fd,),
            env=self.launch.environment(),
        )
        self.state = self._lease(STATE_EDGE, COORDINATOR, NODE)
        self.update = self._lease(UPDATE_EDGE, NODE, COORDINATOR)

    def _lease(self, edge: EdgeId, producer: NodeId, consumer: NodeId) -> Region:
        region = self.arena.lease(EdgeSpec(edge, producer, consumer, self.capacity_bytes))
        assert region is not None
        return region

    def tell(self, *commands: signals.Command) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(signals.line(command) for command in commands))
        self.process.stdin.flush()

    def hear(self) -> signals.Event:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(self.end())
        return signals.parse_event(line)

    def hear_until(self, kind: type, into: list[bytes] | None = None) -> signals.Event:
        """Events up to one of ``kind``; chunks of the update are taken in meanwhile."""
        while True:
            event = self.hear()
            if isinstance(event, signals.Filled):
                self._drain(event, into)
            elif isinstance(event, kind):
                return event

    def _drain(self, filled: signals.Filled, into: list[bytes] | None) -> None:
        if into is not None:
            into.append(bytes(self.update.slot(SlotIndex(filled.slot))[: filled.extent]))
        self.tell(signals.Released(edge=filled.edge, slot=filled.slot))

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=10)
        return self.process.returncode, errors.decode()

    # ---- the usual steps ----

    def configure(self, *, masked: bool = False, **more: object) -> signals.Configured:
        self.tell(
            signals.Configure(
                workload=self.workload.canonical().decode(),
                federation=FEDERATION,
                node=NODE,
                state_dir=str(self.state_dir),
                masked=masked,
                **({"path": ""} | more),
            )
        )
        event = self.hear()
        assert isinstance(event, signals.Configured), event
        return event

    def attach(self) -> None:
        for edge, region, direction in (
            (STATE_EDGE, self.state, "rx"),
            (UPDATE_EDGE, self.update, "tx"),
        ):
            self.tell(
                signals.Attach(
                    edge=edge,
                    direction=direction,
                    offset=region.offset,
                    capacity_bytes=self.capacity_bytes,
                    slots=2,
                )
            )
            assert self.hear() == signals.Attached(edge=edge)

    def bind(self, at: tuple[int, int], digest: Digest) -> int:
        self.tell(signals.Bind(round=at[0], attempt=at[1], prior_digest=digest))
        bound = self.hear()
        assert isinstance(bound, signals.Bound), bound
        return bound.holds_bytes

    def give(self, chunk: bytes, slot: int = 0) -> list[signals.Event]:
        """Land ``chunk`` in a slot; what the worker says up to ``Consumed``."""
        self.state.slot(SlotIndex(slot))[: len(chunk)] = chunk
        self.tell(signals.Ready(edge=STATE_EDGE, slot=slot, extent=len(chunk)))
        said: list[signals.Event] = []
        while True:
            event = self.hear()
            if isinstance(event, signals.Consumed):
                return said
            said.append(event)

    def chunks(self, at: tuple[int, int], flat: np.ndarray, offset: int = 0) -> Iterator[bytes]:
        digest = parameter_digest(self.layout, flat)
        header = blob.BlobHeader(
            kind="state",
            federation=FEDERATION,
            round=at[0],
            attempt=at[1],
            total_bytes=self.layout.nbytes,
            offset=offset,
            chunk_bytes=self.capacity_bytes,
            layout_digest=self.layout.digest,
            digest_hint=digest,
        )
        envelope = memoryview(bytearray(blob.ENVELOPE_BYTES))
        yield bytes(envelope[: blob.header_chunk(header, envelope)])
        raw = flat.tobytes()
        for start, length in blob.data_ranges(header):
            yield raw[start : start + length]
        yield bytes(envelope[: blob.trailer_chunk(digest, b"", envelope)])

    def fetch(self, at: tuple[int, int], flat: np.ndarray) -> Digest:
        """Bind and hand over the state; its digest."""
        digest = parameter_digest(self.layout, flat)
        held = self.bind(at, digest)
        said: list[signals.Event] = []
        if held == self.layout.nbytes:
            said = [self.hear()]
        else:
            for chunk in self.chunks(at, flat, held):
                said += self.give(chunk)
        assert digest in [each.digest for each in said if isinstance(each, signals.StateHeld)]
        return digest

    def train_command(
        self, at: tuple[int, int], digest: Digest, spent_before: int = 0
    ) -> signals.Train:
        return signals.Train(
            round=at[0],
            attempt=at[1],
            prior_digest=digest,
            sketch_seed=seeds.sketch(self.workload.root_seed, at[0]),
            global_step=0,
            spent_before=spent_before,
        )

    def train(self, at: tuple[int, int], digest: Digest, spent_before: int = 0) -> signals.Trained:
        self.tell(self.train_command(at, digest, spent_before))
        event = self.hear_until(signals.Trained)
        assert isinstance(event, signals.Trained)
        return event

    def send(self, at: tuple[int, int]) -> list[bytes]:
        """The chunks of the update's blob, in order."""
        received: list[bytes] = []
        self.tell(signals.Send(edge=UPDATE_EDGE, round=at[0], attempt=at[1], signature="ab" * 64))
        self.hear_until(signals.Sent, received)
        return received


@contextmanager
def worker(
    state_dir: Path,
    workload: Workload | None = None,
    capacity_bytes: int = 1 << 16,
    **launch: object,
) -> Iterator[WorkerProcess]:
    started = WorkerProcess(state_dir, workload or noop(), capacity_bytes, **launch)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        started.arena.close()


def warm_start(workload: Workload) -> np.ndarray:
    return initial_parameters(workload)
