"""Masked rounds through the coordinator's ``serve``, with scripted nodes over the memory driver."""

from pathlib import Path

import numpy as np
import pytest
import trio

from lensemble import identity
from lensemble.checkpoint import open_checkpoint
from lensemble.wire import messages
from lensemble_coord.training import outer_round
from lensemble_coord.training.verify import verify_state
from tests.coord.scripted_node import ScriptedNode
from tests.coord.test_coordinator import Bench, bench

UNIT = 1 << 24


def state_of(coordinator: Bench) -> np.ndarray:
    store = coordinator.serving.store
    return open_checkpoint(store.directory.checkpoint(store.tail().next_digest)).read()


async def test_the_sum_is_exact_and_the_transcript_verifies(tmp_path: Path) -> None:
    async with (
        bench(tmp_path, aggregation="masked", min_participants=3) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
        await coordinator.serving.wait_for_nodes(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 2)
            for _ in range(2):
                nursery.start_soon(b.take_masked_part, 2 << 20)
                nursery.start_soon(c.take_masked_part, 6 << 20)
                close = await a.take_masked_part(1 << 20)
                assert close.outcome == "closed"
        # The mean in float32 of an integer sum that is exact, twice.
        mean = np.float32((9 << 20) / UNIT / 3)
        assert np.array_equal(state_of(coordinator), np.full(5000, mean + mean, np.float32))
        assert "learns the sum" in coordinator.serving.answers.observer.status().aggregation
        kept = coordinator.serving.store.tail().masking
        assert kept is not None
        assert [each.node for each in kept.members] == list(kept.dealers)
        report = verify_state(tmp_path / "state", lambda *_: None, identity.verify)
        assert report.problems == []
        assert report.recomputed == 2


async def _vanishes(node: ScriptedNode, coordinator: Bench, when: str) -> None:
    opening = await node.wait_for(messages.RoundOpen)
    if when == "before keys":
        coordinator.network.cut(node.me.node, coordinator.hub, when)
        return
    await node.bind(opening)
    if when == "before shares":
        await node.wait_for(messages.Roster)
        coordinator.network.cut(node.me.node, coordinator.hub, when)
        return
    await node.deal(opening)
    await node.collect(opening)
    words = node.masked(node.words(5 << 20))
    if when == "before upload":
        coordinator.network.cut(node.me.node, coordinator.hub, when)
        return
    signature = await node.announce(opening, words)
    await node.send(opening, words, signature)
    if when == "before unmask":
        await node.wait_for(messages.UnmaskRequest)
        coordinator.network.cut(node.me.node, coordinator.hub, when)


async def _one_round_without(tmp_path: Path, when: str) -> tuple[int, np.ndarray]:
    async with (
        bench(
            tmp_path / when.replace(" ", "-"),
            aggregation="masked",
            min_participants=3,
            open_grace_s=60.0,
        ) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
        coordinator.node("d") as d,
    ):
        await coordinator.serving.wait_for_nodes(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            nursery.start_soon(_vanishes, d, coordinator, when)
            for node, value in ((a, 1 << 20), (b, 2 << 20), (c, 6 << 20)):
                nursery.start_soon(node.take_masked_part, value)
        (closed,) = coordinator.serving.closed_rounds
        report = verify_state(
            coordinator.serving.config.state_dir, lambda *_: None, identity.verify
        )
        assert report.problems == []
        return len(closed.contributors), state_of(coordinator)


async def test_a_dropout_at_any_time_leaves_the_sum_of_the_others(tmp_path: Path) -> None:
    for when in ("before keys", "before shares", "before upload", "before unmask"):
        (tmp_path / when.replace(" ", "-")).mkdir()
        count, state = await _one_round_without(tmp_path, when)
        total, share = (9 << 20, 3) if when != "before unmask" else (14 << 20, 4)
        assert (when, count) == (when, share)
        assert np.array_equal(state, np.full(5000, np.float32(total / UNIT / share)))


async def test_wrong_shares_are_named_and_never_make_a_wrong_sum(tmp_path: Path) -> None:
    async with (
        bench(tmp_path, aggregation="masked", min_participants=3) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
        coordinator.node("d") as d,
    ):
        await coordinator.serving.wait_for_nodes(4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            for node in (a, b, c):
                nursery.start_soon(node.take_masked_part, 1 << 20)
            await d.take_masked_part(1 << 20, lie=True)
            refused = await d.wait_for(messages.Refused)
        assert refused.code == "secure_aggregation"
        assert d.me.node in refused.reason
        assert np.array_equal(
            state_of(coordinator), np.full(5000, np.float32(4 * (1 << 20) / UNIT / 4))
        )


async def test_an_update_out_of_range_aborts_and_is_never_committed(tmp_path: Path) -> None:
    """Masked, nobody can say whose it was; the sum is one that honest updates cannot have."""
    async with (
        bench(
            tmp_path,
            aggregation="masked",
            min_participants=3,
            max_attempts=2,
            retry_backoff_s=0.0,
        ) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
        await coordinator.serving.wait_for_nodes(3)
        before = coordinator.serving.digest
        ended = []

        async def run() -> None:
            ended.append(await coordinator.serving.run_rounds(1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            for _ in range(2):
                async with trio.open_nursery() as attempt:
                    for node, value in ((a, 1), (b, 2), (c, 0x70000000)):
                        attempt.start_soon(node.take_masked_part, value)
        assert (ended[0].completed, ended[0].code) == (False, "aggregation")
        assert coordinator.serving.digest == before
        assert coordinator.serving.closed_rounds == []


async def test_after_an_unmask_request_older_releases_are_declared_spent(tmp_path: Path) -> None:
    async with (
        bench(
            tmp_path,
            aggregation="masked",
            min_participants=3,
            retry_backoff_s=0.0,
            unmask_timeout_s=0.2,
        ) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
        await coordinator.serving.wait_for_nodes(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            async with trio.open_nursery() as first:
                for node in (a, b, c):
                    first.start_soon(_sends_and_is_silent, node)
            for node in (a, b):
                nursery.start_soon(node.take_masked_part, 2)
            again = await c.wait_for(messages.RoundOpen)
            assert (again.attempt, again.spent_before) == (1, 1)
            c.heard.append(again)
            await c.take_masked_part(2)


async def _sends_and_is_silent(node: ScriptedNode) -> None:
    opening = await node.wait_for(messages.RoundOpen)
    assert opening.spent_before == 0
    await node.bind(opening)
    await node.deal(opening)
    await node.collect(opening)
    words = node.masked(node.words(1))
    signature = await node.announce(opening, words)
    await node.send(opening, words, signature)
    await node.wait_for(messages.UnmaskRequest)


@pytest.mark.parametrize("aggregation", ["masked", "plain"])
async def test_nothing_the_coordinator_receives_or_writes_shows_an_update(
    tmp_path: Path, aggregation: str
) -> None:
    """With ``plain`` the very same search finds every update: it can find what is there."""
    async with (
        bench(tmp_path, aggregation=aggregation, min_participants=3) as coordinator,
        coordinator.node("a") as a,
        coordinator.node("b") as b,
        coordinator.node("c") as c,
    ):
        await coordinator.serving.wait_for_nodes(3)
        values = {a: 0x01020304, b: 0x00020406, c: 0x00030609}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(coordinator.serving.run_rounds, 1)
            for node, value in values.items():
                part = node.take_masked_part if aggregation == "masked" else node.take_part
                nursery.start_soon(part, value)
            await coordinator.state(outer_round.Committing)
            spooled = [
                b"".join(bytes(piece) for piece in each.pieces())
                for each in coordinator.rounds.spooled_updates()
            ]
        tap = coordinator.tap
        written = [p.read_bytes() for p in (tmp_path / "state").rglob("*") if p.is_file()]
        everything = [*tap.heard, *(f for each in tap.frames.values() for f in each), *written]
        # Eight words in a row of an update occur by chance once in 2**256.
        plain = [value.to_bytes(4, "little") * 8 for value in values.values()]
        found = [pattern for pattern in plain if any(pattern in raw for raw in everything)]
        assert found == (plain if aggregation == "plain" else [])
        updates = [b"".join(each)[: 4 * 5000] for each in tap.frames.values()]
        assert len(updates) == len(spooled) == 3
        for raw in (*updates, *spooled):
            # 255 degrees of freedom: 500 is beyond any chance; a plain update is at 10**6.
            uniform = _chi_square(raw[-16384:]) < 500
            assert uniform == (aggregation == "masked")


def _chi_square(raw: bytes) -> float:
    counts = np.bincount(np.frombuffer(raw, dtype=np.uint8), minlength=256)
    expected = len(raw) / 256
    return float(((counts - expected) ** 2 / expected).sum())
