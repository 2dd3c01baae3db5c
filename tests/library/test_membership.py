"""Each rule of the membership machine, one machine at a time."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.errors import InvariantError
from lensemble.ids import NodeId
from lensemble.membership import roll
from lensemble.membership.beliefs import MAX_INCARNATION
from lensemble.membership.draw import Draw
from lensemble.membership.machine import FAREWELLS, Membership
from lensemble.membership.outcomes import Action, Changed, Send
from lensemble.membership.profiles import (
    CONFIRMED_SHARE,
    LAN,
    MAX_HEALTH,
    PROFILES,
    RELAY,
    WAN,
    Profile,
)
from lensemble.membership.rumours import Rumours
from lensemble.wire import membership as w
from lensemble.wire.membership import Standing

ALIVE, SUSPECT, DEAD, LEFT = Standing
ME, A, B, C, D, STRANGER = (NodeId(digit * 64) for digit in "0abcde")
BOOT, THEIRS, OTHER = ("1" * 16, "2" * 16, "3" * 16)


class Play:
    """One machine, the time, and what it asked for."""

    def __init__(self, *others: NodeId, profile: Profile = WAN, seed: int = 7) -> None:
        self.machine = Membership(ME, BOOT, profile, seed)
        self.now = 100.0
        self.sent: list[Send] = []
        self.changed: list[Changed] = []
        for node in others:
            self.take(self.machine.learn(node, self.now))

    def take(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.sent.append(action)
                assert len(w.encode(action.message)) <= w.MAX_DATAGRAM_BYTES
            else:
                self.changed.append(action)

    def hear(
        self, sender: NodeId, *updates: w.Update, boot: str = THEIRS, incarnation: int = 1
    ) -> None:
        message = w.Gossip(boot, incarnation, updates)
        self.take(self.machine.heard(message, sender, self.now))

    def say(self, kind: Any, sender: NodeId, *rest: Any, incarnation: int = 1) -> None:
        message = kind(THEIRS, incarnation, (), *rest)
        self.take(self.machine.heard(message, sender, self.now))

    def run(self, seconds: float, answering: tuple[NodeId, ...] = ()) -> None:
        """Time passes; those of ``answering`` ack each probe at once."""
        end = self.now + seconds
        while (due := self.machine.next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            before = len(self.sent)
            self.take(self.machine.tick(self.now))
            for send in self.sent[before:]:
                if send.to in answering and isinstance(send.message, w.Probe):
                    self.say(w.Ack, send.to, send.message.sequence)
        self.now = end

    def first_probe(self) -> Send:
        """Until it is sent, and no longer."""
        due = self.machine.next_due()
        assert due is not None
        self.run(due - self.now)
        (send,) = self.sent
        return send

    def of(self, kind: Any, to: NodeId | None = None) -> list[Any]:
        return [
            send.message
            for send in self.sent
            if isinstance(send.message, kind) and to in (None, send.to)
        ]

    def standing(self, node: NodeId) -> Standing:
        member = self.machine.member(node)
        assert member is not None
        return member.standing

    def told(self, to: NodeId) -> list[w.Update]:
        return [update for message in self.of(object, to) for update in message.updates]


def claim(
    node: NodeId, standing: Standing, incarnation: int = 1, boot: str = THEIRS, by: Any = None
) -> w.Update:
    return w.Update(node, standing, incarnation, boot, by)


# ---- probing ----


def test_each_is_probed_once_in_a_turn_of_seeded_order() -> None:
    play = Play(A, B, C, D)
    play.run(4 * WAN.interval_s, answering=(A, B, C, D))
    first = [send.to for send in play.sent]
    assert sorted(first) == [A, B, C, D]
    again = Play(A, B, C, D)
    again.run(4 * WAN.interval_s, answering=(A, B, C, D))
    assert again.sent == play.sent


def test_another_seed_is_another_order() -> None:
    orders = set()
    for seed in range(20):
        play = Play(A, B, C, D, seed=seed)
        play.run(4 * WAN.interval_s, answering=(A, B, C, D))
        orders.add(tuple(send.to for send in play.sent))
    assert len(orders) > 5


def test_the_order_of_learning_does_not_matter_after_the_first_turn() -> None:
    assert roll_order([A, B, C]) == roll_order([C, A, B])


def roll_order(learned: list[NodeId]) -> list[NodeId]:
    known = roll.Roll(Draw(1))
    for node in learned:
        known.add(node, 0.0)
    turns = [known.next(set()) for _ in range(6)]
    return [record.node for record in turns[3:] if record is not None]


def test_a_probe_without_answer_is_repeated_and_helpers_are_asked() -> None:
    play = Play(A, B, C)
    probe = play.first_probe()
    play.run(WAN.probe_s)
    others = {A, B, C} - {probe.to}
    assert len(play.of(w.Probe, probe.to)) == 2
    asked = [send for send in play.sent if isinstance(send.message, w.ProbeFor)]
    assert {send.to for send in asked} == others
    assert {send.message.target for send in asked} == {probe.to}
    assert play.standing(probe.to) is ALIVE


def test_an_answer_by_way_of_a_helper_counts() -> None:
    play = Play(A, B)
    target = play.first_probe().to
    helper = B if target == A else A
    play.run(WAN.probe_s)
    (asked,) = play.of(w.ProbeFor, helper)
    play.say(w.Ack, helper, asked.sequence)
    play.run(WAN.probe_s, answering=(helper,))
    assert play.standing(target) is ALIVE


def test_an_answer_of_somebody_who_was_not_asked_does_not_count() -> None:
    play = Play(A, B, C, D)
    probe = play.first_probe()
    target, sequence = probe.to, probe.message.sequence
    for other in {A, B, C, D} - {target}:
        play.say(w.Ack, other, sequence)
    play.run(WAN.probe_s)
    assert len(play.of(w.Probe, target)) == 2


def test_several_probes_may_be_in_flight() -> None:
    play = Play(A, B, C, D, profile=RELAY)
    for node in (A, B, C, D):
        play.machine.rtt(node, 2.0)
    play.run(3 * RELAY.interval_s)
    assert len({send.to for send in play.sent if isinstance(send.message, w.Probe)}) >= 3


def test_a_helper_passes_the_answer_on_with_what_it_knows() -> None:
    play = Play(A, B)
    play.hear(B, incarnation=4)
    play.sent.clear()
    play.say(w.ProbeFor, A, 55, B)
    (probe,) = play.of(w.Probe, B)
    play.say(w.Ack, B, probe.sequence, incarnation=4)
    (ack,) = play.of(w.Ack, A)
    assert ack.sequence == 55
    assert claim(B, ALIVE, 4) in ack.updates


def test_a_helper_says_when_it_has_no_answer() -> None:
    play = Play(A, B)
    play.say(w.ProbeFor, A, 55, B)
    play.run(WAN.probe_s)
    assert [nack.sequence for nack in play.of(w.Nack, A)] == [55]


def test_helpers_that_answer_keep_the_health_of_who_asks() -> None:
    play = Play(A, B, C)
    dead = play.first_probe().to
    helpers = tuple({A, B, C} - {dead})
    play.run(WAN.probe_s, answering=helpers)
    for helper in helpers:
        play.say(w.Nack, helper, play.of(w.ProbeFor, helper)[0].sequence)
    play.run(WAN.probe_s, answering=helpers)
    assert play.standing(dead) is SUSPECT
    assert play.machine.health == 0


def test_silence_all_around_is_taken_for_ones_own_fault() -> None:
    play = Play(A, B, C)
    play.first_probe()
    play.run(2 * WAN.probe_s)
    assert play.machine.health == 2
    probes = len(play.of(w.Probe))
    play.run(2 * WAN.interval_s)
    assert len(play.of(w.Probe)) - probes <= 2
    play.run(400)
    assert play.machine.health <= MAX_HEALTH


def test_patience_follows_the_round_trip_time() -> None:
    assert WAN.probe_timeout(None) == WAN.probe_timeout(0.1) == 1.5
    assert WAN.probe_timeout(0.6) == pytest.approx(2.4)
    assert RELAY.probe_timeout(1.0, health=2) == pytest.approx(24.0)
    assert LAN.probe_timeout(9.0) == 0.5
    assert set(PROFILES) == {"lan", "wan", "relay"}


def test_answers_are_measured_and_smoothed() -> None:
    play = Play(A)
    probe = play.first_probe()
    play.now += 0.4
    play.say(w.Ack, A, probe.message.sequence)
    member = play.machine.member(A)
    assert member is not None
    assert member.rtt_s == pytest.approx(0.4)
    play.machine.rtt(A, 1.2)
    member = play.machine.member(A)
    assert member is not None
    assert member.rtt_s == pytest.approx(0.5)


# ---- suspicion ----


def suspected(*, others: tuple[NodeId, ...] = (B, C, D)) -> Play:
    play = Play(A, *others)
    for node in (A, *others):
        play.hear(node)
    play.sent.clear()
    play.hear(B, claim(A, SUSPECT, by=B))
    assert play.standing(A) is SUSPECT
    return play


def death_after(play: Play, answering: tuple[NodeId, ...]) -> float:
    began = play.now
    while play.standing(A) is SUSPECT and play.now < began + 100:
        play.run(0.05, answering)
    assert play.standing(A) is DEAD
    return play.now - began


def test_a_suspicion_that_nobody_confirms_ends_after_the_time_of_the_profile() -> None:
    play = Play(A, B, C, D, profile=msg_free(WAN))
    play.hear(B, claim(A, SUSPECT, by=B))
    assert death_after(play, ()) == pytest.approx(WAN.suspicion_s, abs=0.1)


def msg_free(profile: Profile) -> Profile:
    """The same, of a machine that does not probe by itself for the time of a test."""
    return Profile(
        name=profile.name,
        interval_s=1e6,
        probe_s=profile.probe_s,
        probe_rtts=profile.probe_rtts,
        helpers=profile.helpers,
        suspicion_s=profile.suspicion_s,
    )


def test_others_that_confirm_make_it_shorter_and_each_counts_once() -> None:
    times = []
    for accusers in ((B,), (B, C), (B, C, C, C), (B, C, D)):
        play = Play(A, B, C, D, profile=msg_free(WAN))
        for by in accusers:
            play.hear(B, claim(A, SUSPECT, by=by))
        times.append(death_after(play, ()))
    assert times[0] > times[1] > times[3]
    assert times[1] == pytest.approx(times[2])
    # Two could confirm beside a first accuser of three, and one more is oneself.
    assert times[3] >= CONFIRMED_SHARE * WAN.suspicion_s - 0.1


def test_an_accuser_that_is_not_known_does_not_count() -> None:
    play = Play(A, B)
    play.hear(B, claim(A, SUSPECT, by=STRANGER))
    assert play.standing(A) is ALIVE


def test_the_suspect_is_told_before_anything_else() -> None:
    play = suspected()
    play.hear(B, *(claim(node, DEAD, 3) for node in (C, D)))
    play.sent.clear()
    play.say(w.Probe, A, 9)
    (ack,) = play.of(w.Ack, A)
    assert ack.updates[0] == claim(A, SUSPECT, by=B)


def test_a_suspect_that_speaks_is_told_at_once() -> None:
    play = suspected()
    play.hear(A)
    assert play.told(A)[0] == claim(A, SUSPECT, by=B)


def test_who_accuses_tells_the_suspect_at_once() -> None:
    play = Play(A)
    play.run(WAN.interval_s + 2 * WAN.probe_s)
    assert play.standing(A) is SUSPECT
    assert play.of(w.Gossip, A)[-1].updates[0].standing is SUSPECT


def test_the_suspect_itself_is_asked_before_it_is_called_dead() -> None:
    play = Play(A, B, profile=msg_free(WAN))
    play.hear(B, claim(A, SUSPECT, by=B))
    play.run(WAN.suspicion_s * 0.9)
    assert len(play.of(w.Probe, A)) == 2
    play.say(w.Ack, A, play.of(w.Probe, A)[-1].sequence, incarnation=2)
    assert play.standing(A) is ALIVE


def test_a_timer_of_a_suspicion_that_was_refuted_makes_no_death() -> None:
    play = suspected()
    play.run(5, answering=(B, C, D))
    play.hear(C, claim(A, ALIVE, 2))
    play.run(2)
    play.hear(D, claim(A, SUSPECT, 2, by=D))
    play.run(4, answering=(B, C, D))
    assert play.standing(A) is SUSPECT
    assert not [change for change in play.changed if change.after is DEAD]


def test_a_death_is_announced_with_its_incarnation() -> None:
    play = suspected()
    play.run(4 * WAN.suspicion_s, answering=(B, C, D))
    assert play.standing(A) is DEAD
    assert any(claim(A, DEAD) in play.told(node) for node in (B, C, D))


def test_who_has_missed_a_farewell_is_told_it_again() -> None:
    play = Play(A, B, C, D)
    play.hear(A)
    play.hear(A, claim(A, LEFT))
    play.run(60, answering=(B, C, D))
    play.sent.clear()
    play.hear(B, claim(A, SUSPECT, by=B))
    play.run(6, answering=(B, C, D))
    assert play.standing(A) is LEFT
    assert claim(A, LEFT) in play.told(B)


# ---- which claim counts ----

ORDER = [claim(A, standing, at) for at in (1, 2) for standing in (ALIVE, SUSPECT, DEAD, LEFT)]


@pytest.mark.parametrize("held", range(1, len(ORDER)))
@pytest.mark.parametrize("said", range(len(ORDER)))
def test_the_higher_claim_counts(held: int, said: int) -> None:
    play = Play(A, B, C)
    play.hear(B, ORDER[held])
    play.hear(C, ORDER[said])
    member = play.machine.member(A)
    assert member is not None
    expected = ORDER[max(held, said)]
    assert (member.standing, member.incarnation) == (expected.standing, expected.incarnation)


CLAIMS = st.builds(
    claim,
    st.sampled_from([A, B]),
    st.sampled_from(list(Standing)),
    st.integers(1, 4),
    by=st.sampled_from([None, C, D]),
)


@given(st.lists(CLAIMS, max_size=8), st.randoms())
@settings(max_examples=100)
def test_the_order_in_which_claims_come_does_not_matter(claims: list[w.Update], order: Any) -> None:
    first, second = Play(A, B, C, D), Play(A, B, C, D)
    for each in claims:
        first.hear(C, each)
    order.shuffle(claims)
    for each in claims:
        second.hear(C, each)
    held = [(m.node, m.standing, m.incarnation) for m in first.machine.members()]
    assert held == [(m.node, m.standing, m.incarnation) for m in second.machine.members()]


@pytest.mark.parametrize("standing", [SUSPECT, DEAD, LEFT])
@pytest.mark.parametrize("theirs", [1, 2, 3, 7])
def test_only_a_claim_at_least_as_high_is_refuted(standing: Standing, theirs: int) -> None:
    play = Play(A, B)
    play.hear(A, claim(ME, SUSPECT, 1, BOOT, A))
    play.hear(A, claim(ME, SUSPECT, 2, BOOT, A))
    assert play.machine.incarnation == 3
    play.hear(A, claim(ME, standing, theirs, BOOT, A))
    assert play.machine.incarnation == (theirs + 1 if theirs >= 3 else 3)


def test_that_one_lives_is_no_claim_to_refute() -> None:
    play = Play(A)
    play.hear(A, claim(ME, ALIVE, 1, BOOT))
    assert play.machine.incarnation == 1
    assert not play.sent


def test_a_refutation_goes_out_at_once_and_to_the_teller() -> None:
    play = Play(A, B, C)
    play.hear(A, claim(ME, SUSPECT, 1, BOOT, B))
    assert claim(ME, ALIVE, 2, BOOT) in play.told(A)
    assert {send.to for send in play.sent} == {A, B, C}
    assert play.machine.health == 1


def test_a_claim_that_is_outranked_is_answered_by_what_is_so() -> None:
    play = Play(A, B)
    play.hear(A, incarnation=5)
    play.hear(B, claim(A, DEAD, 4))
    assert play.standing(A) is ALIVE
    play.run(2 * WAN.interval_s, answering=(A, B))
    assert claim(A, ALIVE, 5) in play.told(B)


def test_a_claim_that_nobody_could_outrank_is_ignored() -> None:
    play = Play(A, B)
    play.hear(B, claim(ME, DEAD, MAX_INCARNATION + 1, BOOT), claim(A, DEAD, MAX_INCARNATION + 1))
    assert play.machine.incarnation == 1
    assert play.standing(A) is ALIVE
    play.hear(B, claim(ME, DEAD, MAX_INCARNATION, BOOT))
    assert play.machine.incarnation == MAX_INCARNATION + 1


# ---- restart, leave, unknown ----


def test_a_restarted_member_goes_above_its_past_when_told() -> None:
    play = Play(A, B)
    play.hear(A, claim(ME, DEAD, 6, OTHER))
    assert play.machine.incarnation == 7
    assert play.machine.health == 0


def test_a_member_heard_in_another_life_is_told_of_its_past() -> None:
    play = Play(A, B)
    play.hear(A, boot=OTHER, incarnation=6)
    play.sent.clear()
    play.hear(A, boot=THEIRS, incarnation=1)
    assert play.told(A)[0] == claim(A, ALIVE, 6, OTHER)
    play.hear(A, boot=THEIRS, incarnation=7)
    assert play.changed[-1] == Changed(
        A, ALIVE, ALIVE, 7, restarted=True, reason=f"alive, said by {A[:10]}"
    )
    member = play.machine.member(A)
    assert member is not None
    assert (member.boot, member.flaps) == (THEIRS, 0)


def test_a_restart_after_a_death_is_no_flap_and_a_refutation_is_one() -> None:
    play = Play(A, B)
    play.hear(A)
    play.hear(B, claim(A, DEAD))
    play.hear(A, boot=OTHER, incarnation=2)
    assert play.changed[-1].restarted
    play.hear(B, claim(A, SUSPECT, 2, OTHER, B))
    play.hear(A, boot=OTHER, incarnation=3)
    member = play.machine.member(A)
    assert member is not None
    assert member.flaps == 1


def test_a_leaver_says_so_itself_and_refutes_nothing() -> None:
    others = [NodeId(f"{number:064x}") for number in range(1, 20)]
    play = Play(*others)
    play.take(play.machine.leave(play.now))
    assert len(play.sent) == FAREWELLS
    assert all(send.message.updates[0] == claim(ME, LEFT, 1, BOOT) for send in play.sent)
    assert play.machine.next_due() is None
    play.sent.clear()
    play.hear(others[0], claim(ME, DEAD, 1, BOOT))
    assert play.machine.incarnation == 1
    assert not play.sent
    play.say(w.Probe, others[0], 4)
    assert play.of(w.Ack, others[0])[0].updates[0].standing is LEFT


def test_who_has_left_is_neither_probed_nor_suspected() -> None:
    play = Play(A, B)
    play.hear(A, claim(A, LEFT))
    play.sent.clear()
    play.hear(B, claim(A, DEAD), claim(A, SUSPECT, by=B))
    play.run(20 * WAN.interval_s, answering=(B,))
    assert play.standing(A) is LEFT
    assert not play.of(object, A)


def test_the_dead_are_probed_now_and_then() -> None:
    play = Play(A, B)
    play.hear(A)
    play.hear(B, claim(A, DEAD))
    play.sent.clear()
    play.run(40 * WAN.interval_s, answering=(B,))
    probes = play.of(w.Probe, A)
    assert len(probes) == pytest.approx(40 / WAN.revive_intervals, abs=1)
    assert all(probe.updates[0] == claim(A, DEAD) for probe in probes)


def test_unknown_members_are_ignored() -> None:
    play = Play(A)
    play.hear(STRANGER, claim(A, DEAD))
    play.say(w.Probe, STRANGER, 4)
    play.hear(A, claim(STRANGER, ALIVE), claim(STRANGER, SUSPECT, by=A))
    play.say(w.ProbeFor, A, 5, STRANGER)
    assert play.standing(A) is ALIVE
    assert not play.of(object, STRANGER)
    assert [member.node for member in play.machine.members()] == [A]


def test_oneself_is_not_a_member_and_learning_twice_does_nothing() -> None:
    play = Play(ME, A, A)
    assert [member.node for member in play.machine.members()] == [A]


def test_who_is_forgotten_is_unknown() -> None:
    play = suspected()
    play.machine.forget(A)
    play.run(60, answering=(B, C, D))
    assert play.machine.member(A) is None
    assert not [change for change in play.changed if change.after is DEAD]
    play.machine.forget(A)
    for node in (B, C, D):
        play.machine.forget(node)
    assert play.machine.next_due() is None


def test_members_have_a_limit() -> None:
    known = roll.Roll(Draw(1))
    known.records = {NodeId(str(number)): None for number in range(roll.MAX_MEMBERS)}  # type: ignore[misc]
    with pytest.raises(InvariantError, match="limit of 4097"):
        known.add(A, 0.0)


# ---- pauses ----


def test_ones_own_pause_is_no_silence_of_others() -> None:
    play = suspected()
    before = play.machine.next_due()
    assert before is not None
    play.now += 600
    play.take(play.machine.tick(play.now))
    assert play.standing(A) is SUSPECT
    assert play.machine.health == 1
    assert not [change for change in play.changed if change.after is DEAD]
    due = play.machine.next_due()
    assert due is not None
    assert due >= play.now - 1e-3


def test_a_tick_that_is_early_does_nothing() -> None:
    play = Play(A, B)
    due = play.machine.next_due()
    assert due is not None
    assert play.machine.tick(due - 0.001) == ()
    assert play.machine.next_due() == due


@given(st.lists(st.floats(0, 30), max_size=60), st.integers(0, 1 << 63))
@settings(max_examples=50)
def test_ticks_at_any_time_always_lead_on(steps: list[float], seed: int) -> None:
    play = Play(A, B, C, seed=seed)
    for step in steps:
        play.now += step
        for _ in range(100):
            play.take(play.machine.tick(play.now))
            due = play.machine.next_due()
            assert due is not None
            if due > play.now:
                break
        else:
            pytest.fail(f"due at {due} and still so at {play.now} after a hundred ticks")


# ---- rumours and numbers ----


def test_rumours_are_told_a_limited_number_of_times_and_the_least_told_first() -> None:
    rumours = Rumours()
    rumours.resize(100)
    for node in (A, B):
        rumours.add(claim(node, DEAD))
    assert [update.node for update in rumours.take(1, C)] == [B]
    assert [update.node for update in rumours.take(1, C)] == [A]
    told = 2 + sum(len(rumours.take(6, C)) for _ in range(50))
    assert told == 2 * 4 * 3
    assert len(rumours) == 0


def test_nobody_is_told_a_rumour_about_itself_and_the_latest_counts() -> None:
    rumours = Rumours()
    rumours.resize(3)
    rumours.add(claim(A, SUSPECT))
    rumours.add(claim(A, ALIVE, 2))
    assert rumours.take(6, A) == []
    assert rumours.take(6, B) == [claim(A, ALIVE, 2)]


def test_draws_are_those_of_splitmix() -> None:
    draw = Draw(1234567)
    assert [draw.below(1 << 64) for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
