"""The coordinator's ``serve`` over the memory driver, with scripted nodes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import trio
import trio.testing

from lensemble import identity, ticket
from lensemble.checkpoint import open_checkpoint
from lensemble.ctl import replies, requests
from lensemble.ids import Digest
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble.wire import messages
from lensemble.workload import FieldTerms, NoopTask, Outer, Workload
from lensemble_coord import daemon
from lensemble_coord.config import (
    CoordinatorConfig,
    EdgesSection,
    GateSection,
    HttpSection,
    InferenceSection,
    ListenSection,
    RoundsSection,
)
from lensemble_coord.training import outer_round, session
from lensemble_coord.training.coordinator import RECORD_AGAIN_S
from tests.coord.scripted_node import ScriptedNode
from tests.coord.tapped import TappedDriver

TERMS = Workload(
    name="noop",
    task=NoopTask(parameters=5000),
    outer=Outer(lr=1.0, momentum=0.0),
    field=FieldTerms(bits=32),
)
SMALL = EdgesSection(capacity_bytes=4096, slots=2, arena_bytes=1 << 24)


class Bench:
    """A coordinator on a memory network, and as many scripted nodes as a test wants."""

    def __init__(
        self, serving: daemon.Serving, network: MemoryNetwork, hub: str, tap: TappedDriver
    ) -> None:
        self.serving, self.network, self.hub, self.tap = serving, network, hub, tap
        self.rounds = serving.rounds
        self.scope = trio.CancelScope()
        """Everything here, the coordinator and its nodes."""

    @asynccontextmanager
    async def node(
        self, name: str, *, loses_pairs: int = 0, me: identity.Identity | None = None
    ) -> AsyncIterator[ScriptedNode]:
        me = me or identity.generate()
        await self.serving.admit(me.node, name)
        driver = self.network.driver(me.node)
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            node = ScriptedNode(driver, me, TERMS, name)
            node.loses_pairs = loses_pairs
            async with node.joined(self.network.address(self.hub)):
                yield node
            nursery.cancel_scope.cancel()

    async def state(self, kind: type[outer_round.State]) -> outer_round.State:
        while not isinstance(self.rounds.state, kind):
            await self.rounds.changed.wait()
        return self.rounds.state


@asynccontextmanager
async def bench(
    tmp_path: Path,
    inference: dict[str, Any] | None = None,
    http: dict[str, Any] | None = None,
    gate: GateSection | None = None,
    gate_program: tuple[str, ...] = (),
    **rules: object,
) -> AsyncIterator[Bench]:
    (tmp_path / "workload.toml").write_text(
        'name = "noop"\n[task]\nkind = "noop"\nparameters = 5000\n'
        "[outer]\nlr = 1.0\nmomentum = 0.0\n[field]\nbits = 32\n"
    )
    config = CoordinatorConfig(
        state_dir=tmp_path / "state",
        workload=tmp_path / "workload.toml",
        edges=SMALL,
        listen=ListenSection(advertise=("127.0.0.1:7707",)),
        rounds=RoundsSection(**{"aggregation": "plain", "min_participants": 2, **rules}),
        inference=InferenceSection(**(inference or {})),
        http=HttpSection(**(http or {})),
        gate=gate or GateSection(),
    )
    me = identity.generate()
    network = MemoryNetwork()
    async with trio.open_nursery() as nursery:
        tap = TappedDriver(network.driver(me.node))
        serve = partial(daemon.serve, gate_program=gate_program)
        serving = await nursery.start(serve, config, tap)
        made = Bench(serving, network, me.node, tap)
        made.scope = nursery.cancel_scope
        yield made
        nursery.cancel_scope.cancel()


async def test_rounds_close_and_the_state_moves_by_the_mean(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 2)
            for value in (1 << 20, 1 << 21):
                nursery.start_soon(b.take_part, 3 * value)
                close = await a.take_part(value)
                assert close.outcome == "closed"
                assert sorted(close.contributors) == sorted([a.me.node, b.me.node])
        store = coordinator.serving.store
        final = open_checkpoint(store.directory.checkpoint(store.tail().next_digest)).read()
        expected = (2 * (1 << 20) + 2 * (1 << 21)) / (1 << 24)
        assert np.array_equal(final, np.full(5000, expected, dtype=np.float32))
        assert [len(each.contributors) for each in coordinator.serving.closed_rounds] == [2, 2]
        status = coordinator.serving.answers.observer.status()
        assert status.round.state == "closed"
        assert [each.contributions for each in status.participants] == [2, 2]
        assert len(a.states) == 2


async def test_a_pair_lost_before_it_was_provisioned_is_replaced_soon(tmp_path: Path) -> None:
    async with bench(tmp_path) as coordinator, coordinator.node("a", loses_pairs=2) as a:
        with trio.fail_after(session.PROVISION_TIMEOUT_S / 4):
            await coordinator.serving.wait_for_nodes(1)
        (here,) = coordinator.serving.answers.observer.status().participants
        assert "killed" in here.last_reason
        assert a.loses_pairs == 0


async def _bound_pair(
    coordinator: Bench, a: ScriptedNode, b: ScriptedNode
) -> tuple[messages.RoundOpen, messages.RoundOpen]:
    openings = []
    for node in (a, b):
        opening = await node.wait_for(messages.RoundOpen)
        await node.bind(opening)
        openings.append(opening)
    await coordinator.state(outer_round.Collecting)
    return openings[0], openings[1]


async def test_a_lost_node_is_left_out_and_a_quorum_closes(tmp_path: Path) -> None:
    async with (
        bench(tmp_path, open_grace_s=60.0) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
        await coordinator.serving.wait_for_nodes(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(a.take_part, 1)
            nursery.start_soon(b.take_part, 2)
            await c.bind(await c.wait_for(messages.RoundOpen))
            await c.wait_for(messages.Collect)
            status = coordinator.serving.answers.observer.status()
            assert "c" in status.round.waiting_on
            coordinator.network.cut(c.me.node, coordinator.hub, "killed")
        (closed,) = coordinator.serving.closed_rounds
        assert sorted(closed.contributors) == sorted([a.me.node, b.me.node])
        assert [d.node for d in closed.dropped] == [c.me.node]


async def test_a_slow_link_that_moves_is_not_cut_and_one_that_stalls_is(tmp_path: Path) -> None:
    async with (
        bench(tmp_path, open_grace_s=60.0, collect_timeout_s=5.0) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
        coordinator.node("d") as d,
    ):
        await coordinator.serving.wait_for_nodes(4)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(a.take_part, 1)
            nursery.start_soon(b.take_part, 2)
            stalling = await d.wait_for(messages.RoundOpen)
            await d.bind(stalling)
            opening = await c.wait_for(messages.RoundOpen)
            await c.bind(opening)
            await c.wait_for(messages.Collect)
            progress = messages.Progress(**d.fields(stalling), phase="training", done=2, total=5)
            await d.say(progress)
            words = c.words(3)
            signature = await c.announce(opening, words)
            nursery.start_soon(partial(c.send, opening, words, signature, pause_s=3.0))
            await trio.sleep(4.0)
            round_status = coordinator.serving.answers.observer.status().round
            assert "c: 20% of its update is here and it moves" in round_status.reason
            assert "d: 40% of its steps are done and it stands still" in round_status.reason
            assert round_status.deadline_in_s is not None
            assert round_status.deadline_in_s <= 2.5
        (closed,) = coordinator.serving.closed_rounds
        assert trio.current_time() - began > 14
        assert sorted(closed.contributors) == sorted([a.me.node, b.me.node, c.me.node])
        assert [(left.node, left.code) for left in closed.dropped] == [(d.me.node, "timeout")]


async def test_misbehaviour_is_refused_counted_and_moves_nothing(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            opening, other = await _bound_pair(coordinator, a, b)
            fields = a.fields(opening)
            for wrong in ({"epoch": 1}, {"federation": "0" * 32}):
                await a.say(messages.Fault(**{**fields, **wrong}, code="x", reason="x"))
                assert (await a.wait_for(messages.Refused)).code == "stale_epoch"
            await a.bind(opening)
            assert (await a.wait_for(messages.Refused)).code == "misplaced"
            await a.announce(other_round(opening), a.words(1))
            assert (await a.wait_for(messages.Refused)).code == "stale"
            signature = await a.announce(opening, a.words(1))
            await a.announce(opening, a.words(2))
            assert (await a.wait_for(messages.Refused)).code == "duplicate"
            assert isinstance(coordinator.rounds.state, outer_round.Collecting)
            await a.send(opening, a.words(1), signature)
            signature = await b.announce(other, b.words(3))
            await b.send(other, b.words(3), signature)
            close = await a.wait_for(messages.RoundClose)
        assert close.outcome == "closed"
        assert sum(coordinator.rounds.sessions[a.me.node].refused.values()) == 5


def other_round(opening: messages.RoundOpen) -> messages.RoundOpen:
    return msgspec.structs.replace(opening, round=opening.round + 1)


async def test_an_update_that_is_late_is_passed_over_and_its_edge_kept(tmp_path: Path) -> None:
    """A third node is lost and the attempt with it, while updates are on their way."""
    async with (
        bench(tmp_path, min_participants=3) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        async with coordinator.node("c") as c:
            await coordinator.serving.wait_for_nodes(3)
            a.nursery.start_soon(coordinator.serving.run_rounds, 1)
            openings = {}
            for node in (a, b, c):
                openings[node.name] = await node.wait_for(messages.RoundOpen)
                await node.bind(openings[node.name])
            await coordinator.state(outer_round.Collecting)
            early = a.words(1 << 20)
            signature = await a.announce(openings["a"], early)
        for node in (a, b):
            await node.wait_for(messages.RoundClose, outcome="aborted")
        edge = a.tx.spec.edge
        await a.send(openings["a"], early, signature)
        async with coordinator.node("d") as d, trio.open_nursery() as nursery:
            for node in (b, d):
                nursery.start_soon(node.take_part, 1 << 20)
            close = await a.take_part(1 << 20)
            assert (close.outcome, close.attempt) == ("closed", 1)
            assert len(close.contributors) == 3
        assert a.tx.spec.edge == edge
        session = coordinator.rounds.sessions[a.me.node]
        assert session.refused["late_update"] == 1


async def test_a_malformed_blob_drops_its_sender_and_only_it(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
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
            refused = await c.wait_for(messages.Refused)
            assert refused.code == "contract_violation"
            await c.wait_for(messages.Provision)
        (closed,) = coordinator.serving.closed_rounds
        assert sorted(closed.contributors) == sorted([a.me.node, b.me.node])


async def test_a_changed_dataset_stops_the_federation(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        before = coordinator.serving.digest
        ended = []

        async def run() -> None:
            ended.append(await coordinator.serving.run_rounds(3))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            opening, _ = await _bound_pair(coordinator, a, b)
            await a.announce(opening, a.words(1), root=Digest("6" * 64))
            close = await b.wait_for(messages.RoundClose)
        assert (close.outcome, close.code, close.retries) == (
            "aborted",
            "commitment_mismatch",
            False,
        )
        assert not ended[0].completed
        assert ended[0].code == "commitment_mismatch"
        assert coordinator.serving.digest == before


async def test_strangers_are_refused_and_an_invite_admits_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as coordinator:
        invited = [
            reply
            async for reply in coordinator.serving.answers.answer(requests.Invite(uses=1))
            if isinstance(reply, replies.Invited)
        ]
        secret = ticket.decode(invited[0].ticket).secret
        outcomes = []
        for invite in (b"", b"wrong-secret-16b", secret, secret):
            me = identity.generate()
            driver = coordinator.network.driver(me.node)
            async with trio.open_nursery() as nursery:
                await nursery.start(driver.run)
                node = ScriptedNode(driver, me, TERMS, "stranger")
                async with node.joined(coordinator.network.address(coordinator.hub), invite=invite):
                    answer = await node.wait_for_one(messages.Welcome, messages.Refused)
                    outcomes.append(getattr(answer, "code", "welcome"))
                nursery.cancel_scope.cancel()
        assert outcomes == ["not_admitted", "unknown_invite", "welcome", "used_invite"]
        refused = coordinator.serving.answers.observer.status().refused
        assert refused["not_admitted"] == refused["unknown_invite"] == refused["used_invite"] == 1


async def test_a_restarted_coordinator_goes_on_with_the_run(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 3)
            nursery.start_soon(b.take_part, 2)
            await a.take_part(1)
            await _bound_pair(coordinator, a, b)
            nursery.cancel_scope.cancel()
    async with bench(tmp_path) as coordinator:
        ground = coordinator.rounds.state.ground
        assert (ground.round, ground.attempt) == (1, 1)
        assert coordinator.serving.store.unfinished_rounds == 2
        await coordinator.state(outer_round.Open)
        async with coordinator.node("a") as a, coordinator.node("b") as b:
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(b.take_part, 2)
                    await a.take_part(1)
            while coordinator.serving.store.run is not None:
                await coordinator.rounds.changed.wait()
        assert coordinator.serving.store.tail().round == 2


async def test_a_crash_before_the_end_of_a_run_was_written_leaves_no_run_behind(
    tmp_path: Path,
) -> None:
    """Its last round is committed, so it is over; else no further run could ever begin."""
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(b.take_part, 2)
            await a.take_part(1)
        with coordinator.serving.store.reading:
            tables = coordinator.serving.store.ledger._tables
            (row,) = tables.rows("runs")
            tables.put("runs", {**row, "state": "running", "ended_at": ""})
    async with bench(tmp_path) as coordinator:
        assert coordinator.serving.store.run is None
        (run,) = coordinator.serving.store.ledger.runs()
        assert (run.state, run.done) == ("completed", 1)
        await coordinator.rounds.ask(1)
        await coordinator.state(outer_round.Open)


async def test_an_attempt_aborted_while_its_sum_waits_for_an_older_one(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        # The lock is held as by the sum of an attempt that was aborted while it was made.
        async with trio.open_nursery() as nursery, coordinator.rounds._spool_in_use:
            await coordinator.rounds.ask(1)
            nursery.start_soon(b.take_part, 2)
            nursery.start_soon(a.take_part, 1)
            await coordinator.state(outer_round.Aggregating)
            await coordinator.rounds.hear(outer_round.AbortAsked("enough"))
            await coordinator.state(outer_round.Aborted)
        while coordinator.serving.store.run is not None:
            await coordinator.rounds.changed.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(b.take_part, 2)
            await a.take_part(1)
        assert coordinator.serving.store.tail().round == 0


async def test_an_update_of_an_attempt_that_ended_meanwhile_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    """Its announcement may be noted in the moment after the attempt was aborted."""
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            opening, other = await _bound_pair(coordinator, a, b)
            late = messages.Update(
                **{**a.fields(opening), "attempt": 7},
                digest=a.digest(a.words(9)),
                nbytes=a.layout.nbytes,
                dataset_root=a.digest(a.words(9)),
                reused=False,
                signature=bytes(64),
            )
            coordinator.rounds.sessions[a.me.node]._announcement = late
            for node, asked in ((a, opening), (b, other)):
                words = node.words(1)
                signature = await node.announce(asked, words)
                await node.send(asked, words, signature)
        assert coordinator.serving.store.tail().c_t == 2


async def test_the_end_of_a_run_is_written_once_the_disk_takes_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as coordinator:
        await coordinator.rounds.ask(1)
        await coordinator.state(outer_round.Open)
        store = coordinator.serving.store
        tables = store.ledger._tables._connection
        tables.execute("PRAGMA query_only = 1")
        await coordinator.rounds.hear(outer_round.AbortAsked("enough"))
        await coordinator.state(outer_round.Aborted)
        while store.run is not None:
            await coordinator.rounds.changed.wait()
        await trio.sleep(RECORD_AGAIN_S + 0.5)
        assert [run.state for run in store.ledger.runs()] == ["running"]
        tables.execute("PRAGMA query_only = 0")
        with trio.fail_after(4 * RECORD_AGAIN_S):
            while [run.state for run in store.ledger.runs()] == ["running"]:
                await trio.testing.wait_all_tasks_blocked(0.1)
        assert [(run.state, run.code) for run in store.ledger.runs()] == [("stopped", "stopped")]


async def test_how_full_the_field_was_is_an_event_of_each_round(tmp_path: Path) -> None:
    async with (
        bench(tmp_path) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
    ):
        await coordinator.serving.wait_for_nodes(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(b.take_part, 1 << 22)
            await a.take_part(1 << 20)
        found: list[replies.EventRow] = []
        while not found:
            written = coordinator.rounds.journal.written
            rows = [
                row
                async for row in coordinator.serving.answers.answer(requests.Events(limit=50))
                if isinstance(row, replies.EventRow)
            ]
            found = [row for row in rows if row.event == "round.diagnosed"]
            if not found:
                await written.wait()
        most = 2 * (((1 << 31) - 1) // TERMS.field.n_max)
        assert found[0].fields["field_use"] == ((1 << 20) + (1 << 22)) / most


async def test_an_event_about_everybody_does_not_end_the_daemon(tmp_path: Path) -> None:
    async with bench(tmp_path) as coordinator:
        written = coordinator.rounds.journal.written
        everybody = ", ".join(f"a-rather-long-name-{each} (timeout)" for each in range(4096))
        coordinator.rounds.journal.note("round.closed", left_out=everybody)
        await written.wait()
        (kept,) = coordinator.serving.store.events_of("round.closed", 9)
        assert everybody[:900] in kept.event
