"""What the membership machine hears: of links, its coordinator, its worker, and its own rim."""

from typing import TypeAlias

import msgspec

from lensemble.ids import EdgeId
from lensemble.machine import TimerExpired
from lensemble.wire import stages
from lensemble.wire.messages import FromCoordinator
from lensemble_node import attempt, signals
from lensemble_node.participation.states import Target
from lensemble_node.provision import Pair


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """Join this coordinator, and leave the one there is."""

    target: Target


class LinkUp(msgspec.Struct, frozen=True, tag=True):
    call: int


class LinkDown(msgspec.Struct, frozen=True, tag=True):
    """The call failed, or its link was lost."""

    call: int
    cause: str


class Heard(msgspec.Struct, frozen=True, tag=True):
    call: int
    message: FromCoordinator


class Misheard(msgspec.Struct, frozen=True, tag=True):
    """A control frame that is no message of a version we speak."""

    call: int
    code: str
    reason: str


class WorkerSaid(msgspec.Struct, frozen=True, tag=True):
    signal: signals.Event


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    """A process of a newer generation is up and was told its configuration."""


class WorkerLost(msgspec.Struct, frozen=True, tag=True):
    code: str
    reason: str
    remediation: str = ""


class SecretsSaid(msgspec.Struct, frozen=True, tag=True):
    """From beside the secrets of the attempt in hand."""

    signal: attempt.FromSecrets


class EdgesLive(msgspec.Struct, frozen=True, tag=True):
    pair: Pair


class EdgesGone(msgspec.Struct, frozen=True, tag=True):
    """``lost`` is the edge to report; None where the coordinator knows already."""

    pair: Pair
    reason: str
    lost: EdgeId | None = None


class EdgesTornDown(msgspec.Struct, frozen=True, tag=True):
    """As the coordinator asked."""

    edges: tuple[int, ...]


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """Leave the federation and belong to none."""

    reason: str


class Quit(msgspec.Struct, frozen=True, tag=True):
    reason: str


class StageSaid(msgspec.Struct, frozen=True, tag=True):
    """What a stage on this node, or this node as their host, has to say in its session."""

    message: stages.StageAnswer | stages.BurstAnswer


Event: TypeAlias = (
    Assigned
    | LinkUp
    | LinkDown
    | Heard
    | Misheard
    | WorkerSaid
    | WorkerStarted
    | WorkerLost
    | SecretsSaid
    | EdgesLive
    | EdgesGone
    | EdgesTornDown
    | TimerExpired
    | Dismissed
    | Quit
    | StageSaid
)
