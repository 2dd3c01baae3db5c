"""Timers and the loop that runs a machine, on a clock that jumps."""

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from lensemble.actor import Timers, run_machine
from lensemble.machine import ArmTimer, CancelTimer, Step, TimerExpired


class Fired:
    """When each timer expired."""

    def __init__(self) -> None:
        self.at: list[tuple[float, str]] = []
        self.start = trio.current_time()

    async def __call__(self, event: TimerExpired) -> None:
        self.at.append((round(trio.current_time() - self.start, 6), event.timer))


async def test_a_timer_expires_once_at_its_time(autojump_clock: trio.testing.MockClock) -> None:
    fired = Fired()
    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, fired)
        timers.arm(ArmTimer("late", 20.0))
        timers.arm(ArmTimer("soon", 5.0))
        timers.arm(ArmTimer("now", 0.0))
    assert fired.at == [(0.0, "now"), (5.0, "soon"), (20.0, "late")]


async def test_arming_again_starts_anew(autojump_clock: trio.testing.MockClock) -> None:
    fired = Fired()
    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, fired)
        timers.arm(ArmTimer("open", 5.0))
        await trio.sleep(4.0)
        timers.arm(ArmTimer("open", 5.0))
    assert fired.at == [(9.0, "open")]


async def test_a_cancelled_timer_never_expires(autojump_clock: trio.testing.MockClock) -> None:
    fired = Fired()
    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, fired)
        timers.arm(ArmTimer("open", 5.0))
        timers.arm(ArmTimer("grace", 6.0))
        timers.cancel(CancelTimer("open"))
        timers.cancel(CancelTimer("open"))
        timers.cancel(CancelTimer("never armed"))
    assert fired.at == [(6.0, "grace")]


async def test_a_timer_may_be_armed_from_its_own_expiry(
    autojump_clock: trio.testing.MockClock,
) -> None:
    left = 3
    fired = Fired()

    async def expired(event: TimerExpired) -> None:
        nonlocal left
        left -= 1
        if left:
            timers.arm(ArmTimer(event.timer, 2.0))
        await trio.lowlevel.checkpoint()
        await fired(event)

    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, expired)
        timers.arm(ArmTimer("beat", 2.0))
    assert [at for at, _ in fired.at] == [2.0, 4.0, 6.0]


async def test_timers_end_with_their_nursery(autojump_clock: trio.testing.MockClock) -> None:
    fired = Fired()
    async with trio.open_nursery() as nursery:
        Timers(nursery, fired).arm(ArmTimer("open", 5.0))
        nursery.cancel_scope.cancel()
    assert fired.at == []


async def test_an_expiry_that_lies_in_the_inbox_goes_with_its_timer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    send, inbox = trio.open_memory_channel[TimerExpired | str](8)
    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, send.send)
        events = timers.sift(inbox)
        timers.arm(ArmTimer("open", 1.0))
        timers.arm(ArmTimer("grace", 1.0))
        await trio.sleep(2.0)
        timers.cancel(CancelTimer("open"))
        timers.arm(ArmTimer("grace", 1.0))
        await send.send("between")
        await trio.sleep(2.0)
        await send.aclose()
        heard = [event async for event in events]
    assert heard == ["between", TimerExpired("grace")]


async def test_an_expiry_waiting_for_room_in_the_inbox_goes_with_its_timer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    send, inbox = trio.open_memory_channel[TimerExpired | str](0)
    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, send.send)
        events = timers.sift(inbox)
        timers.arm(ArmTimer("open", 1.0))
        await trio.sleep(2.0)
        timers.cancel(CancelTimer("open"))
        nursery.start_soon(send.send, "after")
        assert await anext(events) == "after"


COMMANDS = st.lists(
    st.tuples(st.sampled_from(["arm", "cancel", "wait"]), st.sampled_from("ab")),
    max_size=30,
)


@given(COMMANDS)
@settings(max_examples=150)
async def test_only_the_expiry_of_the_last_arming_comes_through(
    commands: list[tuple[str, str]],
) -> None:
    """Against a dumb version: an expiry counts if nothing touched its timer since it was armed."""
    send, inbox = trio.open_memory_channel[TimerExpired](64)
    armed: set[str] = set()
    async with trio.open_nursery() as nursery:
        timers = Timers(nursery, send.send)
        for command, timer in commands:
            match command:
                case "arm":
                    armed.add(timer)
                    timers.arm(ArmTimer(timer, 0.0))
                case "cancel":
                    armed.discard(timer)
                    timers.cancel(CancelTimer(timer))
                case _:
                    await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        await send.aclose()
        heard = [event.timer async for event in timers.sift(inbox)]
    assert sorted(heard) == sorted(armed)


class Doubling:
    """A machine that answers a number with itself twice and a word with a fault."""

    @staticmethod
    def transition(state: int, event: int) -> Step[int, str]:
        if event < 0:
            raise LookupError(event)
        return state + event, (f"first {event}", f"second {event}")


async def test_actions_are_performed_in_order_each_before_the_next_event() -> None:
    send, inbox = trio.open_memory_channel[int](8)
    seen: list[str] = []

    async def perform(action: str) -> None:
        await trio.lowlevel.checkpoint()
        seen.append(action)

    for number in (1, 2):
        await send.send(number)
    await send.aclose()
    end = await run_machine(
        0, Doubling.transition, inbox, perform, lambda state: seen.append(f"state {state}")
    )
    assert end == 3
    assert seen == ["state 1", "first 1", "second 1", "state 3", "first 2", "second 2"]


async def test_a_fault_of_the_machine_or_its_rim_is_not_swallowed() -> None:
    async def perform(action: str) -> None:
        raise OSError(action)

    for event, fault in ((-1, LookupError), (1, OSError)):
        send, inbox = trio.open_memory_channel[int](8)
        await send.send(event)
        with pytest.raises(fault):
            await run_machine(0, Doubling.transition, inbox, perform)
