"""Parts that are broken on purpose, to show that the checks of a simulated life can fail.

Each is one promise not kept.  A machine with a fence taken out is the machine behind a gate that
rewrites what it hears as though the fence had let it through; nothing in our code is patched.
Where a promise is kept twice over, one of the two may be broken and nothing comes of it
(``REDUNDANT``); the life that breaks both is in ``FOUND``.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from lensemble.ids import Digest, NodeId
from lensemble.wire import fence, messages
from lensemble.wire.steps import TakenStep
from lensemble_coord.training import outer_round as r
from lensemble_node import attempt, participation, provision, signals
from lensemble_node.worker.state_store import Goal
from tests.sim.books import Books
from tests.sim.coord_host import CoordinatorHost
from tests.sim.mask_side import At, SimSecrets
from tests.sim.node_host import NodeHost
from tests.sim.parts import Parts, Transition
from tests.sim.session import SimSession
from tests.sim.states import SimStates, stepped
from tests.sim.worker import Job, SimWorker
from tests.sim.world import Link

# ---- the node's fences ----


def _fences(*dropped: str) -> Transition:
    """``participation`` without the fences of these names: call, epoch, attempt."""

    def transition(state: Any, event: Any) -> Any:
        joined = state.membership
        if isinstance(event, participation.Heard):
            if "call" in dropped and hasattr(joined, "call"):
                event = replace(event, call=joined.call)
            if isinstance(joined, participation.Joined):
                event = replace(event, message=_let_through(joined, event.message, dropped))
        return participation.transition(state, event)

    return transition


def _let_through(joined: participation.Joined, message: Any, dropped: tuple[str, ...]) -> Any:
    if "epoch" in dropped and isinstance(message, fence.Fenced):
        message = replace(message, epoch=joined.session.epoch)
    now = joined.attempt
    if "attempt" in dropped and not isinstance(now, attempt.Idle):
        ended = isinstance(message, messages.RoundClose) and message.outcome == "closed"
        if isinstance(message, fence.OfRound) and not isinstance(message, messages.RoundOpen):
            here = now.open
            if not ended:
                message = replace(message, round=here.round, attempt=here.attempt)
    return message


def _answers_again(state: Any, event: Any) -> Any:
    """``participation`` that has forgotten that it was asked to unmask before."""
    joined = state.membership
    if isinstance(joined, participation.Joined) and isinstance(event, participation.Heard):
        now, asked = joined.attempt, (attempt.Asked, attempt.Agreed, attempt.Spending)
        if isinstance(event.message, messages.UnmaskRequest) and isinstance(now, asked):
            forgot = replace(joined, attempt=attempt.Sent(now.open, masked=True))
            state = replace(state, membership=forgot)
    return participation.transition(state, event)


class DeafNode(NodeHost):
    """The ends of its edges do not see their link go."""

    def end_edges(self, link: Link) -> None:
        pass


class ForgetfulSecrets(SimSecrets):
    """They consent to a second sum of one attempt."""

    def decide(self, survivors: tuple[NodeId, ...]) -> None:
        self.survivors = ()
        super().decide(survivors)


def _keeps_edges(state: Any, event: Any) -> Any:
    """``provision`` that is not told that the link is gone."""
    if isinstance(event, provision.LinkGone):
        return state, ()
    return provision.transition(state, event)


# ---- what the node's worker owes ----


class FreeWorker(SimWorker):
    """It releases and does not charge."""

    def _charge(self, vector: Digest, job: signals.Train) -> Job:
        yield from ()


class DearWorker(SimWorker):
    """It charges a release each time that it is asked for."""

    def _charge(self, vector: Digest, job: signals.Train) -> Job:
        for place in ("charges a", "charges b"):
            yield from self._write(place, (*self.disk.read(place, ()), vector))


class HastyWorker(SimWorker):
    """It says that it has trained before the charge is durable."""

    def _charge(self, vector: Digest, job: signals.Train) -> Job:
        self._ready(job, vector, reused=True)
        yield from super()._charge(vector, job)


class CredulousStates(SimStates):
    """They take for right whatever the step comes to."""

    def agrees(self, came_to: Goal, step: TakenStep) -> bool:
        return True


class CredulousWorker(SimWorker):
    """It does not look at the digest of what its step comes to."""

    holder = CredulousStates


class SkippingStates(SimStates):
    """They take a step from whatever lies there."""

    def _missed(self, goal: Goal, steps: Sequence[TakenStep]) -> tuple[TakenStep, ...]:
        return tuple(steps[-1:]) if self.disk.keys("global") else ()

    def computed(self, step: TakenStep) -> Goal:
        contents = [self.disk.read(key) for key in self.disk.keys("global")]
        state, momentum = contents[0], contents[1] if len(contents) > 1 else None
        return stepped(Goal(state, momentum), step.total, step.contributors)

    def agrees(self, came_to: Goal, step: TakenStep) -> bool:
        return True


class SkippingWorker(SimWorker):
    """It takes the last step, from wherever it is."""

    holder = SkippingStates


class HalfWorker(SimWorker):
    """It keeps one copy of what it has charged."""

    def _charge(self, vector: Digest, job: signals.Train) -> Job:
        charges = self.disk.read("charges a", ())
        if vector not in charges:
            yield from self._write("charges a", (*charges, vector))


class UnspentWorker(SimWorker):
    """It does not mark a vector as spent before it helps to reveal it."""

    def _spend(self, job: signals.Spend) -> Job:
        self._release = self._masked = None
        yield 0.01
        self.say(signals.Spent(round=job.round, attempt=job.attempt))


class ReusingWorker(SimWorker):
    """It does not take for spent what an earlier life of the coordinator may have summed."""

    def _spend_before(self, job: signals.Train) -> Job:
        yield from ()


# ---- the coordinator's fences ----


def _takes_late_words(state: Any, event: Any) -> Any:
    """``outer_round`` that takes a word of any attempt for one of this."""
    if isinstance(event, r.Committed | r.UpdateAnnounced | r.BlobArrived | r.SharesSent):
        event = replace(event, round=state.ground.round, attempt=state.ground.attempt)
    return r.transition(state, event)


def _keeps_the_dropped(state: Any, event: Any) -> Any:
    """``outer_round`` in which who was dropped is as good as any."""
    after, actions = r.transition(state, event)
    if isinstance(state, r.Collecting) and isinstance(after, r.Collecting):
        gone = tuple(each for each in after.dropped if each.node not in after.ground.here)
        after = replace(after, dropped=gone)
    return after, actions


def _believes_blobs(state: Any, event: Any) -> Any:
    """``outer_round`` that takes whatever blob comes for what was announced."""
    if isinstance(event, r.BlobArrived) and isinstance(state, r.Collecting):
        for said in state.announced:
            if said.node == event.node:
                event = replace(event, digest=said.digest, signature=said.signature)
    return r.transition(state, event)


class OpenSession(SimSession):
    """It listens to words of any attempt."""

    def is_now(self, message: fence.OfRound) -> bool:
        return True


class CredulousSession(SimSession):
    """It takes any blob for the one that was announced."""

    def is_announced(self, found: Digest, signature: bytes, said: messages.Update) -> bool:
        return True


class HastyCoordinator(CoordinatorHost):
    """It says that a round is committed, then writes it down."""

    def _commit(self, action: r.Commit, at: At) -> r.Event:
        write = partial(super()._commit, action, at)
        self.world.after(self, 0.5, lambda: self.up and write() and None)
        tail = self.books.tail()
        return r.Advanced(*at, tail.next_digest[::-1])


class EndlessBooks(Books):
    """They do not end a run at its start that was done before the crash."""

    def _end_done_run(self) -> None:
        pass


class LazyBooks(Books):
    """They write an attempt down where a power loss undoes it."""

    def begin_attempt(self, round_index: int, attempt: int) -> None:
        pass


class GreedyBooks(Books):
    """They do not keep the record that they say they keep."""

    def open(self) -> None:
        if len(self.ledger.records) > 2:
            self._write(records=self.ledger.records[:-1])
        super().open()


FOUND: dict[str, Parts] = {
    "node: no fence of calls and sessions": Parts(participation=_fences("call", "epoch")),
    "node: no fence of sessions": Parts(participation=_fences("epoch")),
    "node: no fence of attempts": Parts(participation=_fences("attempt")),
    "node: a second sum is consented to": Parts(
        participation=_answers_again, secrets=ForgetfulSecrets
    ),
    "node: a lost link keeps its edges": Parts(provision=_keeps_edges, node=DeafNode),
    "worker: a step is not checked": Parts(worker=CredulousWorker),
    "worker: a step from elsewhere": Parts(worker=SkippingWorker),
    "worker: no charge": Parts(worker=FreeWorker),
    "worker: charged twice": Parts(worker=DearWorker),
    "worker: charged in one place": Parts(worker=HalfWorker),
    "worker: told before it is charged": Parts(worker=HastyWorker),
    "worker: revealed and not spent": Parts(worker=UnspentWorker),
    "worker: spent before and sent again": Parts(worker=ReusingWorker),
    "coordinator: late words count": Parts(round=_takes_late_words, session=OpenSession),
    "coordinator: who was dropped counts": Parts(round=_keeps_the_dropped),
    "coordinator: any blob counts": Parts(round=_believes_blobs, session=CredulousSession),
    "coordinator: told before it is committed": Parts(coordinator=HastyCoordinator),
    "coordinator: an attempt is not written down": Parts(books=LazyBooks),
    "coordinator: a record is lost": Parts(books=GreedyBooks),
    "coordinator: a done run goes on": Parts(books=EndlessBooks),
}
REDUNDANT: dict[str, Parts] = {
    "node: the machine keeps the edges of a lost link": Parts(provision=_keeps_edges),
    "node: the ends keep the edges of a lost link": Parts(node=DeafNode),
    "node: no fence of calls": Parts(participation=_fences("call")),
    "node: the machine alone consents": Parts(participation=_answers_again),
    "node: the secrets alone consent": Parts(secrets=ForgetfulSecrets),
    "coordinator: the machine takes late words": Parts(round=_takes_late_words),
    "coordinator: the session takes late words": Parts(session=OpenSession),
    "coordinator: the session takes any blob": Parts(session=CredulousSession),
    "coordinator: the machine takes any blob": Parts(round=_believes_blobs),
}
