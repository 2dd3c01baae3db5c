"""The worker: what it can do goes on across sessions.

A closed round is owed to it until it has closed it too.  It is started for the terms of a session,
and again for others.  One that does not open its dataset in time is ended; one that is lost makes
the node unable, and the supervisor starts another.
"""

from msgspec.structs import replace

from lensemble.machine import ArmTimer, CancelTimer, Step
from lensemble.wire import messages
from lensemble_node import attempt, signals
from lensemble_node.participation import in_hand
from lensemble_node.participation.actions import START, Action, EndWorker, Order
from lensemble_node.participation.events import WorkerLost, WorkerSaid, WorkerStarted
from lensemble_node.participation.states import Able, Me, NoWorker, Starting, State, Unable, Worker
from lensemble_node.terms import Terms


def worker_terms(worker: Worker) -> Terms | None:
    return None if isinstance(worker, NoWorker) else worker.terms


def for_terms(worker: Worker, terms: Terms) -> Worker:
    if not terms.trains or worker_terms(worker) == terms:
        return worker
    return Starting(terms)


def closing(worker: Worker, me: Me, last: messages.LastRecord) -> tuple[Worker, tuple[Order, ...]]:
    """Have the worker close round ``last``, now or as soon as it can."""
    if isinstance(worker, NoWorker) or last.round < 0:
        return worker, ()
    close = signals.Close(round=last.round, digest=last.digest, adopt=me.node in last.contributors)
    orders = (Order(close),) if isinstance(worker, Able) else ()
    return replace(worker, owed=close), orders


def hear(state: State, event: WorkerSaid | WorkerStarted | WorkerLost) -> Step[State, Action]:
    worker = state.worker
    match event:
        case _ if isinstance(worker, NoWorker):
            return state, ()
        case WorkerStarted():
            starting = Starting(worker.terms, worker.owed)
            return replace(state, worker=starting), (start_within(state.me),)
        case WorkerLost(code) if isinstance(worker, Unable) and worker.code != code:
            # It said itself what was wrong before it ended.
            return state, ()
        case WorkerLost(code, reason, remediation):
            return _unable(state, worker, attempt.WorkerLost(code, reason, remediation))
        case WorkerSaid(signal):
            return _worker_said(state, worker, signal)


def _worker_said(
    state: State, worker: Starting | Able | Unable, signal: signals.Event
) -> Step[State, Action]:
    match signal:
        case signals.Configured():
            return _able(state, worker, signal)
        case signals.Closed(round=closed):
            paid = worker.owed is not None and worker.owed.round <= closed
            return replace(state, worker=replace(worker, owed=None) if paid else worker), ()
        case signals.Failed(round=None) if isinstance(worker, Starting):
            lost = attempt.WorkerLost(signal.code, signal.message, signal.remediation)
            return _unable(state, worker, lost)
        case _ if isinstance(signal, attempt.Signal):
            return in_hand.settle(*in_hand.feed(state, signal))
        case _:
            # The slot signals and Attached, Detached go to the provisioner.
            return state, ()


def start_within(me: Me) -> ArmTimer:
    return ArmTimer(START, me.start_timeout_s)


def end_if_starting(state: State) -> tuple[Action, ...]:
    if not isinstance(state.worker, Starting):
        return ()
    reason = f"it did not open its dataset within {state.me.start_timeout_s:g} s"
    return (EndWorker(reason),)


def _able(
    state: State, worker: Starting | Able | Unable, facts: signals.Configured
) -> Step[State, Action]:
    if facts.layout_digest != worker.terms.layout_digest:
        reason = f"the worker lays the workload out as {facts.layout_digest}"
        return _unable(state, worker, attempt.WorkerLost("contract_violation", reason))
    able = Able(worker.terms, facts, worker.owed)
    owed = () if worker.owed is None else (Order(worker.owed),)
    return in_hand.settle(replace(state, worker=able), (CancelTimer(START), *owed))


def _unable(
    state: State, worker: Starting | Able | Unable, lost: attempt.WorkerLost
) -> Step[State, Action]:
    unable = Unable(worker.terms, lost.code, lost.reason, lost.remediation, worker.owed)
    after, actions = in_hand.feed(replace(state, worker=unable), lost)
    return in_hand.settle(after, (CancelTimer(START), *actions))
