"""The coordinator daemon, from the state directory's lock to the control socket."""

import secrets
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import trio

from lensemble import state_dir
from lensemble.config import load
from lensemble.ctl import server
from lensemble.edge.arena import Arena
from lensemble.ids import Digest, FederationId, NodeId
from lensemble.transport.driver import Driver
from lensemble.transport.ends import ArenaLeases
from lensemble.workload import NoopTask, Workload
from lensemble_coord import members
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.ctl import Answers, routed
from lensemble_coord.draining import Draining
from lensemble_coord.drains import Drains
from lensemble_coord.http import door
from lensemble_coord.http.parts import Parts
from lensemble_coord.inference.answers import ModelAnswers
from lensemble_coord.inference.deployment import Surroundings
from lensemble_coord.inference.orchestrator import Orchestrator
from lensemble_coord.training.coordinator import RoundEnded, Rounds, RunEnded
from lensemble_coord.training.gate_program import PROGRAM
from lensemble_coord.training.gatekeeper import Gatekeeper
from lensemble_coord.training.journal import Journal
from lensemble_coord.training.reception import Reception
from lensemble_coord.training.store import Store


class Serving(msgspec.Struct, frozen=True):
    """A daemon that serves, for those who run one inside their own process."""

    config: CoordinatorConfig
    store: Store
    driver: Driver
    rounds: Rounds
    reception: Reception
    answers: Answers
    orchestrator: Orchestrator
    models: ModelAnswers
    draining: Draining
    members: members.Members

    @property
    def federation(self) -> FederationId:
        return self.store.federation

    @property
    def surfaces(self) -> Mapping[str, str]:
        """Where HTTP is served: the address of ``http`` and of ``metrics``."""
        return self.answers.observer.surfaces

    @property
    def digest(self) -> Digest:
        return self.rounds.state.ground.digest

    @property
    def headline(self) -> str:
        """The round and what it waits for, in a line."""
        here = self.answers.observer.status()
        return f"round {here.round.index} {here.round.state}: {here.round.reason}"

    def adopt(self, config: CoordinatorConfig) -> frozenset[str]:
        """Admit by ``config`` from now on; returns the keys that need no restart."""
        self.reception.admission = config.admission
        return frozenset({"admission.allow", "admission.invites"})

    @property
    def closed_rounds(self) -> list[RoundEnded]:
        news = self.rounds.news_since(0)
        return [each for each in news if isinstance(each, RoundEnded) and each.closed]

    async def admit(self, node: NodeId, name: str) -> None:
        """Put ``node`` on the roster without an invite."""
        await trio.to_thread.run_sync(self.store.admit, node, name, "config")

    async def wait_for_nodes(self, count: int) -> None:
        """Wait until ``count`` nodes have joined and their edges are provisioned."""
        while len(self.rounds.state.ground.here) < count:
            await self.rounds.changed.wait()

    async def run_rounds(self, rounds: int) -> RunEnded:
        """Run ``rounds`` rounds and wait for their end."""
        number = self.rounds.published
        run = await self.rounds.ask(rounds)
        while True:
            changed = self.rounds.changed
            for news in self.rounds.news_since(number):
                if isinstance(news, RunEnded) and news.run == run.run:
                    return news
            await changed.wait()


LAST_WORD_S = 0.1
"""Between the last datagram of a coordinator that goes away and the end of its links."""

Farewells: TypeAlias = list[Callable[[], None]]

NOTHING = Workload(name="none", task=NoopTask(parameters=1))
"""Stands in the ledger of a federation that trains nothing; never trained."""


def workload_of(config: CoordinatorConfig) -> Workload:
    """The workload file of ``config``, or ``NOTHING``.

    Raises:
        ConfigError: it cannot be read, or is not a workload.
    """
    return NOTHING if config.workload is None else load(config.workload, Workload)


async def serve(
    config: CoordinatorConfig,
    driver: Driver,
    *,
    gate_program: tuple[str, ...] = PROGRAM,
    task_status: trio.TaskStatus[Serving] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; started once nodes and ``lensemblectl`` can connect.

    ``gate_program`` tests states on public data, if the configuration names any.

    Raises:
        OperatorError, ArtifactError: the state directory, the workload or the socket is not usable.
    """
    terms = workload_of(config)
    with state_dir.held(config.state_dir):
        store = await trio.to_thread.run_sync(Store, config, terms)
        try:
            async with trio.open_nursery() as nursery:
                farewells: Farewells = []
                await nursery.start(_outlast, driver, farewells)
                journal = Journal(store)
                await nursery.start(journal.run)
                gate = Gatekeeper(config, store, journal, gate_program)
                await nursery.start(gate.run)
                rounds = Rounds(config, store, journal, gate)
                await nursery.start(rounds.run)
                reception = Reception(config, store, driver, rounds, journal)
                circle = _members(config, store, driver, reception, journal)
                farewells.append(circle.leave)
                await nursery.start(circle.run)
                drains = await trio.to_thread.run_sync(Drains, config.state_dir)
                around = Surroundings(
                    federation=store.federation,
                    driver=driver,
                    leases=ArenaLeases(Arena.create(config.edges.arena_bytes)),
                    peers=reception.peers,
                    draw_edge=reception.numbers.draw,
                    note=journal.note,
                    step_deadline_s=config.inference.step_deadline_s,
                    max_waiting=config.inference.max_waiting,
                )
                orchestrator = Orchestrator(config, around, drains)
                draining = Draining(drains, store, rounds, orchestrator)
                await draining.begin()
                await nursery.start(orchestrator.run)
                await nursery.start(reception.run)
                answers = Answers(config, store, driver, rounds, reception)
                models = ModelAnswers(orchestrator)
                answers.observer.drain_word = draining.word
                answer = routed(answers, models, draining, circle)
                counts = await nursery.start(
                    server.serve, config.socket_path, answer, answers.greeting
                )
                answers.observer.refused_by_socket = counts.refused
                answers.observer.surfaces = await nursery.start(
                    door.serve, config, Parts(answers.observer, rounds, orchestrator, circle)
                )
                journal.note("coordinator.serving", node=driver.node, name=config.name)
                serving = Serving(
                    config,
                    store,
                    driver,
                    rounds,
                    reception,
                    answers,
                    orchestrator,
                    models,
                    draining,
                    circle,
                )
                task_status.started(serving)
                await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(store.close)


def _members(
    config: CoordinatorConfig,
    store: Store,
    driver: Driver,
    reception: Reception,
    journal: Journal,
) -> members.Members:
    around = members.Surroundings(
        federation=store.federation,
        profile=config.membership.figures,
        driver=driver,
        peers=reception.peers,
        note=journal.note,
    )
    return members.Members(around, secrets.token_hex(8), secrets.randbits(56))


async def _outlast(
    driver: Driver,
    farewells: Farewells,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run ``driver`` until cancelled, then say what is to be said last, and let it get away."""
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_set_when_cancelled, stop)
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as last:
                await last.start(driver.run)
                task_status.started()
                await stop.wait()
                for say in farewells:
                    say()
                await trio.sleep(LAST_WORD_S)
                last.cancel_scope.cancel()


async def _set_when_cancelled(event: trio.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()
