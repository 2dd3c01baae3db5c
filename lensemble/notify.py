"""What a service of ``Type=notify`` tells systemd: that it serves, how it is, that its loop turns.

The protocol is that of sd_notify(3): datagrams of ``KEY=value`` lines to the socket named by
``NOTIFY_SOCKET``.  Outside systemd there is no socket, and everything here does nothing.
"""

import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Self

import trio

from lensemble.errors import ConfigError

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLES = ("WATCHDOG_USEC", "WATCHDOG_PID")
STATUS_EVERY_S = 5.0
MAX_STATUS_BYTES = 480
MIN_WATCHDOG_S = 0.1


class Notifier:
    """The way to the service manager; ``watchdog_s`` is how often it must hear, None for never."""

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = address.replace("@", "\0", 1) if address else None
        self._status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Self:
        """What ``environment`` says; the variables are removed, for no child is this service.

        Raises:
            ConfigError: an address that is no socket, or a watchdog time that is no number.
        """
        address = environment.pop(SOCKET_VARIABLE, None)
        wanted, pid = (environment.pop(name, "") for name in WATCHDOG_VARIABLES)
        if address and not address.startswith(("/", "@")):
            raise ConfigError(
                f"{SOCKET_VARIABLE} is {address!r}, which is neither a path nor an abstract socket",
                f"Start the daemon without {SOCKET_VARIABLE}, or by systemd.",
            )
        watched = wanted and (not pid or pid == str(os.getpid()))
        return cls(address, _seconds(wanted) if watched else None)

    def ready(self) -> None:
        """Peers and commands are served from now on."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1", "STATUS=stopping")

    def alive(self) -> None:
        """The event loop turns."""
        self._send("WATCHDOG=1")

    def status(self, line: str) -> None:
        """What ``systemctl status`` shows; the same line is not sent twice in a row."""
        if line != self._status:
            self._status = line
            self._send(f"STATUS={_one_line(line)}")

    async def keep(self, headline: Callable[[], str]) -> None:
        """Tell ``headline()`` and, where there is a watchdog, that the loop turns, until cancelled.

        Raises:
            Whatever ``headline`` raises: a daemon that cannot say what it does is broken.
        """
        if self._address is None:
            return
        pause = min(STATUS_EVERY_S, (self.watchdog_s or STATUS_EVERY_S * 3) / 3)
        while True:
            self.status(headline())
            if self.watchdog_s is not None:
                self.alive()
            await trio.sleep(pause)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        # A manager that is gone, or whose queue is full, must not harm what it manages.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return


def _seconds(microseconds: str) -> float:
    if not microseconds.isdecimal() or int(microseconds) == 0:
        raise ConfigError(
            f"WATCHDOG_USEC is {microseconds!r}, not a number of microseconds",
            "Start the daemon without WATCHDOG_USEC, or by systemd.",
        )
    return max(int(microseconds) / 1e6, MIN_WATCHDOG_S)


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat.encode()[:MAX_STATUS_BYTES].decode("utf-8", "ignore")
