"""What the membership machine asks its rim for, and the timers that it arms."""

from typing import TypeAlias

import msgspec

from lensemble.ids import NodeId
from lensemble.machine import ArmTimer, CancelTimer
from lensemble.wire import circle, stages
from lensemble.wire.messages import FromNode
from lensemble_node import attempt, signals
from lensemble_node.participation.states import Session, Target
from lensemble_node.provision import Pair
from lensemble_node.terms import Terms

REDIAL, JOIN, SETTLED, BIND, START = "redial", "join", "settled", "bind", "start"


class Dial(msgspec.Struct, frozen=True, tag=True):
    """Answered by ``LinkUp`` or ``LinkDown`` with this ``call``; ends a dial still in progress."""

    target: Target
    call: int


class SayJoin(msgspec.Struct, frozen=True, tag=True):
    """Say ``Join`` with the invite of ``target``, if there is one."""

    target: Target
    call: int


class HangUp(msgspec.Struct, frozen=True, tag=True):
    call: int
    reason: str


class Redial(msgspec.Struct, frozen=True, tag=True):
    """Let the timer ``redial`` expire in ``delay_s`` less some jitter, and log why."""

    target: Target
    cause: str
    delay_s: float
    refused: bool


class Say(msgspec.Struct, frozen=True, tag=True):
    message: FromNode


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Commitment``."""

    session: Session
    commit: attempt.Commit


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Sign and say ``Update``; give the worker ``Send`` with the same signature."""

    session: Session
    announce: attempt.Announce


class OnSecrets(msgspec.Struct, frozen=True, tag=True):
    """Do with the secrets of the attempt what ``action`` says."""

    session: Session
    action: attempt.OnSecrets


class RunWorker(msgspec.Struct, frozen=True, tag=True):
    """Have a worker that is configured for ``terms``; answered by ``WorkerStarted``."""

    terms: Terms


class Order(msgspec.Struct, frozen=True, tag=True):
    command: signals.Command


class EndWorker(msgspec.Struct, frozen=True, tag=True):
    """Kill the process; the supervisor starts another."""

    reason: str


class Provide(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    edges: tuple[int, ...]


class DropEdges(msgspec.Struct, frozen=True, tag=True):
    """Give the pair up and report it lost."""

    reason: str


class ForgetEdges(msgspec.Struct, frozen=True, tag=True):
    """The link of the pair and of every stage is gone."""


class Remember(msgspec.Struct, frozen=True, tag=True):
    """Admitted: keep federation and address, forget the invite."""

    target: Target


class Count(msgspec.Struct, frozen=True, tag=True):
    """A message was refused for ``reason``, a word for counters; ``detail`` is for the log."""

    reason: str
    detail: str = ""


class Introduce(msgspec.Struct, frozen=True, tag=True):
    """What ``coordinator`` says of the other members of its federation."""

    coordinator: NodeId
    order: circle.CircleOrder


class OfferStages(msgspec.Struct, frozen=True, tag=True):
    """Stages may be hosted in this session: say what this node can hold."""

    session: Session
    coordinator: NodeId


class Stage(msgspec.Struct, frozen=True, tag=True):
    """The coordinator asks something of a stage on this node; the session is the one there is.

    Or to measure a link that stages may use.
    """

    order: stages.StageOrder | stages.BurstOrder


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Nothing more will be asked for."""


OnEdges: TypeAlias = Provide | Withdraw | DropEdges | ForgetEdges


Local: TypeAlias = (
    RunWorker
    | Order
    | EndWorker
    | Count
    | OfferStages
    | Stage
    | Introduce
    | ArmTimer
    | CancelTimer
    | Finish
    | OnEdges
)
"""What is done within this process."""


Action: TypeAlias = (
    Dial | SayJoin | HangUp | Redial | Say | Commit | Announce | OnSecrets | Remember | Local
)
