"""A stage's worker without a model: it speaks the protocol and passes on what it gets.

The file that ``Host`` names says how it behaves: ``echo``, ``never`` (gets ready), ``fails``,
``garbage`` (on stdout), ``stubborn`` (does not stop), ``liar`` (hands back a slot that it does not
have), ``picky`` (refuses every chunk).
"""

import argparse
import struct
import sys
import time

from lensemble import stage_chunk
from lensemble.edge.arena import Arena
from lensemble.stage_chunk import Chunk, Kind
from lensemble_node import signals, stage_signals
from lensemble_node.worker import guard
from lensemble_node.worker.port import DaemonGone, Port
from lensemble_node.worker.rings import Rings


class Script:
    def __init__(self, port: Port, arena: Arena) -> None:
        self.port = port
        self.rings = Rings(arena)
        self.host: stage_signals.Host
        self.waiting: list[signals.Ready] = []
        self.fetched = 0
        self.behaviour = ""

    def run(self) -> None:
        while True:
            match self.port.wait():
                case stage_signals.Host() as host:
                    self.begin(host)
                case signals.Attach() as attach:
                    self.rings.attach(attach)
                    self.port.say(signals.Attached(edge=attach.edge))
                case signals.Ready() as ready if ready.edge == self.host.weights:
                    self.take(ready)
                case signals.Ready() as ready:
                    self.waiting.append(ready)
                case signals.Released(edge=edge, slot=slot):
                    self.rings.ring(edge).released(slot)
                case signals.Stop() if self.behaviour != "stubborn":
                    return
            self.compute()

    def begin(self, host: stage_signals.Host) -> None:
        self.host, self.behaviour = host, host.place.rpartition("/")[2]
        print(f"hosting {host.first}:{host.last}", file=sys.stderr, flush=True)
        match self.behaviour:
            case "fails":
                failed = stage_signals.StageFailed(
                    code="weights_short", message="bodies kept ending early", remediation="again"
                )
                self.port.say(failed)
                sys.exit(1)
            case "garbage":
                self.port.say(signals.Bound(round=0, attempt=0, holds_bytes=1))
            case "never":
                self.port.say(stage_signals.Advanced(phase="fetching", done=1, total=9))
                return
        if host.source == "edge":
            self.port.say(stage_signals.Wants(ranges=((0, 100), (500, 100))))
        else:
            self.finish()

    def finish(self) -> None:
        for phase in ("fetching", "loading", "compiling"):
            self.port.say(stage_signals.Advanced(phase=phase, done=2, total=2))
        self.port.say(
            stage_signals.Hosted(
                weights_bytes=64, resident_bytes=1 << 20, fetched_bytes=self.fetched, seconds=0.1
            )
        )

    def take(self, ready: signals.Ready) -> None:
        self.fetched += ready.extent - 8
        self.port.say(signals.Consumed(edge=ready.edge, slot=ready.slot))
        if self.fetched == 200:
            self.finish()

    def compute(self) -> None:
        out = self.rings.ring(self.host.outbound)
        while self.waiting and out is not None and out.free:
            ready = self.waiting.pop(0)
            began = time.monotonic_ns()
            into = self.rings.ring(self.host.inbound)
            chunk, payload = stage_chunk.read(into.slot(ready.slot)[: ready.extent])
            if self.behaviour == "picky":
                self.port.say(
                    stage_signals.RefusedChunk(
                        step=chunk.step, code="chunk_refused", message="it is not finite"
                    ),
                    signals.Consumed(edge=self.host.inbound, slot=ready.slot),
                )
                continue
            slot = out.free.popleft()
            extent = self.answer(chunk, bytes(payload), out.slot(slot))
            if self.behaviour == "liar":
                slot = 1 - slot
                self.port.say(signals.Consumed(edge=self.host.inbound, slot=1 - ready.slot))
            if extent:
                self.port.say(signals.Filled(edge=self.host.outbound, slot=slot, extent=extent))
            else:
                out.free.append(slot)
            done = time.monotonic_ns()
            self.port.say(
                stage_signals.Computed(
                    step=chunk.step, rows=chunk.rows, began_ns=began, ended_ns=done
                )
            )
            self.port.say(signals.Consumed(edge=self.host.inbound, slot=ready.slot))

    def answer(self, chunk: Chunk, payload: bytes, into: memoryview) -> int:
        if self.host.stage < self.host.stages - 1:
            sent = Chunk(
                Kind.ACTIVATIONS,
                chunk.session, chunk.rows, chunk.start, chunk.step, chunk.sampling,
            )  # fmt: skip
            begin = stage_chunk.write(sent, into)
            into[begin : begin + len(payload)] = payload
            return begin + len(payload)
        if chunk.sampling is None:
            return 0
        result = Chunk(Kind.RESULT, chunk.session, 1, chunk.start, chunk.step)
        begin = stage_chunk.write(result, into)
        token = sum(struct.unpack(f"<{chunk.rows}I", payload[: 4 * chunk.rows]))
        stage_chunk.RESULT.pack_into(into, begin, token, 0.0)
        return begin + stage_chunk.RESULT.size


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("arena-fd", "arena-bytes", "memory-bytes", "niceness", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    guard.die_with(options.parent)
    port = Port(
        0, guard.keep_stdout_clean(), stage_signals.parse_command, stage_signals.MAX_LINE_BYTES
    )
    try:
        Script(port, Arena.attach(options.arena_fd)).run()
    except DaemonGone:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
