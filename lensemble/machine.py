"""What every state machine has in common.

A machine is one module with four sections: states, events, actions, and one pure function,
``transition(state, event) -> (state, actions)``.  It does no IO, reads no clock, draws no
randomness and never sees a tensor.  Whoever runs it performs the actions in order and feeds each
outcome back as an event.
"""

from typing import TypeAlias, TypeVar

import msgspec

State = TypeVar("State")
Action = TypeVar("Action")

Step: TypeAlias = tuple[State, tuple[Action, ...]]


class ArmTimer(msgspec.Struct, frozen=True, tag=True):
    """Ask for ``TimerExpired(timer)`` in ``seconds``; arming a running timer restarts it."""

    timer: str
    seconds: float


class CancelTimer(msgspec.Struct, frozen=True, tag=True):
    """Forget ``timer`` if it runs; a cancelled timer never expires afterwards."""

    timer: str


class TimerExpired(msgspec.Struct, frozen=True, tag=True):
    timer: str
