"""Words and parts for playing the node's machines: one coordinator, one node, one workload."""

from lensemble import seeds
from lensemble.edge.spec import EdgeSpec
from lensemble.ids import Digest, EdgeId, FederationId, NodeId
from lensemble.wire import messages
from lensemble.workload import NoopTask, Workload, layout
from lensemble_node import attempt as attempts
from lensemble_node import participation, signals
from lensemble_node.participation import Action, Event, Heard, LinkUp, Me, State, Target
from lensemble_node.provision import Pair

NODE = NodeId("a" * 64)
OTHER = NodeId("b" * 64)
COORDINATOR = NodeId("c" * 64)
FEDERATION = FederationId("f" * 32)
EPOCH = 7
WORKLOAD = Workload(name="noop", root_seed=5, task=NoopTask(parameters=1000))
LAYOUT = layout(WORKLOAD)
ROOT = Digest("d" * 64)
PRIOR = Digest("1" * 64)
NEXT = Digest("2" * 64)
ME = Me(node=NODE, name="node", build="lensemble 0", boot="0" * 16, share_plain=True)
TARGET = Target(COORDINATOR, ("192.0.2.7:7707",))


def welcome(**changes: object) -> messages.Welcome:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": EPOCH,
        "build": "lensemble 0",
        "coordinator": "coord",
        "workload": WORKLOAD.canonical(),
        "config_hash": WORKLOAD.digest,
        "layout_digest": LAYOUT.digest,
        "aggregation": "plain",
        "last": messages.LastRecord(round=-1, digest=PRIOR, contributors=()),
    }
    return messages.Welcome(**{**fields, **changes})  # type: ignore[arg-type]


def pair(first: int = 100, epoch: int = EPOCH) -> Pair:
    return Pair(
        epoch,
        EdgeSpec(EdgeId(first), COORDINATOR, NODE, 1 << 16),
        EdgeSpec(EdgeId(first + 1), NODE, COORDINATOR, 1 << 16),
    )


def provision_message(of: Pair) -> messages.Provision:
    return messages.Provision(federation=FEDERATION, epoch=EPOCH, state=of.state, update=of.update)


def round_open(round_index: int = 0, attempt: int = 0, **changes: object) -> messages.RoundOpen:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": EPOCH,
        "round": round_index,
        "attempt": attempt,
        "prior_digest": PRIOR,
        "layout_digest": LAYOUT.digest,
        "config_hash": WORKLOAD.digest,
        "roster_digest": messages.roster_digest([NODE]),
        "sketch_seed": seeds.sketch(WORKLOAD.root_seed, round_index),
        "inner_steps": WORKLOAD.inner.steps,
        "global_step": round_index * WORKLOAD.inner.steps,
        "state_bytes": LAYOUT.nbytes,
        "field": messages.FieldParams(k=WORKLOAD.field.k, n_max=WORKLOAD.field.n_max),
        "answer_within_s": 30.0,
    }
    return messages.RoundOpen(**{**fields, **changes})  # type: ignore[arg-type]


def collect(round_index: int = 0, attempt: int = 0, **changes: object) -> messages.Collect:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": EPOCH,
        "round": round_index,
        "attempt": attempt,
        "roster": (NODE,),
        "send_within_s": 30.0,
    }
    return messages.Collect(**{**fields, **changes})  # type: ignore[arg-type]


def close(round_index: int = 0, attempt: int = 0, **changes: object) -> messages.RoundClose:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": EPOCH,
        "round": round_index,
        "attempt": attempt,
        "outcome": "closed",
        "digest": NEXT,
        "contributors": (NODE,),
    }
    return messages.RoundClose(**{**fields, **changes})  # type: ignore[arg-type]


def abort(round_index: int = 0, attempt: int = 0, *, retries: bool) -> messages.RoundClose:
    return close(
        round_index, attempt, outcome="aborted", digest=PRIOR, contributors=(), retries=retries
    )


def entry(node: NodeId = NODE) -> messages.RosterEntry:
    keys = messages.MaskKeys(mask_key=b"m" * 32, share_key=b"s" * 32, self_commitment=b"c" * 32)
    return messages.RosterEntry(node=node, dataset_root=ROOT, keys=keys, signature=b"\x00" * 64)


def roster(round_index: int = 0, attempt: int = 0, **changes: object) -> messages.Roster:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": EPOCH,
        "round": round_index,
        "attempt": attempt,
        "rows": messages.rows_of((entry(NODE), entry(OTHER))),
        "threshold": 2,
    }
    return messages.Roster(**{**fields, **changes})  # type: ignore[arg-type]


def unmask(round_index: int = 0, attempt: int = 0, **changes: object) -> messages.UnmaskRequest:
    fields: dict[str, object] = {
        "federation": FEDERATION,
        "epoch": EPOCH,
        "round": round_index,
        "attempt": attempt,
        "survivors": (NODE, OTHER),
    }
    return messages.UnmaskRequest(**{**fields, **changes})  # type: ignore[arg-type]


DEALT = attempts.SharesDealt(0, 0, b"c" * 128, (b"x" * 92,))
MASKED = signals.Masked(round=0, attempt=0, digest="8" * 64)
SPENT = signals.Spent(round=0, attempt=0)
CONFIGURED = signals.Configured(
    build="lensemble 0", dataset_root=ROOT, episodes=3, steps=90, layout_digest=LAYOUT.digest
)


def bound(round_index: int = 0, attempt: int = 0, held: int = 0) -> signals.Bound:
    return signals.Bound(round=round_index, attempt=attempt, holds_bytes=held)


def trained(round_index: int = 0, attempt: int = 0, *, reused: bool = False) -> signals.Trained:
    return signals.Trained(
        round=round_index,
        attempt=attempt,
        digest="9" * 64,
        nbytes=LAYOUT.nbytes,
        reused=reused,
        l2_norm=1.5,
        loss_first=2.0,
        loss_last=1.0,
    )


class Play:
    """Feeds the machine and keeps what it asked for last."""

    def __init__(self, me: Me = ME) -> None:
        self.state = State(me)
        self.actions: tuple[Action, ...] = ()

    def feed(self, *events: Event) -> tuple[Action, ...]:
        """The actions of the last of ``events``."""
        for event in events:
            self.state, self.actions = participation.transition(self.state, event)
        return self.actions

    def hear(self, *heard: messages.FromCoordinator) -> tuple[Action, ...]:
        for message in heard:
            self.feed(Heard(self.call, message))
        return self.actions

    def say(self, *said: signals.Event) -> tuple[Action, ...]:
        for signal in said:
            self.feed(participation.WorkerSaid(signal))
        return self.actions

    @property
    def call(self) -> int:
        return getattr(self.state.membership, "call", 0)

    @property
    def joined(self) -> participation.Joined:
        assert isinstance(self.state.membership, participation.Joined)
        return self.state.membership

    # ---- the usual way there ----

    def dialing(self) -> "Play":
        self.feed(participation.Assigned(TARGET))
        return self

    def joining(self) -> "Play":
        self.dialing().feed(LinkUp(self.call))
        return self

    def welcomed(self, **changes: object) -> "Play":
        self.joining().hear(welcome(**changes))
        return self

    def beside(self, *said: attempts.FromSecrets) -> tuple[Action, ...]:
        for signal in said:
            self.feed(participation.SecretsSaid(signal))
        return self.actions

    def ready(self, first: int = 100, *, masked: bool = False) -> "Play":
        """Joined, worker able, edges live."""
        self.welcomed(aggregation="masked" if masked else "plain").say(CONFIGURED)
        self.hear(provision_message(pair(first)))
        self.feed(participation.EdgesLive(pair(first)))
        return self

    def fetching(self) -> "Play":
        if not isinstance(self.state.membership, participation.Joined):
            self.ready()
        self.hear(round_open())
        self.say(bound())
        return self

    def training(self) -> "Play":
        self.fetching().say(signals.StateHeld(digest=PRIOR))
        self.hear(collect())
        return self

    def sending(self) -> "Play":
        self.training().say(trained())
        return self

    def sent(self) -> "Play":
        self.sending().say(signals.Sent(round=0, attempt=0))
        return self

    # ---- the same, masked ----

    def drawn(self) -> "Play":
        """Committed with keys; the state is held."""
        self.ready(masked=True).fetching().say(signals.StateHeld(digest=PRIOR))
        return self

    def dealing(self) -> "Play":
        self.drawn().hear(roster())
        return self

    def shared(self) -> "Play":
        self.dealing().beside(DEALT)
        return self

    def opening(self) -> "Play":
        self.shared().hear(collect())
        return self

    def masked_training(self) -> "Play":
        self.opening().beside(attempts.SharesOpened(0, 0))
        return self

    def masking(self) -> "Play":
        self.masked_training().say(trained())
        return self

    def masked_sending(self) -> "Play":
        self.masking().say(MASKED)
        return self

    def masked_sent(self) -> "Play":
        self.masked_sending().say(signals.Sent(round=0, attempt=0))
        return self

    def asked(self) -> "Play":
        self.masked_sent().hear(unmask())
        return self

    def spending(self) -> "Play":
        self.asked().beside(attempts.Consented(0, 0))
        return self

    def answered(self) -> "Play":
        self.spending().say(SPENT)
        return self


def said(actions: tuple[Action, ...]) -> list[str]:
    """The names of the messages among ``actions``, in order."""
    names: list[str] = []
    for action in actions:
        match action:
            case participation.Say(message=message):
                names.append(type(message).__name__)
            case participation.Commit():
                names.append("Commitment")
            case participation.Announce():
                names.append("Update")
            case participation.OnSecrets(action=wanted):
                names.append(type(wanted).__name__)
            case _:
                pass
    return names


def ordered(actions: tuple[Action, ...]) -> list[signals.Command]:
    """The commands for the worker among ``actions``."""
    return [action.command for action in actions if isinstance(action, participation.Order)]


def counted(actions: tuple[Action, ...]) -> list[str]:
    return [action.reason for action in actions if isinstance(action, participation.Count)]
