import itertools

import pytest
from msgspec.structs import replace

from lensemble.errors import InvalidTransition, OperatorError, Response
from lensemble.ids import Digest, NodeId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble_coord.training import outer_round as r
from lensemble_coord.training import patience
from tests.coord.round_play import (
    PRIOR,
    STRANGER,
    SUM,
    A,
    B,
    C,
    D,
    Play,
    advanced,
    announced,
    arrived,
    closed,
    committed,
    declined,
    diagnosed,
    expired,
    failed,
    kinds,
    lost,
    next_digest,
    only,
    progressed,
    root,
    shares,
    signature,
    summed,
    unmasks,
    update_digest,
)

CANCEL_PHASES = tuple(CancelTimer(timer) for timer in r.PHASE_TIMERS)
CANCELS = ["CancelTimer"] * len(CANCEL_PHASES)


# ---- the happy path ----


def test_one_round_from_ask_to_close() -> None:
    play = Play(A, B)
    assert play.feed(r.RoundsAsked(1)) == (
        r.OpenRound(0, 0, PRIOR, (A, B)),
        ArmTimer(r.Timer.OPEN, 60.0),
    )
    assert play.feed(committed(B, holds=17)) == (r.OfferState(B, r.Holding(17)),)
    assert play.feed(committed(A)) == (
        r.OfferState(A, r.Holding(0)),
        CancelTimer(r.Timer.OPEN),
        CancelTimer(r.Timer.GRACE),
        r.BeginCollect((A, B)),
        ArmTimer(r.Timer.COLLECT, 150.0),
    )
    assert play.feed(announced(B)) == ()
    assert play.feed(arrived(B)) == ()
    assert play.feed(arrived(A)) == ()
    contributors = tuple(
        r.Contribution(node, root(node), signature(node), update_digest(node), signature(node))
        for node in (A, B)
    )
    assert play.feed(announced(A)) == (
        CancelTimer(r.Timer.COLLECT),
        CancelTimer(r.Timer.COLLECT_END),
        r.DeriveSum(contributors),
    )
    assert play.feed(summed()) == (r.Diagnose(SUM, contributors),)
    assert play.feed(diagnosed()) == (r.Commit(SUM, contributors),)
    assert play.feed(advanced()) == (
        r.AnnounceClose(0, 0, next_digest(0), (A, B)),
        r.FinishRun(completed=True),
    )
    assert isinstance(play.state, r.Closed)
    assert play.state.ground.digest == next_digest(0)


def test_rounds_asked_for_follow_one_another() -> None:
    play = Play(A, B).opens(rounds=2)
    play.collects(A, B).sends(A, B)
    actions = play.commits()
    assert kinds(actions) == ["AnnounceClose", "OpenRound", "ArmTimer"]
    assert only(actions, r.OpenRound) == r.OpenRound(1, 0, next_digest(0), (A, B))
    play.collects(A, B, at=(1, 0)).sends(A, B, at=(1, 0))
    assert only(play.commits((1, 0)), r.FinishRun) == r.FinishRun(completed=True)
    assert play.state.ground.round == 2


def test_rounds_asked_for_during_a_run_are_part_of_it() -> None:
    play = Play(A, B).opens(rounds=1)
    assert play.feed(r.RoundsAsked(2)) == ()
    for t in range(3):
        play.collects(A, B, at=(t, 0)).sends(A, B, at=(t, 0))
        play.commits((t, 0))
    assert play.finished == [r.FinishRun(completed=True)]


@pytest.mark.parametrize("rounds", [0, -1])
def test_a_run_of_no_rounds_cannot_be_asked_for(rounds: int) -> None:
    with pytest.raises(OperatorError, match="rounds were asked for"):
        r.RoundsAsked(rounds)


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C])))
def test_contributors_are_sorted_whatever_came_first(order: tuple[NodeId, ...]) -> None:
    play = Play(A, B, C).opens().collects(*order)
    actions = play.sends(*order)
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [A, B, C]


# ---- OPEN ----


def test_a_quorum_waits_a_grace_for_those_who_were_asked() -> None:
    play = Play(A, B, C).opens()
    actions = play.feed(committed(A), committed(B))
    assert actions == (r.OfferState(B, r.Holding(0)), ArmTimer(r.Timer.GRACE, 2.0))
    assert r.waiting(play.state).on == (C,)
    assert only(play.feed(expired(r.Timer.GRACE)), r.BeginCollect).nodes == (A, B)


def test_the_last_one_asked_ends_the_grace() -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert only(play.feed(committed(C)), r.BeginCollect).nodes == (A, B, C)


def test_losing_the_last_one_waited_for_ends_the_grace() -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert only(play.feed(lost(C)), r.BeginCollect).nodes == (A, B)


@pytest.mark.parametrize("leaves", [lost(B), declined(B), r.MemberReady(B)])
def test_losing_the_quorum_takes_the_grace_back(leaves: r.Event) -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert CancelTimer(r.Timer.GRACE) in play.feed(leaves)
    assert play.feed(expired(r.Timer.GRACE)) == (), "an expiry that was under way comes to nothing"
    play.feed(r.MemberReady(B))
    assert ArmTimer(r.Timer.GRACE, 2.0) in play.feed(committed(B)), "the next quorum has its grace"


def test_one_who_joins_late_is_asked_too() -> None:
    play = Play(A).opens()
    play.feed(committed(A))
    assert play.feed(r.MemberReady(B)) == (r.AskAlso(B),)
    assert only(play.feed(committed(B)), r.BeginCollect).nodes == (A, B)


def test_joiners_do_not_stretch_the_grace() -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert play.feed(r.MemberReady(D)) == (r.AskAlso(D),)
    assert only(play.feed(expired(r.Timer.GRACE)), r.BeginCollect).nodes == (A, B)


def test_one_who_comes_back_binds_again() -> None:
    play = Play(A, B).opens()
    play.feed(committed(A), lost(A))
    assert play.feed(r.MemberReady(A)) == (r.AskAlso(A),)
    assert play.feed(committed(A)) == (r.OfferState(A, r.Holding(0)),)
    assert only(play.feed(committed(B)), r.BeginCollect).nodes == (A, B)


def test_a_second_life_that_was_not_reported_lost_binds_again() -> None:
    play = Play(A, B).opens()
    play.feed(committed(A), r.MemberReady(A))
    assert r.waiting(play.state).on == (A, B)
    assert play.feed(committed(B)) == (r.OfferState(B, r.Holding(0)),)


def test_a_resting_node_finishes_its_round_and_is_not_asked_again_until_it_wakes() -> None:
    play = Play(A, B, C).opens(rounds=2).collects(A, B, C)
    assert play.feed(r.MemberRests(C)) == ()
    play.sends(A, B, C)
    assert only(play.commits(), r.OpenRound).nodes == (A, B)
    assert r.waiting(play.state).on == (A, B)
    play.feed(lost(C), r.MemberReady(C))
    assert r.waiting(play.state).on == (A, B)
    assert play.feed(r.MemberRests(C, resting=False)) == (r.AskAlso(C),)
    assert r.waiting(play.state).on == (A, B, C)


def test_a_node_that_rests_while_a_round_is_open_is_waited_for_only_if_it_has_bound() -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert only(play.feed(r.MemberRests(C)), r.BeginCollect).nodes == (A, B)
    play = Play(A, B, C).opens()
    play.feed(committed(A), r.MemberRests(A), committed(B))
    assert r.waiting(play.state).on == (C,)
    assert r.participants(play.state) == {A, B}
    assert only(play.feed(committed(C)), r.BeginCollect).nodes == (A, B, C)


def test_whoever_comes_while_it_rests_is_asked_when_it_wakes() -> None:
    play = Play(A, B).opens()
    play.feed(r.MemberRests(C))
    assert play.feed(r.MemberReady(C)) == ()
    assert play.feed(r.MemberRests(C, resting=False)) == (r.AskAlso(C),)
    assert play.feed(r.MemberRests(A), r.MemberRests(A, resting=False)) == (r.AskAlso(A),)
    play.feed(committed(B), r.MemberRests(B))
    assert play.feed(r.MemberRests(B, resting=False)) == ()


def test_declining_ends_the_wait_for_that_node() -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert only(play.feed(declined(C)), r.BeginCollect).nodes == (A, B)


def test_whoever_declines_may_still_bind() -> None:
    play = Play(A, B).opens()
    play.feed(declined(A), declined(A), declined(A))
    assert isinstance(play.state, r.Open)
    assert len(play.state.declined) == 1, "saying it again does not make the state grow"
    play.feed(committed(A))
    assert play.state.declined == ()
    assert only(play.feed(committed(B)), r.BeginCollect).nodes == (A, B)


def test_open_timeout_without_a_quorum_retries() -> None:
    play = Play(A, B).opens()
    play.feed(committed(A), declined(B, reason="its dataset is empty"))
    actions = play.feed(expired(r.Timer.OPEN))
    abort = only(actions, r.AnnounceAbort)
    assert (abort.code, abort.retries) == ("fault_tolerance_exceeded", True)
    assert "waiting for 1 more participant (have 1, quorum 2)" in abort.reason
    assert "bbbbbbbbbbbb declined: its dataset is empty" in abort.reason
    assert actions[: len(CANCEL_PHASES)] == CANCEL_PHASES
    assert actions[-1] == ArmTimer(r.Timer.RETRY, 1.0)


def test_open_timeout_with_a_quorum_goes_on() -> None:
    play = Play(A, B, C).opens()
    play.feed(committed(A), committed(B))
    assert only(play.feed(expired(r.Timer.OPEN)), r.BeginCollect).nodes == (A, B)


def test_an_abort_repeats_what_a_few_nodes_said_not_all_of_them() -> None:
    nodes = [NodeId(f"{i:064x}") for i in range(100)]
    play = Play(*nodes).opens()
    play.feed(*(declined(node, reason="x" * 400) for node in nodes))
    reason = only(play.feed(expired(r.Timer.OPEN)), r.AnnounceAbort).reason
    assert reason.endswith("and 92 more")
    assert len(reason) < 5000


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (committed(STRANGER), "unknown"),
        (declined(STRANGER), "unknown"),
        (declined(STRANGER, code="dp_budget_exceeded"), "unknown"),
        (committed(A), "duplicate"),
        (committed(B, at=(0, 1)), "stale"),
        (committed(B, at=(1, 0)), "stale"),
        (announced(A), "misplaced"),
        (arrived(A), "misplaced"),
    ],
)
def test_words_that_do_not_fit_an_open_round(event: r.FromPeer, code: str) -> None:
    play = Play(A, B).opens()
    play.feed(committed(A))
    before = play.state
    refuse = only(play.feed(event), r.Refuse)
    assert (refuse.node, refuse.code) == (event.node, code)
    assert play.state == before


# ---- COLLECTING ----


def test_elastic_completion_at_the_collect_timeout() -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    play.sends(A, C)
    assert r.waiting(play.state) == r.Waiting("waiting for 1 of 3 updates (have 2, quorum 2)", (B,))
    actions = play.stalls()
    assert kinds(actions) == ["DropUpdate", "CancelTimer", "CancelTimer", "DeriveSum"]
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [A, C]
    assert isinstance(play.state, r.Aggregating)
    still = "no progress for 600 s: it has yet to begin"
    assert play.state.dropped == (r.Dropped(B, "timeout", still),)


def test_half_a_contribution_at_the_timeout_is_dropped() -> None:
    play = Play(A, B, C, D).opens().collects(A, B, C, D)
    play.sends(A, B)
    play.feed(announced(C), arrived(D))
    actions = play.stalls()
    assert {a.node for a in actions if isinstance(a, r.DropUpdate)} == {C, D}
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [A, B]


def test_collect_timeout_below_the_quorum_aborts() -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    play.sends(A)
    abort = only(play.stalls(), r.AnnounceAbort)
    assert (abort.code, abort.retries) == ("fault_tolerance_exceeded", True)
    still = "no progress for 600 s: it has yet to begin"
    assert abort.reason == (
        f"only 1 of the 2 updates needed can arrive ({B[:12]}: {still}; {C[:12]}: {still})"
    )


# ---- progress ----


def looks(play: Play, count: int) -> tuple[r.Action, ...]:
    actions: tuple[r.Action, ...] = ()
    for _ in range(count):
        actions = play.feed(expired(r.Timer.COLLECT))
    return actions


def test_a_slow_node_that_moves_is_waited_for() -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    play.sends(A, C)
    for done in range(1, 40):
        play.feed(progressed(B, "sending", done, 40))
        assert looks(play, 3) == (ArmTimer(r.Timer.COLLECT, 150.0),)
    play.sends(B)
    assert isinstance(play.state, r.Aggregating)
    assert [c.node for c in play.state.contributors] == [A, B, C]


def test_only_who_stalls_is_left_out() -> None:
    play = Play(A, B, C, D).opens().collects(A, B, C, D)
    play.sends(A)
    play.feed(progressed(B, "training", 3, 10), progressed(C, "fetching", 1, 4))
    looks(play, 3)
    play.feed(progressed(B, "training", 4, 10), announced(D))
    drops = [a.node for a in looks(play, 1) if isinstance(a, r.DropUpdate)]
    assert drops == [C, D]
    assert isinstance(play.state, r.Collecting)
    reasons = [d.reason for d in play.state.dropped]
    assert reasons[0] == "no progress for 600 s: 25% of the state is there"
    assert [each.node for each in r.awaited(play.state)] == [B]
    play.sends(B)
    assert isinstance(play.state, r.Aggregating)


@pytest.mark.parametrize(
    "said",
    [
        ("training", 5, 10),
        ("training", 4, 10),
        ("training", 6, 11),
        ("training", 12, 10),
        ("fetching", 9, 10),
        ("dreaming", 6, 10),
    ],
)
def test_what_is_no_progress_buys_no_time(said: tuple[str, int, int]) -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    play.sends(A, C)
    play.feed(progressed(B, "training", 5, 10))
    looks(play, 3)
    before = play.state
    assert play.feed(progressed(B, *said)) == ()
    assert play.feed(progressed(B, "sending", 1, 10, at=(0, 1))) == ()
    assert play.feed(progressed(STRANGER, "sending", 1, 10)) == ()
    assert play.state == before
    looks(play, 1)
    assert isinstance(play.state, r.Aggregating)


def test_progress_for_ever_does_not_hold_a_round_for_ever() -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    play.sends(A, C)
    bound = patience.CHECKS * patience.MAX_PATIENCE
    for done in range(1, bound + 1):
        assert isinstance(play.state, r.Collecting)
        play.feed(progressed(B, "sending", done, 1 << 62))
        looks(play, 1)
    assert isinstance(play.state, r.Aggregating)
    assert [c.node for c in play.state.contributors] == [A, C]


def test_a_cap_ends_the_wait_for_who_still_moves() -> None:
    play = Play(A, B, C, collect_max_s=900.0).opens().collects(A, B, C)
    play.sends(A, C)
    play.feed(progressed(B, "sending", 1, 2))
    assert isinstance(play.state, r.Collecting)
    actions = play.feed(expired(r.Timer.COLLECT_END))
    assert [a.node for a in actions if isinstance(a, r.DropUpdate)] == [B]
    assert isinstance(play.state, r.Aggregating)


def test_what_a_status_says_of_who_is_waited_for() -> None:
    moving = patience.Advance(A, "sending", 4, 10)
    text = "40% of its update is sent and it moves; left out if it stalls for 600 s"
    assert patience.outlook(moving, 600.0, 120.0) == text
    still = patience.Advance(A, "waiting", still=2)
    text = "it holds the state and it stands still; left out in 270 s unless it moves"
    assert patience.outlook(still, 600.0, 120.0) == text
    assert patience.describe(patience.Advance(A, "fetching")) == "0% of the state is there"


@pytest.mark.parametrize("leaves", [lost, declined])
def test_below_the_quorum_the_round_aborts_at_once(leaves: type) -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    assert play.feed(leaves(C)) == (r.DropUpdate(C),)
    actions = play.feed(leaves(A))
    assert kinds(actions) == ["DropUpdate", *CANCELS, "AnnounceAbort", "ArmTimer"]
    abort = only(actions, r.AnnounceAbort)
    assert abort.code == "fault_tolerance_exceeded"
    assert "cccccccccccc: " in abort.reason
    assert "aaaaaaaaaaaa: " in abort.reason


def test_losing_one_of_four_closes_with_three() -> None:
    play = Play(A, B, C, D).opens().collects(A, B, C, D)
    play.sends(A, B, C)
    actions = play.feed(lost(D))
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [A, B, C]


def test_losing_whoever_has_sent_costs_nothing() -> None:
    play = Play(A, B).opens().collects(A, B)
    play.sends(A)
    assert play.feed(lost(A)) == ()
    actions = play.sends(B)
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [A, B]


def test_one_who_comes_back_while_collecting_waits_for_the_next_round() -> None:
    play = Play(A, B, C).opens(rounds=2).collects(A, B, C)
    play.feed(lost(C))
    assert play.feed(r.MemberReady(C)) == ()
    assert only(play.feed(committed(C)), r.Refuse).code == "misplaced"
    assert only(play.feed(announced(C)), r.Refuse).code == "dropped"
    assert only(play.feed(arrived(C)), r.Refuse).code == "dropped"
    play.sends(A, B)
    assert only(play.commits(), r.OpenRound).nodes == (A, B, C)


def test_a_newcomer_while_collecting_is_asked_at_the_next_round() -> None:
    play = Play(A, B).opens(rounds=2).collects(A, B)
    assert play.feed(r.MemberReady(C)) == ()
    assert only(play.feed(announced(C)), r.Refuse).code == "unbound"
    play.sends(A, B)
    assert only(play.commits(), r.OpenRound).nodes == (A, B, C)


@pytest.mark.parametrize("blob_first", [False, True])
def test_a_contribution_is_the_blob_and_its_announcement_in_any_order(blob_first: bool) -> None:
    play = Play(A, B).opens().collects(A, B)
    halves = (arrived(A), announced(A)) if blob_first else (announced(A), arrived(A))
    play.feed(*halves)
    assert isinstance(play.state, r.Collecting)
    assert [c.node for c in play.state.verified] == [A]
    assert r.outstanding(play.state) == {B}


@pytest.mark.parametrize("blob_first", [False, True])
@pytest.mark.parametrize("other", [{"digest": Digest("9" * 64)}, {"signature": b"0" * 64}])
def test_a_blob_that_is_not_the_announced_one_is_dropped(
    blob_first: bool, other: dict[str, object]
) -> None:
    play = Play(A, B, C).opens().collects(A, B, C)
    blob = arrived(A, **other)
    halves = (blob, announced(A)) if blob_first else (announced(A), blob)
    actions = play.feed(*halves)
    assert kinds(actions) == ["Refuse", "DropUpdate"]
    assert only(actions, r.Refuse).code == "contract_violation"
    assert isinstance(play.state, r.Collecting)
    assert r.outstanding(play.state) == {B, C}
    assert only(play.feed(arrived(A)), r.Refuse).code == "dropped"


@pytest.mark.parametrize("second", [announced(A), arrived(A)])
def test_a_second_half_of_one_kind_is_refused_and_the_first_stays(second: r.FromPeer) -> None:
    play = Play(A, B).opens().collects(A, B)
    play.sends(A)
    before = play.state
    actions = play.feed(second)
    assert kinds(actions) == ["Refuse"]
    assert only(actions, r.Refuse).code == "duplicate"
    assert play.state == before


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (announced(STRANGER), "unbound"),
        (arrived(STRANGER), "unbound"),
        (declined(STRANGER, code="dp_budget_exceeded"), "unknown"),
        (committed(C), "misplaced"),
        (announced(A, at=(0, 1)), "stale"),
        (arrived(A, at=(1, 0)), "stale"),
        (declined(A, at=(0, 1)), "stale"),
    ],
)
def test_words_that_do_not_fit_collecting(event: r.FromPeer, code: str) -> None:
    play = Play(A, B).opens().collects(A, B)
    before = play.state
    refuse = only(play.feed(event), r.Refuse)
    assert (refuse.node, refuse.code) == (event.node, code)
    assert play.state == before


def test_an_update_for_another_dataset_stops_the_federation() -> None:
    play = Play(A, B, C).opens(rounds=5).collects(A, B, C)
    actions = play.feed(announced(A, dataset_root=root(B)))
    assert kinds(actions) == ["Refuse", *CANCELS, "AnnounceAbort", "FinishRun"]
    assert only(actions, r.Refuse).code == "commitment_mismatch"
    abort = only(actions, r.AnnounceAbort)
    assert (abort.code, abort.retries) == ("commitment_mismatch", False)
    finish = only(actions, r.FinishRun)
    assert (finish.completed, finish.code) == (False, "commitment_mismatch")


def test_an_update_for_another_dataset_may_be_left_out_instead() -> None:
    play = Play(A, B, C, on_commitment_mismatch="exclude").opens().collects(A, B, C)
    actions = play.feed(announced(A, dataset_root=root(B)))
    assert kinds(actions) == ["Refuse", "DropUpdate"]
    actions = play.sends(B, C)
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [B, C]
    assert isinstance(play.state, r.Aggregating)
    assert [d.code for d in play.state.dropped] == ["commitment_mismatch"]


def test_leaving_out_below_the_quorum_aborts_and_retries() -> None:
    play = Play(A, B, on_commitment_mismatch="exclude").opens().collects(A, B)
    abort = only(play.feed(announced(A, dataset_root=root(B))), r.AnnounceAbort)
    assert (abort.code, abort.retries) == ("fault_tolerance_exceeded", True)


def test_a_spent_privacy_budget_stops_the_federation_in_open_and_in_collecting() -> None:
    spent = declined(A, code="dp_budget_exceeded", reason="epsilon 8.0 is spent")
    for play in (Play(A, B, C).opens(9), Play(A, B, C).opens(9).collects(A, B, C)):
        actions = play.feed(spent)
        assert only(actions, r.AnnounceAbort).code == "dp_budget_exceeded"
        assert not only(actions, r.AnnounceAbort).retries
        assert only(actions, r.FinishRun).code == "dp_budget_exceeded"
        assert "aaaaaaaaaaaa: epsilon 8.0 is spent" in only(actions, r.FinishRun).reason


# ---- AGGREGATING, ALIGNING, COMMITTING ----


PLAIN = (r.Open, r.Collecting, r.Aggregating, r.Aligning, r.Committing)
MASKED = (r.Open, r.Sharing, r.Collecting, r.Unmasking, r.Aggregating, r.Aligning, r.Committing)
IN_FLIGHT = [(phase, False) for phase in PLAIN] + [(phase, True) for phase in MASKED]
FROZEN = [each for each in IN_FLIGHT if each[0] in (r.Aggregating, r.Aligning, r.Committing)]


def at_phase(phase: type[r.InFlight], masked: bool = False, rounds: int = 1) -> Play:
    play = Play(A, B, C, masked=masked).opens(rounds)
    steps = {
        r.Open: (),
        r.Sharing: tuple(committed(node) for node in (A, B, C)),
        r.Collecting: tuple(shares(node) for node in (A, B, C)) if masked else (),
        r.Unmasking: tuple(half(node) for node in (A, B, C) for half in (announced, arrived)),
        r.Aggregating: tuple(unmasks(node) for node in (A, B, C)) if masked else (),
        r.Aligning: (summed(),),
        r.Committing: (diagnosed(),),
    }
    for reached, events in steps.items():
        play.feed(*events)
        if reached is phase:
            break
    assert isinstance(play.state, phase)
    return play


@pytest.mark.parametrize(("phase", "masked"), FROZEN)
def test_nobody_is_added_or_taken_away_once_contributors_are_frozen(
    phase: type[r.InFlight], masked: bool
) -> None:
    play = at_phase(phase, masked)
    assert play.feed(lost(A)) == ()
    assert play.feed(r.MemberReady(D)) == ()
    assert play.feed(declined(B)) == ()
    for late in (announced(B), arrived(B), committed(D)):
        assert only(play.feed(late), r.Refuse).code == "misplaced"
    assert isinstance(play.state, phase)


@pytest.mark.parametrize(("phase", "masked"), IN_FLIGHT)
@pytest.mark.parametrize("response", list(Response))
def test_work_of_ours_that_fails_ends_the_attempt(
    phase: type[r.InFlight], masked: bool, response: Response
) -> None:
    play = at_phase(phase, masked)
    revealed = masked and phase in (r.Aggregating, r.Aligning, r.Committing)
    retries = response is Response.RETRY and not revealed
    if revealed and phase is not r.Aligning and response is Response.RETRY:
        for _ in range(play.state.ground.rules.max_attempts - 1):
            play.feed(failed(response=response), expired(r.Timer.RETRY))
    actions = play.feed(failed(response=response))
    abort = only(actions, r.AnnounceAbort)
    assert (abort.code, abort.retries) == ("storage", retries)
    assert ("FinishRun" in kinds(actions)) == (not retries)
    assert play.state.ground.digest == PRIOR


@pytest.mark.parametrize(
    ("code", "response", "retries"),
    [
        ("agg_nondeterministic", Response.STOP, False),
        ("secure_aggregation", Response.RETRY, True),
        ("checkpoint_integrity", Response.RETRY, True),
    ],
)
def test_the_failure_table(code: str, response: Response, retries: bool) -> None:
    play = at_phase(r.Aggregating)
    abort = only(play.feed(failed(code=code, response=response)), r.AnnounceAbort)
    assert (abort.code, abort.retries) == (code, retries)


def test_outcomes_of_an_older_attempt_are_ignored() -> None:
    play = at_phase(r.Aggregating)
    play.feed(failed(), expired(r.Timer.RETRY))
    play.collects(A, B, C, at=(0, 1)).sends(A, B, C, at=(0, 1))
    before = play.state
    for old in (summed(), diagnosed(), failed()):
        assert play.feed(old) == ()
    assert play.state == before


@pytest.mark.parametrize("event", [summed(), diagnosed(), failed()], ids=lambda e: type(e).__name__)
def test_outcomes_that_come_after_an_abort_are_ignored(event: r.FromWork) -> None:
    play = at_phase(r.Aggregating)
    play.feed(r.AbortAsked("enough"))
    assert play.feed(event) == ()


@pytest.mark.parametrize("at", [(0, 0), (0, 1), (7, 0)])
def test_a_commit_that_was_not_asked_for_is_never_passed_over(at: tuple[int, int]) -> None:
    """The ledger would be ahead of the machine; going on would fork it."""
    aborted = at_phase(r.Committing)
    aborted.feed(failed())
    others = [at_phase(*each) for each in IN_FLIGHT if each[0] is not r.Committing]
    for play in (Play(A), aborted, *others):
        with pytest.raises(InvalidTransition):
            play.feed(advanced(at))


def test_a_commit_of_another_attempt_is_never_passed_over() -> None:
    with pytest.raises(InvalidTransition):
        at_phase(r.Committing).feed(advanced((0, 1)))


# ---- retry ----


def test_attempts_count_up_the_pause_doubles_and_the_last_one_ends_the_run() -> None:
    play = Play(A, B, max_attempts=4).opens(rounds=3)
    for attempt, pause in enumerate([1.0, 2.0, 3.0]):
        actions = play.feed(expired(r.Timer.OPEN))
        assert only(actions, r.AnnounceAbort).attempt == attempt
        assert actions[-1] == ArmTimer(r.Timer.RETRY, pause)
        opened = only(play.feed(expired(r.Timer.RETRY)), r.OpenRound)
        assert (opened.round, opened.attempt) == (0, attempt + 1)
    actions = play.feed(expired(r.Timer.OPEN))
    assert not only(actions, r.AnnounceAbort).retries
    assert only(actions, r.FinishRun).code == "fault_tolerance_exceeded"
    assert r.waiting(play.state).reason.startswith("stopped: OPEN: waiting for 2 of 2 asked")


def test_a_new_run_goes_on_with_the_next_attempt_number() -> None:
    play = Play(A, B, max_attempts=1).opens()
    play.feed(expired(r.Timer.OPEN))
    opened = only(play.feed(r.RoundsAsked(1)), r.OpenRound)
    assert (opened.round, opened.attempt) == (0, 1)
    play.collects(A, B, at=(0, 1)).sends(A, B, at=(0, 1))
    assert only(play.commits((0, 1)), r.FinishRun).completed


def test_a_new_run_has_all_its_attempts() -> None:
    play = Play(A, B, max_attempts=2).opens()
    play.feed(expired(r.Timer.OPEN), expired(r.Timer.RETRY), expired(r.Timer.OPEN))
    assert only(play.feed(r.RoundsAsked(1), expired(r.Timer.OPEN)), r.AnnounceAbort).retries


def test_a_round_that_closes_gives_the_next_all_its_attempts() -> None:
    play = Play(A, B, max_attempts=2).opens(rounds=2)
    play.feed(expired(r.Timer.OPEN), expired(r.Timer.RETRY))
    play.collects(A, B, at=(0, 1)).sends(A, B, at=(0, 1))
    play.commits((0, 1))
    assert only(play.feed(expired(r.Timer.OPEN)), r.AnnounceAbort).retries


def test_a_retry_asks_whoever_is_here_by_then() -> None:
    play = Play(A, B).opens().collects(A, B)
    play.feed(lost(A))
    assert isinstance(play.state, r.Aborted)
    play.feed(r.MemberReady(C), r.MemberReady(A), lost(B))
    assert only(play.feed(expired(r.Timer.RETRY)), r.OpenRound).nodes == (A, C)


def test_words_of_the_discarded_attempt_are_refused() -> None:
    play = Play(A, B).opens().collects(A, B)
    play.feed(lost(A))
    assert only(play.feed(arrived(B)), r.Refuse).code == "misplaced"
    play.feed(expired(r.Timer.RETRY))
    assert only(play.feed(arrived(B)), r.Refuse).code == "stale"


# ---- patience ----


def test_patience_is_the_open_timeout_of_one_run_and_its_end() -> None:
    play = Play(A)
    assert ArmTimer(r.Timer.OPEN, 5.0) in play.feed(r.RoundsAsked(2, patience_s=5.0))
    actions = play.feed(expired(r.Timer.OPEN))
    assert not only(actions, r.AnnounceAbort).retries
    assert only(actions, r.FinishRun).code == "fault_tolerance_exceeded"
    assert ArmTimer(r.Timer.OPEN, 60.0) in play.feed(r.RoundsAsked(1))


def test_patience_holds_for_every_round_of_the_run_and_no_longer() -> None:
    play = Play(A, B).opens(rounds=2, patience_s=5.0)
    play.collects(A, B).sends(A, B)
    assert ArmTimer(r.Timer.OPEN, 5.0) in play.commits()
    play.collects(A, B, at=(1, 0)).sends(A, B, at=(1, 0))
    play.commits((1, 0))
    assert ArmTimer(r.Timer.OPEN, 60.0) in play.feed(r.RoundsAsked(1))


def test_rounds_asked_for_without_patience_leave_that_of_the_run() -> None:
    play = Play(A, B).opens(patience_s=5.0)
    play.feed(r.RoundsAsked(1))
    play.collects(A, B).sends(A, B)
    assert ArmTimer(r.Timer.OPEN, 5.0) in play.commits()


def test_patience_ends_with_the_run_an_operator_ends() -> None:
    play = Play(A, B).opens(patience_s=5.0).collects(A, B)
    play.feed(lost(A), r.AbortAsked("enough"))
    assert ArmTimer(r.Timer.OPEN, 60.0) in play.feed(r.RoundsAsked(1))


def test_patience_does_not_change_other_failures() -> None:
    play = Play(A, B).opens(patience_s=5.0).collects(A, B)
    actions = play.feed(lost(A))
    assert only(actions, r.AnnounceAbort).retries
    assert ArmTimer(r.Timer.OPEN, 5.0) in play.feed(expired(r.Timer.RETRY))


# ---- an operator's abort ----


@pytest.mark.parametrize(
    ("phase", "masked"), [each for each in IN_FLIGHT if each[0] is not r.Committing]
)
def test_an_operator_aborts_before_the_commit(phase: type[r.InFlight], masked: bool) -> None:
    play = at_phase(phase, masked, rounds=4)
    actions = play.feed(r.AbortAsked("enough"))
    assert kinds(actions) == [*CANCELS, "AnnounceAbort", "FinishRun"]
    assert only(actions, r.AnnounceAbort).code == "stopped"
    assert only(actions, r.FinishRun) == r.FinishRun(
        completed=False, code="stopped", reason="enough"
    )


def test_an_operator_aborts_behind_a_commit_under_way() -> None:
    play = at_phase(r.Committing, rounds=4)
    assert play.feed(r.AbortAsked("enough")) == ()
    assert play.feed(advanced()) == (
        r.AnnounceClose(0, 0, next_digest(0), (A, B, C)),
        r.FinishRun(completed=False, code="stopped", reason="enough"),
    )
    assert isinstance(play.state, r.Closed)


@pytest.mark.parametrize("response", list(Response))
def test_a_commit_that_fails_after_an_operators_abort_is_not_tried_again(
    response: Response,
) -> None:
    play = at_phase(r.Committing, rounds=4)
    play.feed(r.AbortAsked("enough"))
    actions = play.feed(failed(response=response))
    assert not only(actions, r.AnnounceAbort).retries
    assert only(actions, r.FinishRun).code == "storage"


def test_an_operators_abort_is_forgotten_with_its_run() -> None:
    play = at_phase(r.Committing)
    play.feed(r.AbortAsked("enough"), failed(), r.RoundsAsked(1))
    play.collects(A, B, C, at=(0, 1)).sends(A, B, C, at=(0, 1))
    assert only(play.commits((0, 1)), r.FinishRun) == r.FinishRun(completed=True)


def test_rounds_asked_for_behind_an_operators_abort_are_another_run() -> None:
    play = at_phase(r.Committing, rounds=4)
    play.feed(r.AbortAsked("enough"), r.RoundsAsked(1))
    actions = play.feed(advanced())
    assert kinds(actions) == ["AnnounceClose", "FinishRun", "OpenRound", "ArmTimer"]
    assert only(actions, r.FinishRun).code == "stopped"
    play.collects(A, B, C, at=(1, 0)).sends(A, B, C, at=(1, 0))
    assert only(play.commits((1, 0)), r.FinishRun) == r.FinishRun(completed=True)


def test_an_operator_ends_the_wait_for_a_retry() -> None:
    play = Play(A, B).opens().collects(A, B)
    play.feed(lost(A))
    assert play.feed(r.AbortAsked("enough")) == (
        CancelTimer(r.Timer.RETRY),
        r.FinishRun(completed=False, code="stopped", reason="enough"),
    )
    assert play.feed(expired(r.Timer.RETRY)) == ()


def test_an_operator_aborts_nothing_at_rest() -> None:
    play = Play(A, B, max_attempts=1)
    assert play.feed(r.AbortAsked("enough")) == ()
    play.opens().feed(expired(r.Timer.OPEN))
    assert play.feed(r.AbortAsked("enough")) == ()


# ---- every state, every event ----

STATES: dict[str, Play] = {
    "closed": Play(A, B, C),
    "open": at_phase(r.Open),
    "sharing": at_phase(r.Sharing, masked=True),
    "collecting": at_phase(r.Collecting),
    "unmasking": at_phase(r.Unmasking, masked=True),
    **{phase.__name__.lower(): at_phase(phase) for phase in PLAIN[2:]},
    "committing_masked": at_phase(r.Committing, masked=True),
    "pausing": at_phase(r.Committing, masked=True),
    "retrying": Play(A, B, C).opens(),
    "stopped": Play(A, B, C).opens(),
}
STATES["retrying"].feed(expired(r.Timer.OPEN))
STATES["stopped"].feed(r.AbortAsked("enough"))
STATES["pausing"].feed(failed())

EVENTS: dict[str, r.Event] = {
    "asked": r.RoundsAsked(1),
    "ready": r.MemberReady(D),
    "rests": r.MemberRests(A),
    "lost": lost(A),
    "committed": committed(A),
    "shares": shares(A),
    "declined": declined(A),
    "spent": declined(A, code="dp_budget_exceeded"),
    "announced": announced(A),
    "arrived": arrived(A),
    "progress": progressed(A, "training", 1, 2),
    "unmasks": unmasks(A),
    "summed": summed(),
    "diagnosed": diagnosed(),
    "advanced": advanced(),
    "failed": failed(),
    "broken": failed(response=Response.STOP),
    "abort": r.AbortAsked("enough"),
    **{f"t_{timer}": TimerExpired(timer) for timer in r.Timer},
    "t_other": TimerExpired("of another machine"),
}

# "." the state does not change, "=" only its ground or members do, "!" it raises, "?" it refuses
TABLE = """
          closed open  sharing collect unmask aggr  align  commit mcommit pause   retry stop
asked     open   =     =       =       =      =     =      =      =       =       =     open
ready     =      =     =       =       =      =     =      =      =       =       =     =
rests     =      =     =       =       =      =     =      =      =       =       =     =
lost      =      =     =       =       =      =     =      =      =       =       =     =
committed ?      =     ?       ?       ?      ?     ?      ?      ?       ?       ?     ?
shares    ?      ?     =       ?       ?      ?     ?      ?      ?       ?       ?     ?
declined  .      =     =       =       =      .     .      .      .       .       .     .
spent     .      stop  stop    stop    =      .     .      .      .       .       .     .
announced ?      ?     ?       =       ?      ?     ?      ?      ?       ?       ?     ?
arrived   ?      ?     ?       =       ?      ?     ?      ?      ?       ?       ?     ?
progress  .      .     .       =       .      .     .      .      .       .       .     .
unmasks   ?      ?     ?       ?       =      ?     ?      ?      ?       ?       ?     ?
summed    .      !     !       !       !      align !      !      !       !       .     .
diagnosed .      !     !       !       !      !     commit !      !       !       .     .
advanced  !      !     !       !       !      !     !      closed closed  !       !     !
failed    .      retry retry   retry   retry  retry retry  retry  pause   .       .     .
broken    .      stop  stop    stop    stop   stop  stop   stop   stop    .       .     .
abort     .      stop  stop    stop    stop   stop  stop   =      =       =       stop  .
t_open    .      retry .       .       .      .     .      .      .       .       .     .
t_grace   .      .     .       .       .      .     .      .      .       .       .     .
t_share   .      .     retry   .       .      .     .      .      .       .       .     .
t_collect .      .     .       =       .      .     .      .      .       .       .     .
t_collect_end . .     .       .       .      .     .      .      .       .       .     .
t_unmask  .      .     .       .       retry  .     .      .      .       .       .     .
t_retry   .      .     .       .       .      .     .      .      .       mcommit open  .
t_other   .      .     .       .       .      .     .      .      .       .       .     .
"""
ABBREVIATED = {
    "collect": "collecting",
    "unmask": "unmasking",
    "aggr": "aggregating",
    "align": "aligning",
    "commit": "committing",
    "mcommit": "committing_masked",
    "pause": "pausing",
    "retry": "retrying",
    "stop": "stopped",
}
COLUMNS, *ROWS = (
    [ABBREVIATED.get(word, word) for word in line.split()] for line in TABLE.strip().splitlines()
)
CELLS = [
    (state, row[0], expected)
    for row in ROWS
    for state, expected in zip(COLUMNS, row[1:], strict=True)
]


def test_the_table_is_whole() -> None:
    assert {row[0] for row in ROWS} == set(EVENTS)
    assert set(COLUMNS) == set(STATES)
    assert {type(event) for event in EVENTS.values()} == set(r.Event.__args__)
    assert {type(play.state) for play in STATES.values()} == set(r.State.__args__)


def name_of(state: r.State) -> str:
    if isinstance(state, r.Aborted):
        return "retrying" if state.retrying else "stopped"
    if isinstance(state, r.Committing) and state.ground.rules.masked:
        return "pausing" if state.reason else "committing_masked"
    return type(state).__name__.lower()


@pytest.mark.parametrize(("state", "event", "expected"), CELLS)
def test_every_pair_is_answered_or_refused(state: str, event: str, expected: str) -> None:
    before = STATES[state].state
    if expected == "!":
        with pytest.raises(InvalidTransition):
            r.transition(before, EVENTS[event])
        return
    after, actions = r.transition(before, EVENTS[event])
    if expected in (".", "?"):
        assert after == before
        assert kinds(actions) == (["Refuse"] if expected == "?" else [])
    elif expected == "=":
        assert after != before
        assert name_of(after) == state
        assert "Refuse" not in kinds(actions)
    else:
        assert name_of(after) == expected


def test_public_states_are_those_of_the_specification() -> None:
    assert [state.value for state in r.RoundState] == [
        "open",
        "collecting",
        "aggregating",
        "aligning",
        "committing",
        "closed",
        "aborted",
    ]
    assert {r.public_state(play.state) for play in STATES.values()} == set(r.RoundState)


def test_waiting_names_the_reason_in_every_state() -> None:
    reasons = {name: r.waiting(play.state).reason for name, play in STATES.items()}
    assert reasons == {
        "closed": "at rest: no round is asked for",
        "open": "waiting for 3 of 3 asked to bind (have 0, quorum 2)",
        "sharing": "waiting for the mask shares of 3 of 3 bound (have 0, need 2)",
        "collecting": "waiting for 3 of 3 updates (have 0, quorum 2)",
        "unmasking": "waiting for the unmasking answers of 3 of 3 survivors (have 0, threshold 2)",
        "aggregating": "summing 3 updates twice and comparing",
        "aligning": "diagnosing the revealed sum",
        "committing": "taking the outer step and writing the checkpoint",
        "committing_masked": "taking the outer step and writing the checkpoint",
        "pausing": "trying again after a pause: the disk is full",
        "retrying": "retrying after a pause: OPEN: waiting for 3 of 3 asked to bind "
        "(have 0, quorum 2)",
        "stopped": "stopped: enough",
    }


def test_waiting_survives_a_verdict_that_goes_on() -> None:
    """``status`` may look at a state that no event led to, such as one read from a journal."""
    collecting = at_phase(r.Collecting).state
    assert isinstance(collecting, r.Collecting)
    assert r.waiting(replace(collecting, expected=())).reason == "moving on"
    full = r.Open(closed().ground, bound=(r.Binding(A, root(A), b""), r.Binding(B, root(B), b"")))
    assert r.waiting(full).reason == "moving on"
