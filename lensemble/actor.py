"""The one loop that runs a machine, and the timers that machines ask for."""

from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TypeVar

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
    """Turns ``ArmTimer`` into a later ``TimerExpired``; one scope for each running timer."""

    def __init__(
        self, nursery: trio.Nursery, expired: Callable[[TimerExpired], Awaitable[None]]
    ) -> None:
        self._nursery = nursery
        self._expired = expired
        self._running: dict[str, trio.CancelScope] = {}

    def arm(self, action: ArmTimer) -> None:
        self.cancel(CancelTimer(action.timer))
        scope = trio.CancelScope()
        self._running[action.timer] = scope
        self._nursery.start_soon(self._wait, action, scope)

    def cancel(self, action: CancelTimer) -> None:
        scope = self._running.pop(action.timer, None)
        if scope is not None:
            scope.cancel()

    async def _wait(self, action: ArmTimer, scope: trio.CancelScope) -> None:
        with scope:
            await trio.sleep(action.seconds)
            if self._running.get(action.timer) is scope:
                del self._running[action.timer]
                await self._expired(TimerExpired(action.timer))
