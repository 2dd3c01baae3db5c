"""A coordinator that does what a test says, and a node daemon, over a network in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import trio

from lensemble import blob, identity, seeds
from lensemble.config import validate
from lensemble.edge.arena import Arena
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import Digest, EdgeId, FederationId, NodeId
from lensemble.params import parameter_digest
from lensemble.ticket import Membership
from lensemble.transport.driver import Link
from lensemble.transport.endpoint import EndpointDriver, EndpointSettings
from lensemble.transport.ends import ArenaLeases, RxEnd, TxEnd
from lensemble.transport.links import Pace
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import codec, messages
from lensemble.workload import NoopTask, Workload, initial_parameters, layout
from lensemble_node import daemon
from lensemble_node.config import NodeConfig

FEDERATION = FederationId("f" * 32)
COORDINATOR = NodeId("c" * 64)
CAPACITY = 1 << 14
PATIENCE_S = 20.0
WORKLOAD = Workload(name="noop", root_seed=3, task=NoopTask(parameters=20_000))
QUICK = Pace(heartbeat_s=0.2, heartbeat_timeout_s=0.6)
CALM = Pace(heartbeat_s=1.0, heartbeat_timeout_s=20.0)
"""For many nodes on a busy machine, where no test is about silence."""

NOBODY = messages.LastRecord(round=-1, digest=Digest("0" * 64), contributors=())

Message = TypeVar("Message", bound=messages.FromNode)


class Session:
    """One link of the node, as its coordinator sees it."""

    def __init__(
        self, link: Link, driver: EndpointDriver, epoch: int, workload: Workload = WORKLOAD
    ) -> None:
        self.link = link
        self.workload = workload
        self.epoch = epoch
        self.heard: list[messages.FromNode] = []
        self.layout = layout(self.workload)
        self.flat = initial_parameters(self.workload)
        self.digest = parameter_digest(self.layout, self.flat)
        self._driver = driver
        self._leases = ArenaLeases(Arena.create(1 << 24))
        self._next_edge = epoch * 1000
        self.tx: TxEnd
        self.rx: RxEnd

    @property
    def node(self) -> NodeId:
        return self.link.peer

    async def say(self, message: messages.FromCoordinator) -> None:
        await self.link.send(codec.encode(message))

    async def hear(self, kind: type[Message]) -> Message:
        """The next message of ``kind``; what comes before it is kept in ``heard``."""
        with trio.fail_after(PATIENCE_S):
            while True:
                message = codec.decode_from_node(await self.link.receive())
                self.heard.append(message)
                if isinstance(message, kind):
                    return message

    async def welcome(self, **changes: object) -> messages.Join:
        join = await self.hear(messages.Join)
        fields: dict[str, Any] = {
            "federation": FEDERATION,
            "epoch": self.epoch,
            "build": "lensemble 0",
            "coordinator": "scripted",
            "workload": self.workload.canonical(),
            "config_hash": self.workload.digest,
            "layout_digest": self.layout.digest,
            "aggregation": "plain",
            "last": NOBODY,
        }
        await self.say(messages.Welcome(**{**fields, **changes}))
        return join

    def specs(self, capacity_bytes: int = CAPACITY) -> tuple[EdgeSpec, EdgeSpec]:
        self._next_edge += 2
        first, second = EdgeId(self._next_edge), EdgeId(self._next_edge + 1)
        return (
            EdgeSpec(first, COORDINATOR, self.node, capacity_bytes),
            EdgeSpec(second, self.node, COORDINATOR, capacity_bytes),
        )

    async def provision(self, nursery: trio.Nursery) -> tuple[EdgeSpec, EdgeSpec]:
        state, update = self.specs()
        self.rx = RxEnd(update, await self._leases.lease(update), self._driver)
        self.tx = TxEnd(state, await self._leases.lease(state), self._driver)
        await nursery.start(self.rx.serve)
        await self.say(
            messages.Provision(federation=FEDERATION, epoch=self.epoch, state=state, update=update)
        )
        acknowledged = await self.hear(messages.Provisioned)
        assert acknowledged.edges == (state.edge, update.edge)
        await nursery.start(self.tx.serve)
        return state, update

    async def open(self, round_index: int = 0, attempt: int = 0, **changes: object) -> None:
        fields: dict[str, Any] = {
            "federation": FEDERATION,
            "epoch": self.epoch,
            "round": round_index,
            "attempt": attempt,
            "prior_digest": self.digest,
            "layout_digest": self.layout.digest,
            "config_hash": self.workload.digest,
            "roster_digest": messages.roster_digest([self.node]),
            "sketch_seed": seeds.sketch(self.workload.root_seed, round_index),
            "inner_steps": self.workload.inner.steps,
            "global_step": round_index * self.workload.inner.steps,
            "state_bytes": self.layout.nbytes,
            "field": messages.FieldParams(k=self.workload.field.k, n_max=self.workload.field.n_max),
            "answer_within_s": 30.0,
            "probe_hash": self.workload.objective.probe_hash or None,
        }
        await self.say(messages.RoundOpen(**{**fields, **changes}))

    async def bind(self, round_index: int = 0, attempt: int = 0) -> messages.Commitment:
        """Open the round, check the signature of the commitment, give what is missing."""
        await self.open(round_index, attempt)
        commitment = await self.hear(messages.Commitment)
        payload = messages.commitment_payload(
            FEDERATION,
            round_index,
            attempt,
            commitment.dataset_root,
            self.workload.digest,
            keys=commitment.keys,
        )
        assert identity.verify(self.node, commitment.signature, payload)
        return commitment

    async def give_state(
        self, round_index: int = 0, attempt: int = 0, offset: int = 0, chunks: int = 1 << 30
    ) -> None:
        """Send the state from ``offset`` on; at most ``chunks`` chunks of its blob."""
        header = blob.BlobHeader(
            kind="state",
            federation=FEDERATION,
            round=round_index,
            attempt=attempt,
            total_bytes=self.layout.nbytes,
            offset=offset,
            chunk_bytes=CAPACITY,
            layout_digest=self.layout.digest,
            digest_hint=self.digest,
        )
        raw = memoryview(self.flat.tobytes())
        pieces = [raw[start : start + length] for start, length in blob.data_ranges(header)]
        slot = await self.tx.acquire()
        self.tx.filled(slot, blob.header_chunk(header, self.tx.region.slot(slot)))
        for piece in pieces[:chunks]:
            slot = await self.tx.acquire()
            self.tx.region.slot(slot)[: len(piece)] = piece
            self.tx.filled(slot, len(piece))
        if chunks > len(pieces):
            slot = await self.tx.acquire()
            trailer = blob.trailer_chunk(self.digest, b"", self.tx.region.slot(slot))
            self.tx.filled(slot, trailer)

    async def collect(
        self,
        round_index: int = 0,
        attempt: int = 0,
        roster: tuple[NodeId, ...] = (),
        envelopes: tuple[messages.Envelope, ...] = (),
    ) -> None:
        await self.say(
            messages.Collect(
                federation=FEDERATION,
                epoch=self.epoch,
                round=round_index,
                attempt=attempt,
                roster=roster or (self.node,),
                send_within_s=30.0,
                envelopes=envelopes,
            )
        )

    async def take_update(self, update: messages.Update) -> np.ndarray:
        """Read the announced blob, signature checked; the words."""
        payload = messages.update_payload(
            FEDERATION, update.round, update.attempt, update.dataset_root, update.digest
        )
        assert identity.verify(self.node, update.signature, payload)
        reader = blob.BlobReader(
            blob.Expected(
                "update", FEDERATION, update.round, update.attempt, self.layout, update.digest
            ),
            verify=lambda _, signature: identity.verify(self.node, signature, payload),
        )
        words = bytearray()
        with trio.fail_after(PATIENCE_S):
            while not reader.complete:
                chunk = await self.rx.receive()
                assert chunk is not None
                slot, extent = chunk
                event = reader.feed(self.rx.region.slot(slot)[:extent])
                if isinstance(event, blob.Data):
                    words += event.view
                self.rx.consumed(slot)
        return np.frombuffer(bytes(words), dtype="<u4")

    async def close(self, round_index: int = 0, attempt: int = 0, **changes: object) -> None:
        fields: dict[str, Any] = {
            "federation": FEDERATION,
            "epoch": self.epoch,
            "round": round_index,
            "attempt": attempt,
            "outcome": "closed",
            "digest": Digest(f"{round_index + 1:064x}"),
            "contributors": (self.node,),
        }
        await self.say(messages.RoundClose(**{**fields, **changes}))

    async def whole_round(self, round_index: int = 0, attempt: int = 0) -> np.ndarray:
        commitment = await self.bind(round_index, attempt)
        if commitment.holds_bytes < self.layout.nbytes:
            await self.give_state(round_index, attempt, commitment.holds_bytes)
        await self.collect(round_index, attempt)
        words = await self.take_update(await self.hear(messages.Update))
        await self.close(round_index, attempt)
        return words


class Running:
    """A node daemon in this process."""

    serving: daemon.Serving

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()

    async def stop(self) -> None:
        """As a signal to terminate does it; returns when everything is gone."""
        self.scope.cancel()
        with trio.fail_after(20):
            await self.ended.wait()


class Stage:
    """The network, the coordinator's driver, and node daemons that come and go."""

    def __init__(self, directory: Path, nursery: trio.Nursery, pace: Pace) -> None:
        self.directory = directory
        self.nursery = nursery
        self.network = MemoryNetwork()
        self.pace = EndpointSettings(pace)
        self.driver = self.network.driver(COORDINATOR, self.pace)
        self.epoch = 0
        self.workload = WORKLOAD

    def config(self, **changes: object) -> NodeConfig:
        tree = {
            "name": "node",
            "state_dir": str(self.directory / "state"),
            "worker": {"restart_backoff_s": 0.05, "restart_backoff_max_s": 0.2},
            "listen": {"reconnect_backoff_s": 0.05, "reconnect_backoff_max_s": 0.2},
            "share": {"plain": True},
        }
        return validate({**tree, **changes}, NodeConfig, path=self.directory / "node.toml")

    async def start_node(self, *, belongs: bool = True, **changes: object) -> "Running":
        config = self.config(**changes)
        config.state_dir.mkdir(exist_ok=True, parents=True)
        who = identity.load_or_create(config.state_dir / "identity.key")
        driver = self.network.driver(who.node, self.pace)
        joined = Membership(COORDINATOR, self.driver.addresses(), FEDERATION) if belongs else None
        running = Running()

        async def run(*, task_status: trio.TaskStatus[daemon.Serving]) -> None:
            with running.scope:
                await daemon.serve(config, driver, joined, task_status=task_status)
            running.ended.set()

        running.serving = await self.nursery.start(run)
        return running

    async def session(self) -> Session:
        """The next link that the node opens."""
        self.epoch += 1
        with trio.fail_after(PATIENCE_S):
            return Session(await self.driver.accept(), self.driver, self.epoch, self.workload)

    async def joined(self, **changes: object) -> Session:
        """The next link, welcomed and provisioned."""
        session = await self.session()
        await session.welcome(**changes)
        await session.provision(self.nursery)
        return session


@asynccontextmanager
async def stage(directory: Path, pace: Pace = QUICK) -> AsyncIterator[Stage]:
    async with trio.open_nursery() as nursery:
        made = Stage(directory, nursery, pace)
        await nursery.start(made.driver.run)
        yield made
        nursery.cancel_scope.cancel()
