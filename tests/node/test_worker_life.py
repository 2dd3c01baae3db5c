"""Commands reach a worker whole and in order, also when its pipe is full in the meantime."""

import os
import sys

import trio

from lensemble.edge.arena import Arena
from lensemble_node import signals
from lensemble_node.worker_life import Life, LineReader

PATIENCE_S = 20.0
ECHO = """
import os, sys
print("up", flush=True)
os.read(0, 1)
while line := os.read(0, 700):
    while line:
        line = line[os.write(1, line):]
"""
BURST, BURSTS = 1500, 3
"""A burst is more than a pipe holds."""


async def test_commands_keep_their_order_whether_the_pipe_has_room_or_not() -> None:
    arena = Arena.create(1 << 20)
    life = Life([sys.executable, "-c", ECHO], dict(os.environ), arena.fd)
    sent: list[bytes] = []
    got: list[bytes] = []

    def send(count: int) -> None:
        for _ in range(count):
            command = signals.Ready(edge=7, slot=len(sent) % 4, extent=len(sent))
            sent.append(signals.line(command))
            life.send(command)

    reader = LineReader(life.stdout, signals.MAX_LINE_BYTES)
    try:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(life.write)
                assert await reader.next() == b"up\n"
                for _ in range(BURSTS):
                    send(BURST)
                    while len(got) < len(sent) - 1:
                        got.append(await reader.next())
                        if len(got) % 7 == 0 and len(sent) < 2 * BURST:
                            send(1)
                nursery.cancel_scope.cancel()
    finally:
        life.kill("the test is over")
        with trio.CancelScope(shield=True):
            await life.wait()
            await life.close()
        arena.close()
    assert not life.killed_for or life.killed_for == "the test is over"
    assert got[1:] == sent[1 : len(got)]
    assert got[0] == sent[0][1:]
