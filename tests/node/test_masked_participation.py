"""A masked round as the machines of a node play it, with an honest coordinator and with others."""

import pytest

from lensemble.machine import TimerExpired
from lensemble.wire import messages
from lensemble_node import attempt, participation, signals
from lensemble_node.participation import (
    Announce,
    Commit,
    DropEdges,
    EdgesGone,
    EdgesLive,
    LinkDown,
    LinkUp,
    Me,
    OnSecrets,
    Resting,
    Say,
    WorkerLost,
    WorkerStarted,
)
from tests.node.node_play import (
    CONFIGURED,
    DEALT,
    MASKED,
    NODE,
    OTHER,
    PRIOR,
    SPENT,
    Play,
    abort,
    bound,
    close,
    collect,
    counted,
    ordered,
    pair,
    provision_message,
    roster,
    round_open,
    said,
    trained,
    unmask,
    welcome,
)

SPEND = signals.Spend(round=0, attempt=0)


def wanted(play: Play) -> list[attempt.OnSecrets]:
    return [action.action for action in play.actions if isinstance(action, OnSecrets)]


def secret(play: Play) -> bool:
    return attempt.holds_secrets(play.joined.attempt)


def fault(play: Play) -> messages.Fault:
    (found,) = [
        action.message
        for action in play.actions
        if isinstance(action, Say) and isinstance(action.message, messages.Fault)
    ]
    return found


def refused(play: Play) -> str:
    """Why the last thing was refused for good, with nothing revealed; the secrets are gone."""
    assert isinstance(play.joined.attempt, attempt.Withdrawn)
    assert not secret(play)
    assert "Answer" not in said(play.actions)
    assert fault(play).code == "secure_aggregation"
    return fault(play).reason


# ---- as it should be ----


def test_a_masked_round_from_open_to_close() -> None:
    play = Play().ready(masked=True)
    play.hear(round_open())
    actions = play.say(bound())
    assert isinstance(actions[0], Commit)
    assert actions[0].commit.masked
    assert secret(play)
    play.say(signals.StateHeld(digest=PRIOR))
    play.hear(roster())
    assert wanted(play) == [attempt.Deal(round_open(), roster())]
    assert said(play.beside(DEALT)) == ["Shares"]
    play.hear(collect())
    assert wanted(play) == [attempt.OpenShares(round_open(), ())]
    (train,) = ordered(play.beside(attempt.SharesOpened(0, 0)))
    assert isinstance(train, signals.Train)
    assert said(play.say(trained())) == ["MaskUpdate", "Progress"]
    announce = play.say(MASKED)[0]
    assert isinstance(announce, Announce)
    # What is signed and said is the digest of what is sent, not that of the release.
    assert announce.announce.digest == MASKED.digest != trained().digest
    play.say(signals.Sent(round=0, attempt=0))
    play.hear(unmask())
    assert wanted(play) == [attempt.Decide(round_open(), (NODE, OTHER))]
    assert ordered(play.beside(attempt.Consented(0, 0))) == [SPEND]
    assert said(play.say(SPENT)) == ["Answer"]
    play.hear(close())
    assert isinstance(play.joined.attempt, attempt.Idle)
    assert not secret(play)


def test_shares_are_dealt_while_the_state_still_comes_in() -> None:
    play = Play().ready(masked=True).fetching()
    play.hear(roster())
    play.beside(DEALT)
    play.hear(collect())
    assert ordered(play.beside(attempt.SharesOpened(0, 0))) == []
    (train,) = ordered(play.say(signals.StateHeld(digest=PRIOR)))
    assert isinstance(train, signals.Train)


def test_the_state_may_come_while_shares_are_opened() -> None:
    play = Play().ready(masked=True).fetching()
    play.hear(roster())
    play.beside(DEALT)
    play.hear(collect())
    play.say(signals.StateHeld(digest=PRIOR))
    (train,) = ordered(play.beside(attempt.SharesOpened(0, 0)))
    assert isinstance(train, signals.Train)


def test_a_request_may_overtake_the_word_that_all_is_sent() -> None:
    play = Play().masked_sending()
    assert play.hear(unmask()) == ()
    play.say(signals.Sent(round=0, attempt=0))
    assert wanted(play) == [attempt.Decide(round_open(), (NODE, OTHER))]


def test_the_release_is_spent_before_anything_is_revealed() -> None:
    play = Play().asked()
    assert "Answer" not in said(play.beside(attempt.Consented(0, 0)))
    failed = signals.Failed(code="storage", message="disk full", round=0, attempt=0)
    assert said(play.say(failed)) == ["Fault"]
    assert not secret(play)
    assert play.say(SPENT) == ()


def test_an_answer_waits_for_a_worker_that_starts_again() -> None:
    play = Play().masked_sent()
    play.feed(WorkerLost("worker_fault", "killed"), WorkerStarted())
    play.hear(unmask())
    assert play.beside(attempt.Consented(0, 0)) == ()
    assert ordered(play.say(CONFIGURED)) == [SPEND]
    assert said(play.say(SPENT)) == ["Answer"]


def test_without_a_worker_there_is_no_answer() -> None:
    play = Play().masked_sent()
    play.feed(WorkerLost("worker_fault", "killed"))
    play.hear(unmask())
    assert said(play.beside(attempt.Consented(0, 0))) == ["Fault"]
    assert not secret(play)
    play = Play().spending()
    assert said(play.feed(WorkerLost("worker_fault", "killed"))) == ["Fault"]


def test_lost_edges_do_not_keep_a_sent_update_from_being_unmasked() -> None:
    play = Play().masked_sent()
    play.feed(EdgesGone(pair(), "torn", pair().update.edge))
    play.hear(unmask())
    assert said(play.actions) == ["Decide"]


def test_masks_given_to_the_worker_are_taken_back_with_the_attempt() -> None:
    for end in (
        lambda play: play.hear(abort(retries=True)),
        lambda play: play.feed(LinkDown(play.call, "lost")),
        lambda play: play.feed(EdgesGone(pair(), "torn", pair().update.edge)),
    ):
        play = Play().masking()
        end(play)
        assert ordered(play.actions) == [signals.Abandon(round=0, attempt=0)]


def test_a_retry_draws_fresh_keys() -> None:
    play = Play().masked_training()
    play.hear(abort(retries=True))
    assert not secret(play)
    play.hear(round_open(0, 1))
    assert isinstance(play.say(bound(0, 1))[0], Commit)
    # Late news of the first attempt's secrets says nothing about the second.
    assert play.beside(DEALT) == ()
    assert play.hear(roster(0, 1)) != ()


def test_a_lost_link_loses_the_attempt_and_the_next_one_works() -> None:
    play = Play().masked_sent()
    play.feed(LinkDown(play.call, "lost"))
    play.feed(TimerExpired("redial"))
    play.feed(LinkUp(play.call))
    play.hear(welcome(epoch=7, aggregation="masked"), provision_message(pair(200)))
    play.feed(EdgesLive(pair(200)))
    assert counted(play.hear(unmask())) == []
    assert isinstance(play.joined.attempt, attempt.Idle)
    play.hear(round_open(0, 1))
    assert "Commitment" in said(play.say(bound(0, 1)))


# ---- other coordinators ----


def test_a_second_roster_is_refused() -> None:
    for state in (Play().dealing(), Play().shared(), Play().opening(), Play().masked_training()):
        state.hear(roster())
        assert "second roster" in refused(state)
        assert counted(state.hear(roster())) == ["roster_out_of_place"]


def test_a_roster_that_the_secrets_refuse_ends_the_attempt() -> None:
    play = Play().dealing()
    play.beside(attempt.MasksRefused(0, 0, "the keys of somebody are not signed", "Ask them."))
    assert "not signed" in refused(play)
    assert fault(play).remediation == "Ask them."


def test_shares_that_do_not_open_end_the_attempt() -> None:
    play = Play().opening()
    play.beside(attempt.MasksRefused(0, 0, f"the shares dealt by {OTHER} do not open"))
    assert OTHER in refused(play)


def test_training_before_shares_are_exchanged_is_refused() -> None:
    for play in (Play().drawn(), Play().dealing()):
        play.hear(collect())
        assert "before it has dealt" in refused(play)


def test_unmasking_before_the_update_is_sent_is_refused() -> None:
    for play in (
        Play().drawn(),
        Play().shared(),
        Play().opening(),
        Play().masked_training(),
        Play().masking(),
    ):
        play.hear(unmask())
        assert "cannot be in yet" in refused(play)


def test_two_requests_before_all_is_sent_are_refused() -> None:
    play = Play().masked_sending()
    play.hear(unmask())
    play.hear(unmask(survivors=(NODE,)))
    assert refused(play)
    assert any(isinstance(action, DropEdges) for action in play.actions)


def test_a_set_that_the_secrets_refuse_is_not_answered_for() -> None:
    play = Play().asked()
    play.beside(attempt.MasksRefused(0, 0, "survivors to unmask for: 1 present, 2 needed"))
    assert "1 present" in refused(play)
    # Not even if it is asked for properly now.
    assert counted(play.hear(unmask())) == ["unmask_out_of_place"]


def test_two_sets_of_survivors_are_never_both_answered_for() -> None:
    for play in (Play().asked(), Play().spending()):
        play.hear(unmask(survivors=(NODE,)))
        assert refused(play)
        assert play.say(SPENT) == ()
    play = Play().answered()
    for survivors in ((NODE, OTHER), (NODE,)):
        assert counted(play.hear(unmask(survivors=survivors))) == ["unmask_out_of_place"]
        assert len(play.actions) == 1


def test_an_attempt_once_unmasked_is_not_taken_again() -> None:
    play = Play().answered()
    play.hear(abort(retries=True))
    # Not on the same edges, not on new ones, not in another session.
    for first in (200, 300):
        play.hear(provision_message(pair(first)))
        play.feed(EdgesLive(pair(first)))
        play.hear(round_open())
        assert "has helped to unmask" in refused(play)
    play.feed(LinkDown(play.call, "lost"), TimerExpired("redial"))
    play.feed(LinkUp(play.call))
    play.hear(welcome(aggregation="masked"), provision_message(pair(400)))
    play.feed(EdgesLive(pair(400)))
    play.hear(round_open())
    assert "has helped to unmask" in refused(play)
    play.hear(round_open(0, 1))
    assert isinstance(play.joined.attempt, attempt.Binding)


def test_words_about_masks_mean_nothing_in_a_plain_attempt() -> None:
    for play in (Play().fetching(), Play().training(), Play().sending(), Play().sent()):
        assert counted(play.hear(roster())) == ["roster_out_of_place"]
        assert counted(play.hear(unmask())) == ["unmask_out_of_place"]
        assert len(play.actions) == 1


@pytest.mark.parametrize(
    "message", [roster(0, 1), roster(1, 0), unmask(0, 1), unmask(1, 0), unmask(epoch=6)]
)
def test_words_of_another_attempt_change_nothing(message: messages.FromCoordinator) -> None:
    for play in (Play().drawn(), Play().masked_sent()):
        before = play.state
        assert len(counted(play.hear(message))) == len(play.actions) == 1
        assert play.state == before


def test_plain_aggregation_is_refused_for_good_with_the_way_out() -> None:
    play = Play(Me(node=NODE, name="node", build="lensemble 0", boot="0" * 16)).joining()
    play.hear(welcome())
    resting = play.state.membership
    assert isinstance(resting, Resting)
    assert resting.refused
    assert resting.delay_s == participation.REFUSED_DELAY_S
    assert "share.plain = true" in resting.cause
    assert Play(play.state.me).ready(masked=True).joined.session.terms.masked
