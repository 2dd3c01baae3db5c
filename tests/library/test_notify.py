"""What a service tells its manager, over a real datagram socket."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from lensemble.errors import ConfigError
from lensemble.notify import MAX_STATUS_BYTES, Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(os.fspath(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(manager: socket.socket) -> list[str]:
    said = []
    while True:
        try:
            said.append(manager.recv(4096).decode())
        except BlockingIOError:
            return said


def environment(manager: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": manager.getsockname(), **more}


def test_outside_a_service_manager_nothing_is_said() -> None:
    told = Notifier.from_environment({})
    told.ready()
    told.status("here")
    assert told.watchdog_s is None


def test_children_do_not_inherit_the_socket(manager: socket.socket) -> None:
    given = environment(manager, WATCHDOG_USEC="2000000", WATCHDOG_PID=str(os.getpid()), HOME="/")
    told = Notifier.from_environment(given)
    assert given == {"HOME": "/"}
    assert told.watchdog_s == 2.0


def test_the_watchdog_of_another_process_is_not_this_ones(manager: socket.socket) -> None:
    given = environment(manager, WATCHDOG_USEC="2000000", WATCHDOG_PID=str(os.getpid() + 1))
    assert Notifier.from_environment(given).watchdog_s is None


@pytest.mark.parametrize(
    ("given", "named"),
    [({"NOTIFY_SOCKET": "tmp/x"}, "'tmp/x'"), ({"WATCHDOG_USEC": "soon"}, "'soon'")],
)
def test_what_cannot_be_followed_is_refused_by_name(given: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Notifier.from_environment(dict(given))


def test_a_status_is_one_line_of_bounded_length_and_said_once(manager: socket.socket) -> None:
    told = Notifier.from_environment(environment(manager))
    told.status("round 3\ncollecting: " + "ü" * MAX_STATUS_BYTES)
    told.status("round 3\ncollecting: " + "ü" * MAX_STATUS_BYTES)
    (line,) = heard(manager)
    assert line.startswith("STATUS=round 3 collecting: ü")
    assert len(line.encode()) <= MAX_STATUS_BYTES + len("STATUS=")


def test_a_manager_that_does_not_listen_harms_nobody(manager: socket.socket) -> None:
    told = Notifier.from_environment(environment(manager))
    os.unlink(manager.getsockname())
    told.alive()
    assert heard(manager) == []


async def test_the_loop_is_told_alive_thrice_within_the_watchdogs_time(
    manager: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    told = Notifier.from_environment(environment(manager, WATCHDOG_USEC="6000000"))
    with trio.move_on_after(5.9):
        await told.keep(lambda: "open")
    assert heard(manager) == ["STATUS=open", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]
