"""The one loop that runs a machine, and the timers that machines ask for."""

from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

import trio

from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired

State = TypeVar("State")
Event = TypeVar("Event")
Action = TypeVar("Action")


async def run_machine(
    state: State,
    transition: Callable[[State, Event], Step[State, Action]],
    inbox: AsyncIterable[Event],
    perform: Callable[[Action], Awaitable[None]],
    changed: Callable[[State], None] = lambda _: None,
) -> State:
    """Feed ``inbox`` to ``transition`` and perform what it asks for, in order, until it closes.

    ``changed`` sees each new state before its actions are performed.
    """
    async for event in inbox:
        state, actions = transition(state, event)
        changed(state)
        for action in actions:
            await perform(action)
    return state


class Timers:
    """Turns ``ArmTimer`` into a later ``TimerExpired``; one scope for each running timer.

    An expiry may already lie in the inbox when its timer is cancelled or armed again; reading the
    inbox through ``sift`` keeps it from coming through.
    """

    def __init__(
        self, nursery: trio.Nursery, expired: Callable[[TimerExpired], Awaitable[None]]
    ) -> None:
        self._nursery = nursery
        self._expired = expired
        self._running: dict[str, trio.CancelScope] = {}
        self._under_way: Counter[str] = Counter()
        self._void: Counter[str] = Counter()

    def arm(self, action: ArmTimer) -> None:
        self.cancel(CancelTimer(action.timer))
        scope = trio.CancelScope()
        self._running[action.timer] = scope
        self._nursery.start_soon(self._wait, action, scope)

    def cancel(self, action: CancelTimer) -> None:
        scope = self._running.pop(action.timer, None)
        if scope is not None:
            scope.cancel()
        self._void[action.timer] = self._under_way[action.timer]

    def sift(self, inbox: AsyncIterable[Event]) -> AsyncIterator[Event]:
        """The events of ``inbox``, in order, without expiries of timers cancelled since."""
        return _Sifted(inbox, self._admits)

    def _admits(self, event: object) -> bool:
        if not isinstance(event, TimerExpired) or not self._under_way[event.timer]:
            return True
        self._under_way[event.timer] -= 1
        if self._void[event.timer]:
            self._void[event.timer] -= 1
            return False
        return True

    async def _wait(self, action: ArmTimer, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(action.seconds)
            if self._running.get(action.timer) is scope:
                del self._running[action.timer]
                self._under_way[action.timer] += 1
                await self._expired(TimerExpired(action.timer))


class _Sifted(Generic[Event]):
    """An iterator rather than a generator: nothing is left to close when its reader fails."""

    def __init__(self, inbox: AsyncIterable[Event], admits: Callable[[object], bool]) -> None:
        self._events = aiter(inbox)
        self._admits = admits

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            event = await anext(self._events)
            if self._admits(event):
                return event
