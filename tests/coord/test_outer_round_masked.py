"""Playbooks of masked rounds: shares before the updates, unmasking answers after them."""

import itertools

import pytest

from lensemble.errors import Response
from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer
from lensemble_coord.training import outer_round as r
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
    committed,
    declined,
    diagnosed,
    expired,
    failed,
    kinds,
    lost,
    next_digest,
    only,
    root,
    shares,
    signature,
    summed,
    unmasks,
    update_digest,
)

ALL = (A, B, C, D)
E = NodeId("e" * 64)


def binding(node: NodeId) -> r.Binding:
    return r.Binding(node, root(node), signature(node))


def contribution(node: NodeId) -> r.Contribution:
    return r.Contribution(node, root(node), signature(node), update_digest(node), signature(node))


def masked(*here: NodeId, rounds: int = 1, **rules: object) -> Play:
    return Play(*here, masked=True, **rules).opens(rounds)


def sharing(*here: NodeId, **rules: object) -> Play:
    play = masked(*here, **rules)
    play.feed(*(committed(node) for node in here))
    assert isinstance(play.state, r.Sharing)
    return play


def unmasking(*here: NodeId, without: tuple[NodeId, ...] = (), **rules: object) -> Play:
    """Everyone shared; all but ``without`` have sent, and those were too late."""
    play = masked(*here, **rules).collects(*here)
    play.sends(*(node for node in here if node not in without))
    if without:
        play.stalls()
    assert isinstance(play.state, r.Unmasking)
    return play


def committing(**rules: object) -> Play:
    play = unmasking(A, B, C, **rules)
    play.unmasks(A, B, C)
    play.feed(summed(), diagnosed())
    return play


def survivors(actions: tuple[r.Action, ...]) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
    request = only(actions, r.RequestUnmask)
    return request.survivors, request.dropouts


def assert_retried(actions: tuple[r.Action, ...], code: str, play: Play) -> str:
    """The attempt came to nothing, and the next one opens with a new number."""
    abort = only(actions, r.AnnounceAbort)
    assert (abort.round, abort.attempt, abort.code, abort.retries) == (0, 0, code, True)
    assert abort.digest == PRIOR
    assert not {"DeriveSum", "RequestUnmask", "BeginCollect"} & set(kinds(actions))
    opened = only(play.feed(expired(r.Timer.RETRY)), r.OpenRound)
    assert (opened.round, opened.attempt, opened.digest) == (0, 1, PRIOR)
    return abort.reason


# ---- the happy path ----


def test_one_masked_round_from_ask_to_close() -> None:
    play = Play(A, B, C, masked=True)
    play.feed(r.RoundsAsked(1), committed(C), committed(A))
    assert play.feed(committed(B)) == (
        r.OfferState(B, r.Holding(0)),
        CancelTimer(r.Timer.OPEN),
        CancelTimer(r.Timer.GRACE),
        r.SendRoster((binding(A), binding(B), binding(C)), threshold=2),
        ArmTimer(r.Timer.SHARE, 30.0),
    )
    assert r.public_state(play.state) is r.RoundState.OPEN
    assert play.feed(shares(B)) == ()
    assert play.feed(shares(C)) == ()
    assert play.feed(shares(A)) == (
        CancelTimer(r.Timer.SHARE),
        r.BeginCollect((A, B, C)),
        ArmTimer(r.Timer.COLLECT, 150.0),
    )
    assert play.sends(C, A, B) == (
        CancelTimer(r.Timer.COLLECT),
        CancelTimer(r.Timer.COLLECT_END),
        r.RequestUnmask((A, B, C), ()),
        ArmTimer(r.Timer.UNMASK, 15.0),
    )
    assert r.public_state(play.state) is r.RoundState.AGGREGATING
    assert play.feed(unmasks(C)) == ()
    assert play.feed(unmasks(A)) == (), "the threshold is there, but one may still answer"
    contributors = tuple(contribution(node) for node in (A, B, C))
    assert play.feed(unmasks(B)) == (CancelTimer(r.Timer.UNMASK), r.DeriveSum(contributors))
    assert play.feed(summed()) == (r.Diagnose(SUM, contributors),)
    assert play.feed(diagnosed()) == (r.Commit(SUM, contributors),)
    assert play.feed(advanced()) == (
        r.AnnounceClose(0, 0, next_digest(0), (A, B, C)),
        r.FinishRun(completed=True),
    )


@pytest.mark.parametrize("order", list(itertools.permutations([A, B, C])))
def test_no_order_of_words_changes_whom_a_masked_round_counts(order: tuple[NodeId, ...]) -> None:
    play = masked(A, B, C).collects(*order)
    assert survivors(play.sends(*order)) == ((A, B, C), ())
    actions = play.unmasks(*order)
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == [A, B, C]


def test_masked_rounds_follow_one_another() -> None:
    play = masked(A, B, C, rounds=2)
    for t in range(2):
        play.collects(A, B, C, at=(t, 0)).sends(A, B, C, at=(t, 0))
        play.unmasks(A, B, C, at=(t, 0))
        play.commits((t, 0))
    assert play.finished == [r.FinishRun(completed=True)]


# ---- the threshold ----


@pytest.mark.parametrize(
    ("count", "configured", "threshold"),
    [(2, 0, 2), (3, 0, 2), (3, 3, 3), (4, 0, 3), (5, 0, 3), (5, 2, 3), (5, 4, 4), (8, 3, 5)],
)
def test_the_threshold_is_never_below_a_majority(
    count: int, configured: int, threshold: int
) -> None:
    nodes = tuple(NodeId(f"{i:064x}") for i in range(count))
    play = masked(*nodes, threshold=configured)
    roster = only(play.feed(*(committed(node) for node in nodes)), r.SendRoster)
    assert roster.threshold == threshold
    assert [b.node for b in roster.bound] == sorted(nodes)


def test_a_round_opens_with_no_fewer_than_the_threshold() -> None:
    play = masked(A, B, C, threshold=3)
    play.feed(committed(A), committed(B), lost(C))
    assert r.waiting(play.state).reason == "waiting for 1 more participant (have 2, quorum 3)"
    assert "SendRoster" not in kinds(play.feed(expired(r.Timer.OPEN)))
    assert isinstance(play.state, r.Aborted)


def test_without_masks_the_threshold_is_nothing() -> None:
    play = Play(A, B, threshold=3).opens()
    assert only(play.feed(committed(A), committed(B)), r.BeginCollect).nodes == (A, B)


# ---- sharing ----


def test_sharing_waits_for_those_who_have_not_shared() -> None:
    play = sharing(A, B, C)
    play.feed(shares(B))
    assert r.waiting(play.state) == r.Waiting(
        "waiting for the mask shares of 2 of 3 bound (have 1, need 2)", (A, C)
    )


@pytest.mark.parametrize("leaves", [lost, declined])
@pytest.mark.parametrize("shared", [False, True])
def test_whoever_leaves_while_sharing_is_not_collected_from(leaves: type, shared: bool) -> None:
    play = sharing(*ALL)
    if shared:
        play.feed(shares(D))
    assert play.feed(leaves(D)) == ()
    assert play.feed(leaves(D)) == (), "and is dropped once"
    actions = play.feed(shares(A), shares(B), shares(C))
    assert only(actions, r.BeginCollect).nodes == (A, B, C)
    assert isinstance(play.state, r.Collecting)
    assert [d.node for d in play.state.dropped] == [D]
    assert play.state.threshold == 3, "of those who were dealt shares, not of those who are left"
    assert only(play.feed(announced(D)), r.Refuse).code == "unbound"
    assert survivors(play.sends(A, B, C)) == ((A, B, C), ()), "it holds no mask to be taken off"


def test_the_last_one_to_leave_while_sharing_lets_the_others_go_on() -> None:
    play = sharing(*ALL)
    play.feed(shares(A), shares(B), shares(C))
    assert only(play.feed(lost(D)), r.BeginCollect).nodes == (A, B, C)


def test_one_who_comes_back_while_sharing_waits_for_the_next_attempt() -> None:
    play = sharing(*ALL)
    play.feed(lost(D))
    assert play.feed(r.MemberReady(D)) == ()
    assert only(play.feed(committed(D)), r.Refuse).code == "misplaced"
    assert only(play.feed(shares(D)), r.Refuse).code == "unbound"


@pytest.mark.parametrize("leaves", [lost, declined])
def test_below_the_threshold_sharing_aborts_at_once(leaves: type) -> None:
    play = sharing(*ALL)
    play.feed(shares(A), leaves(D))
    reason = assert_retried(play.feed(leaves(A)), "secure_aggregation", play)
    assert reason.startswith("only 2 of the 3 participants needed can exchange shares (")
    assert "dddddddddddd: " in reason
    assert "aaaaaaaaaaaa: " in reason


def test_below_the_quorum_sharing_aborts_at_once() -> None:
    play = sharing(*ALL, quorum=4)
    reason = assert_retried(play.feed(lost(D)), "secure_aggregation", play)
    assert reason.startswith("only 3 of the 4 participants needed can exchange shares")


def test_slow_shares_are_left_out() -> None:
    play = sharing(*ALL)
    play.feed(shares(A), shares(B), shares(D))
    actions = play.feed(expired(r.Timer.SHARE))
    assert only(actions, r.BeginCollect).nodes == (A, B, D)
    assert isinstance(play.state, r.Collecting)
    assert play.state.dropped == (r.Dropped(C, "timeout", "no mask shares within 30 s"),)
    refuse = only(play.feed(shares(C)), r.Refuse)
    assert (refuse.code, refuse.reason) == (
        "misplaced",
        "SharesSent came while the round is collecting",
    )


def test_too_many_slow_shares_abort() -> None:
    play = sharing(*ALL)
    play.feed(shares(A), shares(B))
    reason = assert_retried(play.feed(expired(r.Timer.SHARE)), "secure_aggregation", play)
    assert reason == (
        "only 2 of the 3 participants needed can exchange shares "
        "(cccccccccccc: no mask shares within 30 s; dddddddddddd: no mask shares within 30 s)"
    )


def test_shares_of_the_discarded_attempt_are_stale() -> None:
    play = sharing(A, B, C)
    play.feed(lost(A), lost(B), r.MemberReady(A), r.MemberReady(B), expired(r.Timer.RETRY))
    assert only(play.feed(shares(C)), r.Refuse).code == "stale"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (shares(STRANGER), "unbound"),
        (shares(A), "duplicate"),
        (shares(B, at=(0, 1)), "stale"),
        (shares(B, at=(1, 0)), "stale"),
        (committed(A), "misplaced"),
        (announced(A), "misplaced"),
        (arrived(A), "misplaced"),
        (unmasks(A), "misplaced"),
        (declined(STRANGER, code="dp_budget_exceeded"), "unknown"),
        (declined(B, at=(0, 1), code="dp_budget_exceeded"), "stale"),
    ],
)
def test_words_that_do_not_fit_sharing(event: r.FromPeer, code: str) -> None:
    play = sharing(A, B, C)
    play.feed(shares(A))
    before = play.state
    refuse = only(play.feed(event), r.Refuse)
    assert (refuse.node, refuse.code) == (event.node, code)
    assert play.state == before


# ---- collecting under masks ----


def test_whoever_is_lost_in_mid_upload_is_a_dropout() -> None:
    play = masked(*ALL).collects(*ALL)
    play.feed(announced(D))
    assert play.feed(lost(D)) == (r.DropUpdate(D),)
    assert survivors(play.sends(A, B, C)) == ((A, B, C), (D,))


def test_whoever_is_lost_after_the_upload_is_a_survivor_that_cannot_answer() -> None:
    play = masked(*ALL).collects(*ALL)
    play.sends(D)
    assert play.feed(lost(D)) == ()
    assert survivors(play.sends(A, B, C)) == (ALL, ())
    assert r.waiting(play.state).on == (A, B, C)
    actions = play.unmasks(A, B, C)
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == list(ALL)


def test_whoever_is_back_after_the_upload_is_asked_to_answer() -> None:
    play = masked(*ALL).collects(*ALL)
    play.sends(D)
    play.feed(lost(D), r.MemberReady(D))
    play.sends(A, B, C)
    assert r.waiting(play.state).on == ALL


def test_too_few_of_those_who_sent_are_left_to_answer() -> None:
    play = masked(*ALL).collects(*ALL)
    play.sends(A, B, C)
    play.feed(lost(A), lost(B))
    reason = assert_retried(play.sends(D), "secure_aggregation", play)
    assert reason == (
        "only 2 of the 3 unmasking answers needed can arrive; nothing was revealed; "
        "no answer of aaaaaaaaaaaa; bbbbbbbbbbbb; cccccccccccc; dddddddddddd"
    )


def test_updates_below_the_threshold_abort_at_once_though_they_are_a_quorum() -> None:
    play = masked(A, B, C, D, E).collects(A, B, C, D, E)
    play.sends(A, B)
    play.feed(lost(C), lost(D))
    assert r.waiting(play.state).reason == "waiting for 1 of 3 updates (have 2, quorum 3)"
    reason = assert_retried(play.feed(declined(E)), "fault_tolerance_exceeded", play)
    assert reason.startswith("only 2 of the 3 updates needed can arrive (")


def test_updates_below_the_threshold_at_the_timeout_abort() -> None:
    play = masked(A, B, C, D, E).collects(A, B, C, D, E)
    play.sends(A, B)
    assert_retried(play.stalls(), "fault_tolerance_exceeded", play)


def test_survivors_and_dropouts_are_exactly_those_who_were_told_to_collect() -> None:
    for count in (3, 4):
        sent = ALL[:count]
        play = sharing(*ALL, E)
        actions = play.feed(*(shares(node) for node in sent), expired(r.Timer.SHARE))
        told = only(actions, r.BeginCollect).nodes
        for late in itertools.combinations(told, max(0, len(told) - 3)):
            each = sharing(*ALL, E)
            each.feed(*(shares(node) for node in sent), expired(r.Timer.SHARE))
            rest = tuple(node for node in told if node not in late)
            asked = each.sends(*rest)
            asked = each.stalls() if late else asked
            assert survivors(asked) == (rest, late)


# ---- unmasking ----


def test_unmasking_waits_for_those_who_have_not_answered() -> None:
    play = unmasking(*ALL)
    play.unmasks(C)
    assert r.waiting(play.state) == r.Waiting(
        "waiting for the unmasking answers of 3 of 4 survivors (have 1, threshold 3)", (A, B, D)
    )


def test_a_slow_answer_is_not_waited_for_beyond_the_timeout() -> None:
    play = unmasking(*ALL)
    play.unmasks(A, B, D)
    actions = play.feed(expired(r.Timer.UNMASK))
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == list(ALL)
    refuse = only(play.feed(unmasks(C)), r.Refuse)
    assert (refuse.code, refuse.reason) == (
        "misplaced",
        "UnmaskAnswered came while the round is aggregating",
    )


def test_too_many_slow_answers_abort() -> None:
    play = unmasking(*ALL)
    play.unmasks(A, B)
    reason = assert_retried(play.feed(expired(r.Timer.UNMASK)), "secure_aggregation", play)
    assert reason == (
        "only 2 of the 3 unmasking answers needed can arrive; nothing was revealed; "
        "no answer of cccccccccccc; dddddddddddd"
    )
    assert only(play.feed(unmasks(C)), r.Refuse).code == "stale"


@pytest.mark.parametrize("leaves", [lost, declined])
def test_whoever_is_lost_while_unmasking_still_contributes(leaves: type) -> None:
    play = unmasking(*ALL)
    play.unmasks(A, B)
    assert play.feed(leaves(D)) == ()
    assert r.waiting(play.state).on == (C,)
    actions = play.unmasks(C)
    assert [c.node for c in only(actions, r.DeriveSum).contributors] == list(ALL)


@pytest.mark.parametrize("leaves", [lost, declined])
def test_the_last_one_to_leave_while_unmasking_lets_the_others_go_on(leaves: type) -> None:
    play = unmasking(*ALL)
    play.unmasks(A, B, C)
    assert "DeriveSum" in kinds(play.feed(leaves(D)))


def test_an_answer_outlives_whoever_gave_it() -> None:
    play = unmasking(A, B, C)
    play.unmasks(A)
    assert play.feed(lost(A)) == ()
    assert play.feed(lost(C)) == ()
    assert "DeriveSum" in kinds(play.unmasks(B))


def test_an_answer_of_one_given_up_counts_all_the_same() -> None:
    """It was on its way when its link broke."""
    play = unmasking(A, B, C, D)
    play.feed(lost(D))
    assert play.unmasks(D, A) == ()
    assert "DeriveSum" in kinds(play.unmasks(B, C))


@pytest.mark.parametrize("leaves", [lost, declined])
def test_below_the_threshold_unmasking_aborts_at_once(leaves: type) -> None:
    play = unmasking(*ALL)
    play.unmasks(A)
    assert play.feed(leaves(B)) == ()
    assert_retried(play.feed(leaves(C)), "secure_aggregation", play)


def test_a_dropout_answers_for_nobody() -> None:
    play = unmasking(*ALL, without=(D,))
    before = play.state
    assert play.feed(declined(D)) == ()
    assert play.feed(lost(STRANGER)) == ()
    assert only(play.feed(unmasks(D)), r.Refuse).code == "unbound"
    assert play.state == before


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (unmasks(STRANGER), "unbound"),
        (unmasks(A), "duplicate"),
        (unmasks(B, at=(0, 1)), "stale"),
        (unmasks(B, at=(1, 0)), "stale"),
        (committed(A), "misplaced"),
        (shares(A), "misplaced"),
        (announced(B), "misplaced"),
        (arrived(B), "misplaced"),
        (declined(STRANGER), "unknown"),
    ],
)
def test_words_that_do_not_fit_unmasking(event: r.FromPeer, code: str) -> None:
    play = unmasking(A, B, C)
    play.unmasks(A)
    before = play.state
    refuse = only(play.feed(event), r.Refuse)
    assert (refuse.node, refuse.code) == (event.node, code)
    assert play.state == before


def test_answers_of_the_discarded_attempt_are_stale() -> None:
    play = unmasking(A, B, C)
    play.feed(unmasks(A), expired(r.Timer.UNMASK), expired(r.Timer.RETRY))
    play.collects(A, B, C, at=(0, 1)).sends(A, B, C, at=(0, 1))
    assert only(play.feed(unmasks(B)), r.Refuse).code == "stale"


# ---- a spent budget ----


@pytest.mark.parametrize("phase", [r.Open, r.Sharing, r.Collecting])
def test_a_spent_budget_stops_the_federation_before_anything_is_revealed(phase: type) -> None:
    play = masked(A, B, C, rounds=5)
    if phase is r.Sharing:
        play.feed(committed(A), committed(B), committed(C), shares(A))
    if phase is r.Collecting:
        play.collects(A, B, C).sends(B)
    assert isinstance(play.state, phase)
    actions = play.feed(declined(A, code="dp_budget_exceeded", reason="epsilon 8.0 is spent"))
    abort = only(actions, r.AnnounceAbort)
    assert (abort.code, abort.retries) == ("dp_budget_exceeded", False)
    assert "aaaaaaaaaaaa: epsilon 8.0 is spent" in only(actions, r.FinishRun).reason


def test_a_budget_spent_by_the_update_itself_does_not_take_it_back() -> None:
    play = unmasking(A, B, C)
    assert play.feed(declined(C, code="dp_budget_exceeded")) == ()
    assert "DeriveSum" in kinds(play.unmasks(A, B))


# ---- once the sum is revealed ----


def test_a_commit_that_fails_is_tried_again_with_the_same_sum() -> None:
    play = committing(max_attempts=4)
    for pause in (1.0, 2.0, 3.0):
        assert play.feed(failed()) == (ArmTimer(r.Timer.RETRY, pause),)
        assert r.waiting(play.state).reason == ("trying again after a pause: the disk is full")
        assert r.public_state(play.state) is r.RoundState.COMMITTING
        again = only(play.feed(expired(r.Timer.RETRY)), r.Commit)
        assert again == r.Commit(SUM, tuple(contribution(node) for node in (A, B, C)))
    actions = play.feed(failed())
    abort = only(actions, r.AnnounceAbort)
    assert (abort.attempt, abort.code, abort.retries) == (0, "storage", False)
    assert only(actions, r.FinishRun).code == "storage"
    assert play.feed(expired(r.Timer.RETRY)) == (), "and never by itself another attempt"


def test_a_commit_that_succeeds_at_last_closes_the_round() -> None:
    play = committing(rounds=2)
    play.feed(failed(), expired(r.Timer.RETRY))
    actions = play.feed(advanced())
    assert kinds(actions) == ["AnnounceClose", "OpenRound", "ArmTimer"]
    assert only(actions, r.AnnounceClose).attempt == 0


def test_tries_of_a_commit_are_counted_for_each_round() -> None:
    play = committing(rounds=2, max_attempts=2)
    play.feed(failed(), expired(r.Timer.RETRY), advanced())
    play.collects(A, B, C, at=(1, 0)).sends(A, B, C, at=(1, 0))
    play.unmasks(A, B, C, at=(1, 0))
    play.feed(summed((1, 0)), diagnosed((1, 0)))
    assert play.feed(failed((1, 0))) == (ArmTimer(r.Timer.RETRY, 1.0),)


def test_a_failed_commit_that_asks_for_no_retry_stops() -> None:
    for response in set(Response) - {Response.RETRY}:
        play = committing()
        actions = play.feed(failed(response=response))
        assert not only(actions, r.AnnounceAbort).retries


@pytest.mark.parametrize("response", list(Response))
def test_failed_diagnostics_of_a_revealed_sum_never_open_another_attempt(
    response: Response,
) -> None:
    play = unmasking(A, B, C)
    play.unmasks(A, B, C)
    actions = play.feed(summed(), failed(response=response))
    assert not only(actions, r.AnnounceAbort).retries
    assert "FinishRun" in kinds(actions)


def test_a_sum_that_cannot_be_derived_is_collected_anew() -> None:
    """Answers were given, so the next attempt gets newly trained updates; nothing was revealed."""
    play = unmasking(A, B, C)
    play.unmasks(A, B, C)
    assert_retried(play.feed(failed(code="secure_aggregation")), "secure_aggregation", play)


def test_an_expiry_without_a_pause_commits_nothing_twice() -> None:
    play = committing()
    assert play.feed(expired(r.Timer.RETRY)) == ()
    play.feed(failed(), expired(r.Timer.RETRY))
    assert play.feed(expired(r.Timer.RETRY)) == ()


def test_a_failure_told_twice_is_one() -> None:
    play = committing(max_attempts=2)
    play.feed(failed())
    assert play.feed(failed()) == ()
    assert play.feed(failed(response=Response.STOP)) == ()
    assert "Commit" in kinds(play.feed(expired(r.Timer.RETRY)))


def test_an_expiry_of_a_commits_pause_opens_nothing_later() -> None:
    play = committing(max_attempts=2, rounds=2)
    play.feed(failed(), expired(r.Timer.RETRY), advanced())
    assert isinstance(play.state, r.Open)
    before = play.state
    assert play.feed(expired(r.Timer.RETRY)) == ()
    assert play.state == before


# ---- an operator's abort ----


@pytest.mark.parametrize("phase", [r.Open, r.Sharing, r.Collecting, r.Unmasking, r.Aggregating])
def test_an_operator_aborts_a_masked_round(phase: type) -> None:
    play = masked(A, B, C, rounds=3)
    if phase is not r.Open:
        play.feed(committed(A), committed(B), committed(C), shares(A))
    if phase in (r.Collecting, r.Unmasking, r.Aggregating):
        play.feed(shares(B), shares(C))
    if phase in (r.Unmasking, r.Aggregating):
        play.sends(A, B, C)
        play.unmasks(A, B)
    if phase is r.Aggregating:
        play.unmasks(C)
    assert isinstance(play.state, phase)
    actions = play.feed(r.AbortAsked("enough"))
    assert only(actions, r.AnnounceAbort).code == "stopped"
    assert only(actions, r.FinishRun) == r.FinishRun(
        completed=False, code="stopped", reason="enough"
    )
    for late in (shares(B), unmasks(C)):
        assert only(play.feed(late), r.Refuse).code == "misplaced"
    assert only(play.feed(r.RoundsAsked(1)), r.OpenRound).attempt == 1


def test_an_operator_aborts_behind_the_one_more_try_of_a_commit() -> None:
    play = committing(rounds=3, max_attempts=9)
    play.feed(failed())
    assert play.feed(r.AbortAsked("enough")) == ()
    assert "Commit" in kinds(play.feed(expired(r.Timer.RETRY)))
    assert kinds(play.feed(advanced())) == ["AnnounceClose", "FinishRun"]


def test_after_an_operators_abort_a_commit_is_tried_once_more_at_most() -> None:
    play = committing(rounds=3, max_attempts=9)
    play.feed(failed(), r.AbortAsked("enough"), expired(r.Timer.RETRY))
    actions = play.feed(failed())
    assert not only(actions, r.AnnounceAbort).retries
    assert only(actions, r.FinishRun).code == "storage"
