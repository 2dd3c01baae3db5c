"""Weights over an edge: exactly what is asked for, and every way that does not work."""

import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from lensemble import identity
from lensemble.edge.arena import Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.errors import EdgeFault, StorageError, WeightsError
from lensemble.ids import EdgeId
from lensemble.transport.ends import ArenaLeases, RxEnd
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.transport.memory_wire import Weather
from lensemble_coord.inference.weights_out import Ranges, Sent, WeightsOut

CAPACITY = 8 + 100
CONTENT = bytes(index % 251 for index in range(2000))


class Wire:
    """A sender of weights and a receiver, linked."""

    def __init__(self, out: WeightsOut, leases: ArenaLeases, rx: RxEnd, weather: Weather) -> None:
        self.out, self.leases, self.rx, self.spec = out, leases, rx, rx.spec
        self.weather = weather
        self.pieces: dict[int, bytes] = {}

    async def take(self) -> None:
        while (landed := await self.rx.receive()) is not None:
            slot, extent = landed
            raw = bytes(self.rx.region.slot(slot)[:extent])
            self.rx.consumed(slot)
            self.pieces[struct.unpack_from("<Q", raw)[0]] = raw[8:]


@asynccontextmanager
async def wired(path: Path, capacity: int = CAPACITY) -> AsyncIterator[Wire]:
    network = MemoryNetwork()
    here, there = (network.driver(identity.generate().node) for _ in range(2))
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        await nursery.start(there.run)
        await there.dial(network.address(here.node))
        await here.accept()
        spec = EdgeSpec(EdgeId(7), here.node, there.node, capacity, 2)
        leases, region = ArenaLeases(Arena.create(1 << 21)), Arena.create(1 << 21).lease(spec)
        assert region is not None
        rx = RxEnd(spec, region, there)
        await nursery.start(rx.serve)
        weather = network.between(here.node, there.node)
        yield Wire(WeightsOut(path, here, leases), leases, rx, weather)
        nursery.cancel_scope.cancel()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(CONTENT)
    return path


async def test_the_ranges_that_are_asked_for_and_no_others(file: Path) -> None:
    ranges: Ranges = ((0, 24), (300, 450), (1999, 1))
    async with wired(file) as wire, trio.open_nursery() as nursery:
        nursery.start_soon(wire.take)
        sent = Sent()
        await wire.out.send(wire.spec, ranges, sent)
        assert (sent.done, sent.total) == (475, 475)
    raw = CONTENT
    assert sum(map(len, wire.pieces.values())) == 475
    for offset, piece in wire.pieces.items():
        assert raw[offset : offset + len(piece)] == piece
    assert all(len(piece) <= 100 for piece in wire.pieces.values())
    assert wire.leases.arena.leased_bytes() == 0


async def test_what_the_file_does_not_have_is_refused(file: Path) -> None:
    async with wired(file) as wire:
        with pytest.raises(WeightsError, match="2000"):
            await wire.out.send(wire.spec, ((1990, 11),), Sent())
        os.unlink(file)
        with pytest.raises(StorageError):
            await wire.out.send(wire.spec, ((0, 1),), Sent())
    assert wire.leases.arena.leased_bytes() == 0


async def test_a_receiver_that_is_gone_is_an_edge_fault(file: Path) -> None:
    async with wired(file) as wire:
        wire.rx.close()
        await wire.rx.over.wait()
        with trio.fail_after(20), pytest.raises(EdgeFault):
            await wire.out.send(wire.spec, ((0, 2000),), Sent())
    assert wire.leases.arena.leased_bytes() == 0


async def test_cancelled_in_the_midst_it_gives_its_ring_back(file: Path) -> None:
    os.truncate(file, 64 << 20)
    async with wired(file) as wire:
        with trio.move_on_after(0.2) as patience:
            await wire.out.send(wire.spec, ((0, 64 << 20),), Sent())
        assert patience.cancelled_caught
        assert wire.leases.arena.leased_bytes() == 0


async def test_a_slow_path_is_seen_as_slow_as_it_is(file: Path, autojump_clock: MockClock) -> None:
    # Reads happen in threads: the clock waits a little for them.
    autojump_clock.autojump_threshold = 0.005
    os.truncate(file, 16 << 20)
    async with wired(file, 1 << 18) as wire, trio.open_nursery() as nursery:
        wire.weather.bytes_per_s = 2_000_000
        nursery.start_soon(wire.take)
        sent = Sent()
        await wire.out.send(wire.spec, ((0, 16 << 20),), sent)
    assert sent.busy.bytes_per_s == pytest.approx(2_000_000, rel=0.02)
