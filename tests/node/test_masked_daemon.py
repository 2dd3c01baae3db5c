"""Node daemons in masked rounds with a coordinator that does what a test says."""

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from lensemble.ids import NodeId
from lensemble.wire import messages
from lensemble_node import attempt, participation
from tests.node.masked_rounds import Attempt, Peer, peers, plain_sum
from tests.node.scripted import CALM, COORDINATOR, PATIENCE_S, Stage, stage


async def until(who: Peer, *wanted: str) -> None:
    """Wait until the attempt in hand is of a class among ``wanted``."""
    member = who.running.serving.member
    with trio.fail_after(PATIENCE_S):
        while type(member.state.membership.attempt).__name__ not in wanted:
            await member.changed.wait()


def holds_secrets(who: Peer) -> bool:
    joined = who.running.serving.member.state.membership
    return isinstance(joined, participation.Joined) and attempt.holds_secrets(joined.attempt)


async def test_the_coordinator_gets_the_exact_sum_and_nothing_else(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.collect()
        await masked.updates(everybody)
        bare = {each.node: each.bare() for each in everybody}
        total = await masked.unmask(everybody)
        assert np.array_equal(total, plain_sum(bare.values()))
        for node, words in bare.items():
            # Uniform words: equal ones are chance, one in 2**32.
            assert np.count_nonzero(masked.blobs[node] == words) < 3
        for each in everybody:
            await until(each, "Answered")
            contributors = tuple(sorted(bare))
            await each.session.close(contributors=contributors)
            await until(each, "Idle")
            assert each.running.serving.member.last_contribution == 0


async def test_a_dropout_leaves_the_exact_sum_of_the_others(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        *stay, gone = everybody
        masked = Attempt(everybody)
        await masked.collect()
        # It has dealt its shares and masks against the others, and is never heard of again.
        await gone.running.stop()
        await masked.updates(stay)
        assert np.array_equal(await masked.unmask(stay), plain_sum(each.bare() for each in stay))


async def test_who_drops_out_before_dealing_is_left_out_by_all(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        *stay, gone = everybody
        masked = Attempt(everybody)
        await masked.bind()
        await gone.running.stop()
        masked.everybody = {each.node: each for each in stay}
        await masked.share(bound=True)
        await masked.begin()
        await masked.updates(stay)
        assert np.array_equal(await masked.unmask(stay), plain_sum(each.bare() for each in stay))


async def test_a_retry_masks_the_same_release_afresh_until_it_was_unmasked(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        first = Attempt(everybody)
        await first.collect()
        await first.updates(everybody)
        released = [each.bare() for each in everybody]
        for each in everybody:
            await until(each, "Sent")
            await each.session.close(outcome="aborted", contributors=(), retries=True)
        second = Attempt(everybody, 0, 1)
        await second.collect()
        await second.updates(everybody)
        for each, before in zip(everybody, released, strict=True):
            assert np.array_equal(each.bare(), before)
            assert not np.array_equal(first.blobs[each.node], second.blobs[each.node])
        assert np.array_equal(await second.unmask(everybody), plain_sum(released))
        for each in everybody:
            await each.session.close(0, 1, outcome="aborted", contributors=(), retries=True)
        third = Attempt(everybody, 0, 2)
        await third.collect()
        await third.updates(everybody)
        again = [each.bare() for each in everybody]
        assert not any(np.array_equal(a, b) for a, b in zip(again, released, strict=True))
        assert np.array_equal(await third.unmask(everybody), plain_sum(again))


async def test_status_says_what_is_shared_and_unmasked(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.share()
        one = everybody[0]
        await until(one, "Waiting")
        now = one.running.serving.answers.status().round
        assert now is not None
        assert now.activity == "sharing"
        assert now.reason == "waiting for the mask shares of the other participants"
        await masked.begin()
        await masked.updates(everybody)
        await until(one, "Sent")
        now = one.running.serving.answers.status().round
        assert now is not None
        assert "ask for the unmasking" in now.reason
        await masked.unmask(everybody)
        await until(one, "Answered")
        status = one.running.serving.answers.status()
        assert status.round is not None
        assert status.round.activity == "unmasking"
        # Of the masks themselves nothing is said.
        assert b"key" not in msgspec.json.encode(status.round)


# ---- losses ----

Loss = Callable[[Stage, Peer], Awaitable[None]]


async def _lose_link(s: Stage, who: Peer) -> None:
    s.network.cut(COORDINATOR, who.node)
    who.session = await s.joined(aggregation="masked")


async def _restart(s: Stage, who: Peer) -> None:
    await who.running.stop()
    who.running = await s.start_node(state_dir=str(who.state_dir), share={"plain": False})
    who.session = await s.joined(aggregation="masked")


async def _kill_worker(s: Stage, who: Peer) -> None:
    os.kill(who.running.serving.member.supervisor.facts().pid, signal.SIGKILL)
    await who.session.hear(messages.EdgeLost)
    await who.session.provision(s.nursery)


@pytest.mark.parametrize("lose", [_lose_link, _restart, _kill_worker])
@pytest.mark.parametrize("step", ["bind", "share", "collect"])
async def test_a_loss_costs_the_node_this_attempt_and_the_next_works(
    tmp_path: Path, lose: Loss, step: str
) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await getattr(masked, step)()
        await lose(s, everybody[0])
        if step == "collect":
            await masked.updates(everybody[1:])
            for each in everybody[1:]:
                await until(each, "Sent")
        await until(everybody[0], "Idle", "Withdrawn")
        assert not holds_secrets(everybody[0])
        for each in everybody:
            await each.session.close(outcome="aborted", contributors=(), retries=True)
        again = Attempt(everybody, 0, 1)
        await again.collect()
        await again.updates(everybody)
        assert np.array_equal(
            await again.unmask(everybody), plain_sum(each.bare() for each in everybody)
        )


async def test_a_worker_killed_before_the_answer_marks_its_release_as_spent_later(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.collect()
        await masked.updates(everybody)
        await until(everybody[0], "Sent")
        await _kill_worker(s, everybody[0])
        total = await masked.unmask(everybody)
        assert np.array_equal(total, plain_sum(each.bare() for each in everybody))


# ---- a coordinator that lies ----


async def _refused(who: Peer) -> messages.Fault:
    fault = await who.session.hear(messages.Fault)
    assert fault.code == "secure_aggregation"
    assert not holds_secrets(who)
    assert who.revealed() == []
    return fault


async def test_rosters_that_are_not_what_all_committed_to_are_refused(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        (who, *others) = await peers(s)
        for number, spoil in enumerate((_without, _other_keys, _unsigned, _minority)):
            masked = Attempt([who, *others], 0, number)
            await masked.bind()
            # With the state still coming in it would give its edges up too.
            await until(who, "Waiting")
            await who.session.say(spoil(masked, who))
            assert (await _refused(who)).reason
            await until(who, "Withdrawn")
            for each in (who, *others):
                await each.session.close(
                    0, number, outcome="aborted", contributors=(), retries=True
                )
        assert not [m for m in who.session.heard if isinstance(m, messages.Shares)]


def _without(masked: Attempt, who: Peer) -> messages.Roster:
    members = tuple(each for each in masked.members if each.node != who.node)
    return masked.roster_for(who, members)


def _other_keys(masked: Attempt, who: Peer) -> messages.Roster:
    """Another one's keys are the coordinator's own, under the signature of the true ones."""
    forged = [
        each
        if each.node == who.node
        else msgspec.structs.replace(
            each, keys=msgspec.structs.replace(each.keys, mask_key=os.urandom(32))
        )
        for each in masked.members
    ]
    return masked.roster_for(who, tuple(forged))


def _unsigned(masked: Attempt, who: Peer) -> messages.Roster:
    forged = [msgspec.structs.replace(each, signature=b"\x00" * 64) for each in masked.members]
    return masked.roster_for(who, tuple(forged))


def _minority(masked: Attempt, who: Peer) -> messages.Roster:
    return masked.roster_for(who, threshold=1)


async def test_a_second_roster_is_refused_and_its_shares_not_dealt(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.share()
        who = everybody[0]
        await who.session.say(masked.roster_for(who))
        assert "second roster" in (await _refused(who)).reason
        assert len([m for m in who.session.heard if isinstance(m, messages.Shares)]) == 1


async def test_an_exchanged_envelope_is_refused_and_its_dealer_named(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.share()
        who = everybody[0]
        first, second = masked.envelopes_for(who.node)
        exchanged = (msgspec.structs.replace(first, sealed=second.sealed), second)
        await who.session.collect(0, 0, tuple(masked.dealings), exchanged)
        assert first.dealer in (await _refused(who)).reason


async def test_unmasking_before_the_update_is_there_is_refused(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.share()
        who = everybody[0]
        await masked.ask(who, sorted(masked.everybody))
        assert "cannot be in yet" in (await _refused(who)).reason


async def test_sets_of_survivors_that_single_somebody_out_are_refused(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.collect()
        await masked.updates(everybody)
        nodes = sorted(masked.everybody)
        asked: list[tuple[NodeId, ...]] = [
            (everybody[0].node,),
            tuple(node for node in nodes if node != everybody[1].node),
            tuple(reversed(nodes)),
        ]
        for who, survivors in zip(everybody, asked, strict=True):
            await until(who, "Sent")
            await masked.ask(who, survivors)
            await _refused(who)
            # What was refused once is not answered in a better form.
            await masked.ask(who, nodes)
            await until(who, "Withdrawn")
            assert who.running.serving.member.refused["unmask_out_of_place"] <= 1
        assert not any(each.revealed() for each in everybody)


async def test_a_second_set_of_survivors_is_not_answered(tmp_path: Path) -> None:
    async with stage(tmp_path, CALM) as s:
        everybody = await peers(s)
        masked = Attempt(everybody)
        await masked.collect()
        await masked.updates(everybody)
        await masked.unmask(everybody)
        who = everybody[0]
        await masked.ask(who, (who.node, max(each.node for each in everybody[1:])))
        await masked.ask(who, sorted(masked.everybody))
        member = who.running.serving.member
        with trio.fail_after(PATIENCE_S):
            while member.refused["unmask_out_of_place"] < 2:
                await member.changed.wait()
        await who.session.close(contributors=tuple(masked.everybody))
        await until(who, "Idle")
        assert len(who.revealed()) == 1


async def test_a_node_that_sends_masked_updates_only_refuses_a_plain_federation(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path, CALM) as s:
        running = await s.start_node(share={"plain": False})
        session = await s.session()
        await session.welcome()
        with trio.fail_after(PATIENCE_S):
            while running.serving.answers.status().link.state != "refused":
                await running.serving.member.changed.wait()
        link = running.serving.answers.status().link
        assert "share.plain" in link.reason
        assert link.next_attempt_in_s is not None
        assert link.next_attempt_in_s > 25
