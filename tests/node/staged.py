"""A coordinator that runs a chain of stages as a test says, on node daemons in this process."""

import itertools
import struct
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import trio

from lensemble import identity, stage_chunk
from lensemble.config import validate
from lensemble.edge.arena import Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId
from lensemble.stage_chunk import Chunk, Kind, Sampling
from lensemble.ticket import Membership
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.wire import messages, stages
from lensemble_node import daemon
from lensemble_node.config import NodeConfig
from lensemble_node.stage_process import Engine
from tests.node.scripted import FEDERATION, PATIENCE_S, Running, Session
from tests.node.stage_play import ENGINE, fence, opening, provision, teardown

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Engine(
    ENGINE,
    {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    program=(sys.executable, "-P", "-X", "faulthandler", str(ROOT / "tests/node/stage_script.py")),
)
Message = TypeVar("Message")
MakeDriver = Callable[[identity.Identity], Driver]


class Node(Running):
    """A daemon, and its session as the coordinator sees it."""

    session: Session
    inventory: stages.Inventory

    @property
    def node(self) -> NodeId:
        return self.serving.driver.node

    @property
    def host(self):  # noqa: ANN201 - the daemon's own
        return self.serving.member.stages

    async def hear(self, kind: type[Message], **wanted: object) -> Message:
        """The next message of ``kind`` with these fields, heard already or to come."""
        with trio.fail_after(PATIENCE_S):
            while True:
                for index, message in enumerate(self.session.heard):
                    if isinstance(message, kind) and all(
                        getattr(message, name) == value for name, value in wanted.items()
                    ):
                        return self.session.heard.pop(index)
                # Whatever comes next is kept first, then looked at.
                last = await self.session.hear(messages.FromNode)
                assert last is self.session.heard[-1]


class Floor:
    """The coordinator's driver, and the nodes that stages are put on."""

    def __init__(
        self, directory: Path, nursery: trio.Nursery, driver: Driver, make: MakeDriver
    ) -> None:
        self.directory = directory
        self.nursery = nursery
        self.driver = driver
        self.make = make
        self.leases = ArenaLeases(Arena.create(1 << 24))
        self.nodes: list[Node] = []

    async def node(self, engine: Engine = SCRIPT, *, trains: bool = False, **changes: Any) -> Node:
        """Another daemon, joined and welcomed."""
        index = len(self.nodes)
        tree = {
            "name": f"node-{index}",
            "state_dir": str(self.directory / f"state-{index}"),
            "listen": {"reconnect_backoff_s": 0.05, "reconnect_backoff_max_s": 0.2},
            "share": {"plain": True},
            "inference": {"memory_bytes": 1 << 30, "sources": ["/"]},
        }
        config = validate({**tree, **changes}, NodeConfig, path=self.directory / "node.toml")
        config.state_dir.mkdir(exist_ok=True, parents=True)
        who = identity.load_or_create(config.state_dir / "identity.key")
        belongs = Membership(self.driver.node, self.driver.addresses(), FEDERATION)
        made = Node()

        async def run(*, task_status: trio.TaskStatus[daemon.Serving]) -> None:
            with made.scope:
                await daemon.serve(
                    config, self.make(who), belongs, engine=engine, task_status=task_status
                )
            made.ended.set()

        made.serving = await self.nursery.start(run)
        self.nodes.append(made)
        await self.welcome(made, trains=trains)
        return made

    async def welcome(self, node: Node, epoch: int = 0, *, trains: bool = False) -> None:
        """The next link, which is of ``node``."""
        with trio.fail_after(PATIENCE_S):
            link = await self.driver.accept()
        node.session = Session(link, self.driver, epoch or len(self.nodes))
        # Mostly nothing is trained: what a training worker does is no part of these tests.
        await node.session.welcome(trains=trains)
        node.inventory = await node.hear(stages.Inventory)

    async def run(
        self, *nodes: Node, number: int = 1, place: str = "echo", **changes: Any
    ) -> "Run":
        """A run over ``nodes`` in this order; ``place`` tells its workers what to do."""
        made = Run(self, nodes, number, place, changes)
        await made.prepare()
        return made


class Run:
    def __init__(
        self,
        floor: Floor,
        nodes: tuple[Node, ...],
        number: int,
        place: str,
        changes: dict[str, Any],
    ) -> None:
        self.floor = floor
        self.nodes = nodes
        self.run = f"{number:016x}"
        self.step = 0
        base = number * 1000 + changes.get("run_epoch", 1) * 100
        ring = [floor.driver.node, *(node.node for node in nodes), floor.driver.node]
        self.specs = [
            EdgeSpec(EdgeId(base + index), producer, consumer, 4096)
            for index, (producer, consumer) in enumerate(itertools.pairwise(ring))
        ]
        places = [
            stages.Address(node=node.node, addresses=node.inventory.addresses) for node in nodes
        ]
        here = stages.Address(node=floor.driver.node)
        ends = [here, *places, here]
        self.orders = [
            provision(
                node=node.node,
                run=self.run,
                epoch=node.session.epoch,
                stage=index,
                stages=len(nodes),
                inbound=self.specs[index],
                outbound=self.specs[index + 1],
                upstream=ends[index],
                downstream=ends[index + 2],
                **{"source": stages.FromPath(path=f"/script/{place}"), **changes},
            )
            for index, node in enumerate(nodes)
        ]

    async def prepare(self) -> None:
        driver, leases = self.floor.driver, self.floor.leases
        first, last = self.specs[0], self.specs[-1]
        self.tx = TxEnd(first, await leases.lease(first), driver)
        self.rx = RxEnd(last, await leases.lease(last), driver)
        await self.floor.nursery.start(self.rx.serve)

    async def say(self, what: Callable[[stages.StageProvision], Any]) -> None:
        for node, order in zip(self.nodes, self.orders, strict=True):
            await node.session.say(what(order))

    async def hear(self, kind: type[Message]) -> list[Message]:
        return [await node.hear(kind, run=self.run) for node in self.nodes]

    async def provision(self) -> list[stages.StageReady]:
        await self.say(lambda order: order)
        return await self.hear(stages.StageReady)

    async def open(self) -> None:
        await self.say(opening)
        await self.opened()

    async def opened(self) -> None:
        """One run after the other where they share a node: a session has one reader."""
        await self.hear(stages.StageOpened)
        await self.floor.nursery.start(self.tx.serve)

    async def start(self) -> "Run":
        await self.provision()
        await self.open()
        return self

    async def ask(self, *tokens: int) -> int:
        """Send ``tokens`` as one chunk; the token that comes back."""
        self.step += 1
        await self.send(Chunk(Kind.TOKENS, 0, len(tokens), 0, self.step, Sampling()), *tokens)
        token, step = await self.result()
        assert step == self.step
        return token

    async def send(self, chunk: Chunk, *tokens: int) -> None:
        with trio.fail_after(PATIENCE_S):
            slot = await self.tx.acquire()
        view = self.tx.region.slot(slot)
        begin = stage_chunk.write(chunk, view)
        struct.pack_into(f"<{len(tokens)}I", view, begin, *tokens)
        self.tx.filled(slot, begin + 4 * len(tokens))

    async def result(self) -> tuple[int, int]:
        """The next token that comes back, and its step."""
        with trio.fail_after(PATIENCE_S):
            back = await self.rx.receive()
        assert back is not None
        slot, extent = back
        result, payload = stage_chunk.read(self.rx.region.slot(slot)[:extent])
        assert result.kind == Kind.RESULT
        token, _ = stage_chunk.RESULT.unpack(payload)
        self.rx.consumed(slot)
        return int(token), result.step

    async def look(self, index: int) -> stages.StageSeen:
        order = self.orders[index]
        await self.nodes[index].session.say(stages.StageLook(**fence(order)))
        return await self.nodes[index].hear(stages.StageSeen, run=self.run)

    async def tear_down(self) -> list[stages.StageTornDown]:
        await self.say(teardown)
        answers = await self.hear(stages.StageTornDown)
        self.tx.close()
        self.rx.close()
        return answers


@asynccontextmanager
async def floor(directory: Path, driver: Driver, make: MakeDriver) -> AsyncIterator[Floor]:
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        yield Floor(directory, nursery, driver, make)
        nursery.cancel_scope.cancel()
