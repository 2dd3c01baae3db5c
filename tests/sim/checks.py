"""What must hold in every moment of every life, of all hosts together."""

from typing import TYPE_CHECKING, Any

from lensemble.ids import NodeId
from lensemble.wire import fence, messages
from lensemble_coord.training import outer_round as r
from lensemble_coord.training.record import ContributionRecord, faults
from lensemble_node import attempt, participation
from lensemble_node.provision import Pair
from tests.coord.round_play import at_rest
from tests.sim.mask_side import At
from tests.sim.states import SimStates

if TYPE_CHECKING:
    from tests.sim.books import Books
    from tests.sim.coord_host import CoordinatorHost
    from tests.sim.federation import Federation
    from tests.sim.node_host import NodeHost

OF_ATTEMPT = (
    r.Committed, r.Declined, r.SharesSent, r.UpdateAnnounced, r.BlobArrived, r.UnmaskAnswered,
    r.Progressed,
)  # fmt: skip
OF_ONE_ATTEMPT = (messages.Roster, messages.Collect, messages.UnmaskRequest, messages.RoundClose)

LOOK_S = 2.0
"""How often all hosts are asked what they wait for, and until when."""


class Checks:
    def __init__(self, federation: "Federation") -> None:
        self.federation = federation
        self.truth: list[ContributionRecord] = []
        """Every record that was ever durable, in order."""
        self.dropped: dict[At, set[NodeId]] = {}

    def begin(self) -> None:
        self.truth = list(self.federation.coord.books.ledger.records)
        self._look()

    def _look(self) -> None:
        world = self.federation.world
        for node in self.federation.nodes:
            if node.up:
                self._has_deadline(node)
        coord = self.federation.coord
        if coord.up:
            self._round_has_deadline(coord)
        world.at(world.now + LOOK_S, self._look)

    # ---- the coordinator ----

    def coordinator_starts(self, books: "Books") -> None:
        """Nothing committed is lost, repeated or half there, whatever happened before."""
        if self.truth:
            assert list(books.ledger.records) == self.truth, "the ledger is not what was committed"
        assert not books.ledger.open
        unended = [run for run in books.ledger.runs if not run.outcome]
        assert unended == ([] if books.run is None else [books.run]), "a run has no end"

    def appended(self, coord: "CoordinatorHost", record: ContributionRecord) -> None:
        """A new record follows its predecessor and names who really sent what."""
        assert not faults(record, self.truth[-1])
        assert coord.state.ground.digest == record.prior_digest
        self.truth.append(record)
        assert list(coord.books.ledger.records) == self.truth
        at = (record.round, record.attempt)
        assert at in coord.books.begun
        names = tuple(each.node for each in record.contributors)
        assert record.c_t == len(names) >= coord.rules.quorum
        nodes = {node.node: node for node in self.federation.nodes}
        for each in record.contributors:
            sent = nodes[each.node].sent.get(at, set())
            assert each.update_digest in sent, f"{each.node[:6]} did not send this"
            bound = {said.hex() for said in nodes[each.node].committed.get(at, set())}
            assert each.commitment_signature in bound, f"{each.node[:6]} was not bound to {at}"
            assert each.dataset_root == nodes[each.node].dataset_root
        if coord.rules.masked:
            self._check_unmasked(coord, at, names)

    def _check_unmasked(
        self, coord: "CoordinatorHost", at: tuple[int, int], names: tuple[NodeId, ...]
    ) -> None:
        assert coord.requests[at] == names, "the sum is not the one that was asked for"
        answers = [a for a in self.federation.revealed.answers if a.at == at]
        assert len(answers) >= max(a.threshold for a in answers), "too few answers"
        assert all(a.survivors == names for a in answers)

    def told(self, coord: "CoordinatorHost", message: messages.FromCoordinator) -> None:
        """Nothing is said before it is durable."""
        match message:
            case messages.RoundOpen(round=index, attempt=attempt):
                assert (index, attempt) in coord.books.begun, f"{(index, attempt)} is not begun"
            case messages.RoundClose(outcome="closed", round=index):
                assert coord.books.tail().round >= index, f"round {index} is not committed"
            case messages.Welcome(last=last):
                assert coord.books.tail().round >= last.round
            case _:
                pass

    def round_moved(
        self, coord: "CoordinatorHost", before: r.State, event: r.Event, actions: tuple[Any, ...]
    ) -> None:
        """What the audit of the machine does not see: the machine against the disk.

        And that words of another attempt move nothing.
        """
        if isinstance(event, OF_ATTEMPT):
            ground = before.ground
            ours = (event.round, event.attempt) == (ground.round, ground.attempt)
            moved = coord.state is not before and coord.state != before
            assert ours or not moved, f"{event} moves {(ground.round, ground.attempt)}"
        self._dropped_stay_out(before, actions)
        old, new = before.ground.digest, coord.state.ground.digest
        assert new == self.truth[-1].next_digest or isinstance(coord.state, r.Committing)
        if old != new:
            assert isinstance(before, r.Committing)

    def _dropped_stay_out(self, before: r.State, actions: tuple[Any, ...]) -> None:
        at = (before.ground.round, before.ground.attempt)
        for action in actions:
            match action:
                case r.DropUpdate(node=node):
                    self.dropped.setdefault(at, set()).add(node)
                case r.DeriveSum(contributors=contributors):
                    both = self.dropped.get(at, set()) & {each.node for each in contributors}
                    assert not both, f"{both} count in {at} and were dropped from it"
                case _:
                    pass

    def _round_has_deadline(self, coord: "CoordinatorHost") -> None:
        state = coord.state
        assert r.waiting(state).reason
        busy = isinstance(state, r.Aggregating | r.Aligning | r.Committing)
        if not at_rest(state) and not (busy and not getattr(state, "reason", "")):
            assert coord.timers.running or coord.rounds.busy, f"{state} waits without a deadline"

    # ---- the nodes ----

    def node_moved(self, node: "NodeHost", before: participation.State, event: Any) -> None:
        """Of its state as a whole, after every event."""
        if isinstance(event, participation.Heard):
            self._words_are_fenced(node, before, event)
        membership = node.member.state.membership
        if not isinstance(membership, participation.Joined):
            return
        assert not isinstance(node.member.state.worker, participation.NoWorker)
        match event:
            case participation.Heard(_, messages.RoundOpen(round=opened, epoch=epoch)):
                session = membership.session
                told = epoch != session.epoch or session.last.round >= opened - 1
                assert told, f"{node.name} is asked for round {opened} and knows {session.last}"
            case _:
                pass

    def _words_are_fenced(
        self, node: "NodeHost", before: participation.State, event: participation.Heard
    ) -> None:
        """Words of another link, session or attempt change nothing."""
        old, new, message = before.membership, node.member.state.membership, event.message
        if event.call != getattr(old, "call", None):
            assert new == old, f"{node.name} obeys an older link: {message}"
        if not isinstance(old, participation.Joined) or not isinstance(message, fence.Fenced):
            return
        if message.epoch != old.session.epoch:
            assert new == old, f"{node.name} obeys another session: {message}"
        now = old.attempt
        if isinstance(message, OF_ONE_ATTEMPT) and not isinstance(now, attempt.Idle):
            ended = isinstance(message, messages.RoundClose) and message.outcome == "closed"
            at = (now.open.round, now.open.attempt)
            if not ended and (message.round, message.attempt) != at:
                assert new == old, f"{node.name} is at {at} and obeys {message}"

    def provides(self, node: "NodeHost", pair: Pair) -> None:
        """A node makes only the edges that its own session asked for."""
        joined = node.member.state.membership
        if isinstance(joined, participation.Joined):
            epochs = {self.federation.coord.provisioned[edge] for edge in pair.edges}
            assert epochs == {joined.session.epoch}, f"{node.name} makes edges of {epochs}"

    def node_trains(self, node: "NodeHost", round_index: int, states: SimStates) -> None:
        """What a node trains from, and will step from, is what the coordinator committed."""
        prior = next(each for each in self.truth if each.round == round_index - 1)
        for kind, due in (("state", prior.next_digest), ("momentum", prior.momentum_digest)):
            held = due is None or states.content((kind, due)) == due
            assert held, f"{node.name} trains from another {kind}"

    def node_closed(self, node: "NodeHost", round_index: int, *, adopt: bool) -> None:
        """A node takes as its own state exactly what the ledger says that it contributed to."""
        record = next((each for each in self.truth if each.round == round_index), None)
        assert record is not None, f"{node.name} closes round {round_index}, which is not committed"
        counted = node.node in {each.node for each in record.contributors}
        assert adopt == counted, f"{node.name} adopt={adopt} for a round that says {counted}"

    def _has_deadline(self, node: "NodeHost") -> None:
        running, membership = node.timers.running, node.member.state.membership
        if node.member.busy:
            return
        if isinstance(node.member.state.worker, participation.Starting) and node.worker:
            assert participation.START in running, f"{node.name} waits for ever for its worker"
        match membership:
            case participation.Resting(cause=cause):
                assert participation.REDIAL in running, f"{node.name} rests for ever"
                assert cause
            case participation.Joining():
                assert participation.JOIN in running, f"{node.name} waits for ever to be welcomed"
            case participation.Joined(attempt=attempt.Binding()):
                assert participation.BIND in running, f"{node.name} waits for ever for its worker"
            case participation.Joined(attempt=attempt.Withdrawn(reason=reason)):
                assert reason
            case _:
                pass

    # ---- at the end ----

    def end(self) -> None:
        coord = self.federation.coord
        begun = coord.books.begun
        assert len(set(begun)) == len(begun), "an attempt number was used twice"
        assert list(begun) == sorted(begun)
        for run, outcomes in coord.books.outcomes.items():
            assert len(outcomes) == 1, f"run {run} has the outcomes {outcomes}"
        for node in self.federation.nodes:
            charges, copy = node.disk.read("charges a", ()), node.disk.read("charges b", ())
            # A worker that stands still may do so between the two; the next one makes them equal.
            still = node.worker is not None and node.worker.wedged
            assert charges == copy or (still and charges[: len(copy)] == copy)
            assert len(set(charges)) == len(charges), f"{node.name} charged a release twice"
            assert set(charges) <= node.made_vectors, f"{node.name} charged what was not made"
