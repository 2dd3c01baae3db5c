import re

import msgspec
import pytest

from lensemble.errors import InvalidTransition
from lensemble.ids import Digest, FederationId
from lensemble.machine import ArmTimer, CancelTimer, TimerExpired
from lensemble.wire import messages
from lensemble.wire.steps import TakenStep
from lensemble_node import attempt, participation, signals
from lensemble_node.participation import (
    Announce,
    Assigned,
    Count,
    Dial,
    DropEdges,
    EdgesGone,
    EdgesLive,
    ForgetEdges,
    HangUp,
    Heard,
    Joined,
    LinkDown,
    LinkUp,
    Misheard,
    Provide,
    Quit,
    Redial,
    Remember,
    Resting,
    RunWorker,
    Say,
    SayJoin,
    WorkerLost,
    WorkerStarted,
)
from tests.node.node_play import (
    CONFIGURED,
    DEALT,
    FEDERATION,
    LAYOUT,
    MASKED,
    ME,
    NEXT,
    NODE,
    OTHER,
    PRIOR,
    ROOT,
    SPENT,
    TARGET,
    WORKLOAD,
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


def _resting() -> Play:
    play = Play().dialing()
    play.feed(LinkDown(play.call, "no answer"))
    return play


def _unable() -> Play:
    play = Play().ready()
    play.feed(WorkerLost("worker_fault", "killed"))
    return play


def _left() -> Play:
    play = Play().ready()
    play.feed(Quit("bye"))
    return play


MASKED_STATES = (
    "masked_fetching", "masked_waiting", "dealing", "shared", "opening", "masked_training",
    "masking", "masked_sending", "masked_sent", "asked", "spending", "answered",
)  # fmt: skip
STATES = {
    "unassigned": Play,
    "dialing": lambda: Play().dialing(),
    "resting": _resting,
    "joining": lambda: Play().joining(),
    "welcomed": lambda: Play().welcomed(),
    "ready": lambda: Play().ready(),
    "fetching": lambda: Play().fetching(),
    "training": lambda: Play().training(),
    "sending": lambda: Play().sending(),
    "sent": lambda: Play().sent(),
    "unable": _unable,
    "left": _left,
    "masked_fetching": lambda: Play().ready(masked=True).fetching(),
    "masked_waiting": lambda: Play().drawn(),
    "dealing": lambda: Play().dealing(),
    "shared": lambda: Play().shared(),
    "opening": lambda: Play().opening(),
    "masked_training": lambda: Play().masked_training(),
    "masking": lambda: Play().masking(),
    "masked_sending": lambda: Play().masked_sending(),
    "masked_sent": lambda: Play().masked_sent(),
    "asked": lambda: Play().asked(),
    "spending": lambda: Play().spending(),
    "answered": lambda: Play().answered(),
}


def _events(play: Play) -> list[participation.Event]:
    call = play.call
    heard: list[messages.FromCoordinator] = [
        welcome(),
        messages.Refused(code="unknown", reason="not on the list", final=True),
        messages.Refused(code="busy", reason="come back"),
        messages.Leave(federation=FEDERATION, epoch=7, reason="maintenance"),
        provision_message(pair(200)),
        messages.Teardown(federation=FEDERATION, epoch=7, edges=(100, 101)),
        round_open(),
        round_open(4, 2),
        collect(),
        roster(),
        roster(0, 1),
        unmask(),
        unmask(survivors=()),
        unmask(1, 0),
        close(),
        abort(retries=True),
    ]
    beside: list[attempt.FromSecrets] = [
        DEALT,
        attempt.SharesOpened(0, 0),
        attempt.Consented(0, 0),
        attempt.Consented(0, 1),
        attempt.MasksRefused(0, 0, "because"),
    ]
    worker: list[signals.Event] = [
        CONFIGURED,
        signals.Attached(edge=100),
        signals.Detached(edge=100),
        signals.Consumed(edge=100, slot=0),
        signals.Filled(edge=101, slot=0, extent=1),
        bound(),
        signals.StateHeld(digest=PRIOR),
        signals.Worked(round=0, attempt=0, phase="training", done=1, total=2),
        trained(),
        MASKED,
        signals.Sent(round=0, attempt=0),
        SPENT,
        signals.Closed(round=0, adopted=True),
        signals.Failed(code="x", message="y"),
        signals.Failed(code="x", message="y", round=0, attempt=0),
    ]
    return [
        Assigned(TARGET),
        LinkUp(call),
        LinkUp(call + 9),
        LinkDown(call, "gone"),
        LinkDown(call - 1, "gone"),
        Misheard(call, "frame", "noise"),
        WorkerStarted(),
        WorkerLost("worker_fault", "killed"),
        EdgesLive(pair()),
        EdgesGone(pair(), "torn", pair().state.edge),
        participation.EdgesTornDown((100, 101)),
        *(TimerExpired(name) for name in ("redial", "join", "settled", "bind")),
        participation.Dismissed("moved"),
        Quit("bye"),
        *(Heard(call, message) for message in heard),
        *(participation.WorkerSaid(signal) for signal in worker),
        *(participation.SecretsSaid(signal) for signal in beside),
    ]


REFUSED = {
    # A link that is up cannot come up, a dial that is going on has heard nothing yet.
    ("joining", LinkUp),
    ("dialing", Heard),
    ("dialing", Misheard),
    *((name, LinkUp) for name in ("welcomed", "ready", "fetching", "training", "sending", "sent")),
    ("unable", LinkUp),
    *((name, LinkUp) for name in MASKED_STATES),
}


@pytest.mark.parametrize("name", STATES)
def test_every_pair_is_answered_or_refused(name: str) -> None:
    for event in _events(STATES[name]()):
        play = STATES[name]()
        stale = getattr(event, "call", play.call) != play.call
        if (name, type(event)) in REFUSED and not stale:
            with pytest.raises(InvalidTransition):
                play.feed(event)
        else:
            play.feed(event)


@pytest.mark.parametrize("name", STATES)
def test_states_and_actions_are_journal_lines(name: str) -> None:
    play = STATES[name]()
    line = msgspec.json.encode(play.state)
    assert msgspec.json.decode(line, type=participation.State) == play.state
    for event in _events(play):
        raw = msgspec.json.encode(event)
        assert msgspec.json.decode(raw, type=participation.Event) == event


# ---- dialling and joining ----


def test_a_node_dials_joins_and_runs_its_worker() -> None:
    play = Play()
    assert play.feed(Assigned(TARGET)) == (Dial(TARGET, 1),)
    assert play.feed(LinkUp(1)) == (
        SayJoin(TARGET, 1),
        ArmTimer("join", participation.JOIN_TIMEOUT_S),
    )
    actions = play.hear(welcome())
    known = participation.Target(TARGET.node, TARGET.addresses, FEDERATION)
    run = next(action for action in actions if isinstance(action, RunWorker))
    assert (run.terms.config_hash, run.terms.federation) == (WORKLOAD.digest, FEDERATION)
    assert CancelTimer("join") in actions
    assert Remember(known) in actions


def test_backoff_doubles_to_its_limit_and_names_the_cause() -> None:
    play = Play().dialing()
    delays: list[float] = []
    for _ in range(8):
        *_, redial = play.feed(LinkDown(play.call, "no answer from 192.0.2.7:7707"))
        assert isinstance(redial, Redial)
        assert redial.cause == "no answer from 192.0.2.7:7707"
        assert not redial.refused
        delays.append(redial.delay_s)
        play.feed(TimerExpired("redial"))
    assert delays == [0.5, 1, 2, 4, 8, 15, 15, 15]


def test_a_session_that_ends_at_once_does_not_start_the_backoff_anew() -> None:
    play = Play()
    play.feed(Assigned(TARGET))
    delays = []
    for _ in range(3):
        play.feed(LinkUp(play.call))
        play.hear(welcome())
        *_, redial = play.feed(LinkDown(play.call, "two live holders"))
        assert isinstance(redial, Redial)
        delays.append(redial.delay_s)
        play.feed(TimerExpired("redial"))
    assert delays == [0.5, 1, 2]
    play.feed(LinkUp(play.call))
    play.hear(welcome())
    play.feed(TimerExpired("settled"))
    *_, redial = play.feed(LinkDown(play.call, "reset"))
    assert isinstance(redial, Redial)
    assert redial.delay_s == 0.5


def test_an_unanswered_join_is_given_up() -> None:
    play = Play().joining()
    actions = play.feed(TimerExpired("join"))
    assert isinstance(actions[0], HangUp)
    assert isinstance(actions[-1], Redial)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config_hash": "0" * 64}, "announces the config hash"),
        ({"layout_digest": "0" * 64}, "lays the workload out"),
        ({"workload": b'{"task":{"kind":"other"}}'}, "does not fit this build"),
        ({"workload": b"\xff"}, "does not fit this build"),
    ],
)
def test_terms_that_do_not_hold_are_refused_for_good(
    changes: dict[str, object], words: str
) -> None:
    play = Play().joining()
    actions = play.hear(welcome(**changes))
    resting = play.state.membership
    assert isinstance(resting, Resting)
    assert resting.refused
    assert words in resting.cause
    assert isinstance(actions[0], HangUp)
    assert isinstance(actions[-1], Redial)
    assert actions[-1].delay_s == participation.REFUSED_DELAY_S


def test_a_pinned_workload_refuses_any_other() -> None:
    play = Play(msgspec.structs.replace(ME, pinned="e" * 64)).joining()
    play.hear(welcome())
    assert isinstance(play.state.membership, Resting)
    assert "expected_config_hash" in play.state.membership.cause
    pinned = Play(msgspec.structs.replace(ME, pinned=WORKLOAD.digest)).joining()
    pinned.hear(welcome())
    assert isinstance(pinned.state.membership, Joined)


def test_another_federation_behind_the_same_key_is_refused() -> None:
    known = msgspec.structs.replace(TARGET, federation=FederationId("0" * 32))
    play = Play()
    play.feed(Assigned(known))
    play.feed(LinkUp(play.call))
    play.hear(welcome())
    assert isinstance(play.state.membership, Resting)
    assert play.state.membership.refused
    assert "new ticket" in play.state.membership.cause


def test_a_final_refusal_waits_long_a_passing_one_does_not() -> None:
    play = Play().joining()
    refusal = messages.Refused(
        code="admission_refused", reason="not on the list.", remediation="Ask.", final=True
    )
    *_, redial = play.hear(refusal)
    assert isinstance(redial, Redial)
    assert (redial.refused, redial.delay_s) == (True, 60.0)
    assert redial.cause == "refused (admission_refused): not on the list. Ask."
    play = Play().joining()
    *_, redial = play.hear(messages.Refused(code="busy", reason="later"))
    assert isinstance(redial, Redial)
    assert (redial.refused, redial.delay_s) == (False, 0.5)


def test_a_wire_version_nobody_speaks_is_a_refusal_for_good() -> None:
    play = Play().joining()
    *_, redial = play.feed(Misheard(play.call, "contract_violation", "wire version 3"))
    assert isinstance(redial, Redial)
    assert redial.refused


def test_a_new_assignment_leaves_the_old_coordinator_first() -> None:
    play = Play().ready()
    other = participation.Target(OTHER, ("192.0.2.9:1",))
    actions = play.feed(Assigned(other))
    assert said(actions) == ["Leave"]
    assert actions[-1] == Dial(other, 2)
    assert play.feed(LinkDown(1, "hung up")) == ()


def test_quitting_says_leave_and_nothing_follows() -> None:
    play = Play().training()
    actions = play.feed(Quit("shutting down"))
    assert said(actions) == ["Leave"]
    assert ordered(actions) == [signals.Abandon(round=0, attempt=0)]
    assert actions[-1] == participation.Finish()
    assert play.feed(Heard(1, round_open())) == ()


# ---- the worker ----


def test_edges_wait_for_the_worker() -> None:
    play = Play().welcomed()
    assert play.hear(provision_message(pair())) == ()
    assert play.say(CONFIGURED) == (CancelTimer("start"), Provide(pair()))
    actions = play.feed(EdgesLive(pair()))
    assert said(actions) == ["Provisioned"]


def test_edges_that_do_not_join_the_two_are_reported() -> None:
    play = Play().ready()
    wrong = pair(300)
    crossed = messages.Provision(
        federation=FEDERATION, epoch=7, state=wrong.update, update=wrong.state
    )
    actions = play.hear(crossed)
    assert counted(actions) == ["foreign_edge"]
    assert said(actions) == ["EdgeLost"]


def test_the_newest_death_of_a_worker_is_the_one_told_but_not_over_its_own_words() -> None:
    play = Play().ready()
    play.feed(WorkerLost("worker_fault", "killed"))
    play.feed(WorkerLost("worker_fault", "it could not be started"))
    assert play.state.worker.reason == "it could not be started"
    play.feed(WorkerStarted())
    play.feed(WorkerLost("dataset", "no such file"))
    play.feed(WorkerLost("worker_fault", "exited with status 1"))
    assert play.state.worker.reason == "no such file"


def test_a_worker_that_dies_faults_the_round_and_is_used_again() -> None:
    play = Play().training()
    actions = play.feed(WorkerLost("worker_fault", "killed by SIGKILL"))
    assert said(actions) == ["Fault"]
    assert isinstance(play.joined.attempt, attempt.Withdrawn)
    play.feed(EdgesGone(pair(), "the worker died", pair().update.edge))
    play.hear(provision_message(pair(200)))
    assert play.feed(WorkerStarted()) == (ArmTimer("start", ME.start_timeout_s),)
    assert play.say(CONFIGURED) == (CancelTimer("start"), Provide(pair(200)))


def test_a_worker_that_stands_still_before_its_dataset_is_open_is_ended() -> None:
    play = Play().welcomed()
    assert isinstance(play.state.worker, participation.Starting)
    (ended,) = play.feed(TimerExpired("start"))
    assert isinstance(ended, participation.EndWorker)
    assert ended.reason == "it did not open its dataset within 3600 s"
    assert CancelTimer("start") in play.feed(WorkerLost("worker_fault", ended.reason))
    assert play.feed(WorkerStarted()) == (ArmTimer("start", ME.start_timeout_s),)
    play.say(CONFIGURED)
    assert play.feed(TimerExpired("start")) == ()


def test_a_round_asked_of_a_node_without_a_worker_is_declined_with_the_kind_of_reason() -> None:
    play = Play().ready()
    play.feed(WorkerLost("dataset", "no such file: data.hdf5", "Correct data.path."))
    (declined,) = play.hear(round_open())
    assert isinstance(declined, Say)
    assert isinstance(declined.message, messages.Fault)
    assert declined.message.reason == "the node's data set cannot be used"
    assert "status" in declined.message.remediation


def test_a_close_is_owed_until_the_worker_has_done_it() -> None:
    play = Play().sent()
    assert ordered(play.hear(close())) == [signals.Close(round=0, digest=NEXT, adopt=True)]
    play.feed(WorkerLost("worker_fault", "killed"))
    play.feed(WorkerStarted())
    owed = [signals.Close(round=0, digest=NEXT, adopt=True)]
    assert ordered(play.say(CONFIGURED)) == owed
    play.say(signals.Closed(round=0, adopted=True))
    play.feed(WorkerLost("worker_fault", "killed"))
    play.feed(WorkerStarted())
    assert ordered(play.say(CONFIGURED)) == []


def test_a_worker_of_another_layout_is_not_used() -> None:
    play = Play().welcomed()
    play.say(msgspec.structs.replace(CONFIGURED, layout_digest="0" * 64))
    assert isinstance(play.state.worker, participation.Unable)


# ---- a round ----


def test_a_round_from_open_to_close() -> None:
    play = Play().ready()
    assert ordered(play.hear(round_open())) == [
        signals.Bind(round=0, attempt=0, prior_digest=PRIOR)
    ]
    actions = play.say(bound(held=40))
    assert said(actions) == ["Commitment", "Progress"]
    assert isinstance(actions[0], participation.Commit)
    assert (actions[0].commit.root, actions[0].commit.held.holds_bytes) == (ROOT, 40)
    assert said(play.say(signals.StateHeld(digest=PRIOR))) == ["Progress"]
    (train,) = ordered(play.hear(collect()))
    assert isinstance(train, signals.Train)
    assert train.sketch_seed == round_open().sketch_seed
    actions = play.say(trained())
    assert said(actions) == ["Update", "Progress"]
    assert isinstance(actions[0], Announce)
    assert actions[0].announce.edge == pair().update.edge
    assert said(play.say(signals.Sent(round=0, attempt=0))) == ["Progress"]
    assert ordered(play.hear(close())) == [signals.Close(round=0, digest=NEXT, adopt=True)]
    assert play.joined.session.last.round == 0
    assert isinstance(play.joined.attempt, attempt.Idle)


def test_collect_may_come_before_the_state_is_held() -> None:
    play = Play().fetching()
    assert play.hear(collect()) == ()
    (train,) = ordered(play.say(signals.StateHeld(digest=PRIOR)))
    assert isinstance(train, signals.Train)


def test_a_roster_without_this_node_ends_its_part() -> None:
    play = Play().fetching()
    assert play.hear(collect(roster=(OTHER,))) == ()
    assert isinstance(play.joined.attempt, attempt.Withdrawn)


@pytest.mark.parametrize(
    "changes",
    [
        {"sketch_seed": 1},
        {"config_hash": "0" * 64},
        {"layout_digest": "0" * 64},
        {"inner_steps": 1},
        {"state_bytes": 4},
        {"state_bytes": 2 * LAYOUT.nbytes},
        {"prior_momentum": "5" * 64},
        {"field": messages.FieldParams(k=8, n_max=1)},
    ],
)
def test_a_round_on_other_terms_is_declined(changes: dict[str, object]) -> None:
    play = Play().ready()
    actions = play.hear(round_open(**changes))
    assert said(actions) == ["Fault"]
    assert ordered(actions) == []


def test_the_steps_to_the_state_are_passed_on_and_what_is_held_of_them_is_said() -> None:
    step = TakenStep(
        start=Digest("4" * 64),
        start_momentum=None,
        end=PRIOR,
        end_momentum=Digest("5" * 64),
        total=Digest("6" * 64),
        contributors=2,
    )
    more = {"prior_momentum": step.end_momentum, "steps": (step,)}
    play = Play().ready()
    actions = play.hear(round_open(state_bytes=2 * LAYOUT.nbytes, **more))
    assert ordered(actions) == [
        signals.Bind(round=0, attempt=0, prior_digest=PRIOR, **more)  # type: ignore[arg-type]
    ]
    held = signals.Bound(round=0, attempt=0, holds_bytes=0, follows=1, holds_of_sum=8)
    (commit, *_) = play.say(held)
    assert isinstance(commit, participation.Commit)
    assert commit.commit.held == held


def test_a_closed_round_without_us_stops_the_sending() -> None:
    play = Play().sending()
    actions = play.hear(close(contributors=(OTHER,)))
    assert ordered(actions) == [
        signals.Abandon(round=0, attempt=0),
        signals.Close(round=0, digest=NEXT, adopt=False),
    ]
    assert [type(action) for action in actions].count(DropEdges) == 1


def test_a_close_that_counts_us_may_overtake_the_word_that_all_is_sent() -> None:
    play = Play().sending()
    assert ordered(play.hear(close())) == [signals.Close(round=0, digest=NEXT, adopt=True)]
    assert not any(isinstance(action, DropEdges) for action in play.actions)
    assert play.say(signals.Sent(round=0, attempt=0)) == ()


def test_a_retry_keeps_the_training_that_it_will_ask_for_again() -> None:
    play = Play().training()
    assert play.hear(abort(retries=True)) == ()
    actions = play.hear(round_open(0, 1))
    assert ordered(actions) == [signals.Bind(round=0, attempt=1, prior_digest=PRIOR)]
    # The release of the first attempt is not announced for the second.
    assert play.say(trained(0, 0)) == ()


def test_an_aborted_run_gives_the_training_up() -> None:
    play = Play().training()
    assert ordered(play.hear(abort(retries=False))) == [signals.Abandon(round=0, attempt=0)]


def test_a_newer_attempt_replaces_an_older_one() -> None:
    play = Play().training()
    other = round_open(1, 0, prior_digest=NEXT)
    assert ordered(play.hear(other)) == [
        signals.Abandon(round=0, attempt=0),
        signals.Bind(round=1, attempt=0, prior_digest=NEXT),
    ]


def test_the_same_attempt_is_taken_again_on_new_edges_only() -> None:
    play = Play().fetching()
    assert counted(play.hear(round_open())) == ["stale_attempt"]
    play.feed(EdgesGone(pair(), "torn", pair().state.edge))
    assert isinstance(play.joined.attempt, attempt.Withdrawn)
    assert counted(play.hear(round_open())) == ["stale_attempt"]
    play.hear(provision_message(pair(200)))
    play.feed(EdgesLive(pair(200)))
    assert ordered(play.hear(round_open())) == [
        signals.Bind(round=0, attempt=0, prior_digest=PRIOR)
    ]
    assert counted(play.hear(round_open())) == ["stale_attempt"]


def test_a_refused_update_is_not_sent_to_its_end() -> None:
    play = Play().sending()
    actions = play.hear(messages.Refused(code="misplaced", reason="the round is aggregating"))
    assert counted(actions) == ["refused_by_coordinator"]
    assert ordered(actions) == [signals.Abandon(round=0, attempt=0)]
    assert any(isinstance(action, DropEdges) for action in actions)


def test_a_worker_failure_while_sending_gives_the_edges_up() -> None:
    play = Play().sending()
    failed = signals.Failed(code="artifact", message="no release", round=0, attempt=0)
    actions = play.say(failed)
    assert said(actions) == ["Fault"]
    assert any(isinstance(action, DropEdges) for action in actions)


SAID = "/home/ann/arm.hdf5: demo_3 (index 3) column 'observation.speed' row 7 is NaN"


@pytest.mark.parametrize("code", ["dataset", "storage", "worker_fault", "of_a_user"])
@pytest.mark.parametrize("at_start", [True, False])
def test_the_words_of_the_worker_stay_on_the_node(code: str, at_start: bool) -> None:
    play = Play().ready()
    if at_start:
        play.feed(WorkerLost(code, SAID, "Repair /home/ann/arm.hdf5."))
        (fault,) = faults(play.hear(round_open()))
    else:
        play.hear(round_open())
        words = {"message": SAID, "remediation": "Repair /home/ann/arm.hdf5."}
        (fault,) = faults(play.say(signals.Failed(code=code, round=0, attempt=0, **words)))
    assert fault.code == code
    assert not {"ann", "demo_3", "speed", "row"} & set(re.findall(r"\w+", str(play.actions)))
    assert fault.reason == attempt.OUTWARD.get(code, "the node's worker failed")
    here = play.joined.attempt
    assert isinstance(here, attempt.Withdrawn)
    assert (here.code, here.reason) == (code, SAID)


def faults(actions: tuple[participation.Action, ...]) -> list[messages.Fault]:
    said = [action.message for action in actions if isinstance(action, participation.Say)]
    return [message for message in said if isinstance(message, messages.Fault)]


def test_a_worker_that_does_not_answer_is_ended() -> None:
    play = Play().ready()
    actions = play.hear(round_open())
    assert actions[-1] == ArmTimer("bind", participation.BIND_TIMEOUT_S)
    (end,) = play.feed(TimerExpired("bind"))
    assert isinstance(end, participation.EndWorker)
    assert CancelTimer("bind") in play.say(bound())
    assert play.feed(TimerExpired("bind")) == ()


# ---- fences ----


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (round_open(federation="0" * 32), "other_federation"),
        (round_open(epoch=6), "stale_epoch"),
        (collect(epoch=8), "stale_epoch"),
        (collect(0, 1), "stale_attempt"),
        (collect(1, 0), "stale_attempt"),
        (close(0, 3, outcome="aborted"), "stale_attempt"),
        (welcome(), "second_welcome"),
    ],
)
def test_a_message_from_elsewhere_changes_nothing(
    message: messages.FromCoordinator, reason: str
) -> None:
    play = Play().fetching()
    before = play.state
    actions = play.hear(message)
    assert counted(actions) == [reason]
    assert len(actions) == 1
    assert play.state == before


def test_a_committed_round_is_not_taken_again() -> None:
    play = Play().sent()
    play.hear(close())
    assert counted(play.hear(round_open(0, 1))) == ["stale_round"]
    assert counted(play.hear(close())) == ["stale_round"]


def test_noise_on_the_control_stream_is_counted() -> None:
    play = Play().ready()
    before = play.state
    assert play.feed(Misheard(play.call, "frame", "not a message")) == (
        Count("frame", "not a message"),
    )
    assert play.state == before


def test_what_comes_before_the_welcome_is_counted() -> None:
    play = Play().joining()
    assert counted(play.hear(round_open())) == ["before_welcome"]


# ---- losing and finding the link ----


def test_a_lost_link_keeps_the_training_and_forgets_the_edges() -> None:
    play = Play().training()
    actions = play.feed(LinkDown(play.call, "silent for 3 s"))
    assert ForgetEdges() in actions
    assert ordered(actions) == []
    assert isinstance(play.state.worker, participation.Able)
    play.feed(TimerExpired("redial"))
    play.feed(LinkUp(play.call))
    play.hear(welcome(epoch=8))
    assert play.joined.session.epoch == 8


def test_a_returning_node_learns_that_it_contributed() -> None:
    play = Play().sent()
    play.feed(LinkDown(play.call, "lost"))
    play.feed(TimerExpired("redial"))
    play.feed(LinkUp(play.call))
    last = messages.LastRecord(round=0, digest=NEXT, contributors=(NODE,))
    assert ordered(play.hear(welcome(epoch=8, last=last))) == [
        signals.Close(round=0, digest=NEXT, adopt=True)
    ]


def test_a_returning_node_learns_that_it_was_left_out() -> None:
    play = Play().welcomed(last=messages.LastRecord(round=3, digest=NEXT, contributors=(OTHER,)))
    assert ordered(play.say(CONFIGURED)) == [signals.Close(round=3, digest=NEXT, adopt=False)]


def test_the_coordinator_leaving_is_a_reason_to_dial_again() -> None:
    play = Play().training()
    leave = messages.Leave(federation=FEDERATION, epoch=7, reason="restart")
    actions = play.hear(leave)
    assert isinstance(actions[-1], Redial)
    assert actions[-1].cause == "the coordinator left: restart"


def test_reports_of_replaced_edges_are_dropped() -> None:
    play = Play().ready()
    play.hear(provision_message(pair(200)))
    assert play.feed(EdgesGone(pair(100), "replaced", pair(100).state.edge)) == ()
    assert said(play.feed(EdgesLive(pair(200)))) == ["Provisioned"]
