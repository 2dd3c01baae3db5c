"""Large files are freed in threads: the event loop would stand still for as long as that takes."""

import threading
from pathlib import Path

import trio

from lensemble.wire import messages
from lensemble_coord.training.spool import Spool, SpoolFile
from tests.coord.test_coordinator import bench


class Noting(Spool):
    """A spool that notes in which threads its files are closed."""

    def __init__(self, like: Spool) -> None:
        super().__init__(like.directory, 1 << 20, like.update_bytes)
        self.threads: list[int] = []
        self.three = threading.Event()

    def give_back(self, spooled: SpoolFile) -> None:
        self.threads.append(threading.get_ident())
        super().give_back(spooled)
        if len(self.threads) == 3:
            self.three.set()


async def test_no_update_is_freed_by_the_loop(tmp_path: Path) -> None:
    """Neither one that was summed, nor one that was refused half-way, nor one of an abort."""
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
        spool = coordinator.serving.store.spool = Noting(coordinator.serving.store.spool)
        await coordinator.serving.wait_for_nodes(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(a.take_part, 1)
            nursery.start_soon(b.take_part, 2)
            opening = await c.wait_for(messages.RoundOpen)
            await c.bind(opening)
            await c.wait_for(messages.Collect)
            signature = await c.announce(opening, c.words(3))
            await c.send(opening, c.words(4), signature)
            await c.wait_for(messages.Refused)
        assert await trio.to_thread.run_sync(spool.three.wait, 10)
        assert threading.get_ident() not in spool.threads
