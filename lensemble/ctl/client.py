"""The asking end of the control socket: blocking, with the standard library only.

``lensemblectl`` is made of it, and so may be any script.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from lensemble.ctl import replies, requests
from lensemble.errors import LensembleError, OperatorError

DEFAULT_TIMEOUT_S = 10.0
PIECE_BYTES = 1 << 16


class DaemonUnreachable(OperatorError):
    """Nobody answers at the socket, or no longer."""

    code: ClassVar[str] = "daemon_unreachable"


class Declined(LensembleError):
    """The daemon answered ``Failed``; ``reply`` is what it said."""

    code: ClassVar[str] = "declined"

    def __init__(self, reply: replies.Failed) -> None:
        super().__init__(reply.message, reply.remediation)
        self.reply = reply


class Client:
    """A connection to the daemon that serves ``path``; close it, or use it in a ``with``.

    Args:
        path: the socket.
        version: release of the program that asks, for messages about versions.
        timeout_s: longest silence of the daemon before it counts as gone; a working daemon says
            ``Alive`` every 2 s.

    Raises:
        DaemonUnreachable: nobody answers there in time, or not in this protocol.
        Declined: the daemon speaks another version, or does not take requests from this user.
    """

    def __init__(
        self, path: Path, *, version: str = "", timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._heard = bytearray()
        self._searched = 0
        self._socket = self._connected()
        try:
            self._say(requests.Hello(ctl_version=requests.CTL_VERSION, version=version))
            self.greeting = self._greeting()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, request: requests.Request) -> replies.Reply:
        """The one reply to ``request``.

        Raises:
            Declined: it was refused.
            DaemonUnreachable: the daemon went away, or answered otherwise.
        """
        answers = list(self.stream(request))
        if len(answers) != 1:
            raise self._nonsense(f"{len(answers)} replies instead of one")
        return answers[0]

    def stream(self, request: requests.Request) -> Iterator[replies.Reply]:
        """Each reply to ``request`` as it comes.  Raises as ``ask``."""
        self._say(request)
        while True:
            reply = self._reply()
            match reply:
                case replies.End():
                    return
                case replies.Alive():
                    continue
                case replies.Failed():
                    raise Declined(reply)
                case _:
                    yield reply

    def _connected(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(self._timeout_s)
        try:
            made.connect(os.fspath(self._path))
        except OSError as error:
            made.close()
            raise self._unreachable(error) from error
        return made

    def _unreachable(self, error: OSError) -> DaemonUnreachable:
        match error:
            case FileNotFoundError() | NotADirectoryError():
                why, remedy = "there is no such socket", "Start the daemon"
            case ConnectionRefusedError():
                why, remedy = "the daemon that made this socket is gone", "Start the daemon again"
            case PermissionError():
                return DaemonUnreachable(
                    f"you may not open the control socket {self._path}",
                    "Run this as the daemon's user, as root, or as a member of group lensemble.",
                )
            case TimeoutError():
                why, remedy = f"no answer within {self._timeout_s:g} s", "Look at the daemon's log"
            case _:
                why, remedy = str(error.strerror or error), "Look at the daemon's log"
        return DaemonUnreachable(
            f"no daemon at {self._path}: {why}",
            f"{remedy}, or name another socket, config file or directory with --socket.",
        )

    def _greeting(self) -> replies.Greeting:
        reply = self._reply()
        match reply:
            case replies.Greeting():
                return reply
            case replies.Failed():
                raise Declined(reply)
            case _:
                raise self._nonsense(f"{type(reply).__name__} instead of a greeting")

    def _say(self, request: requests.Request) -> None:
        try:
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
        except OSError:
            # A daemon that refuses says why before it closes: that is worth reading first.
            if self._heard or self._peeked():
                return
            raise self._gone() from None

    def _peeked(self) -> bool:
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _reply(self) -> replies.Reply:
        line = self._line()
        try:
            return _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._nonsense(str(error)) from error

    def _line(self) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while (end := self._heard.find(b"\n", self._searched)) < 0:
            self._searched = len(self._heard)
            if len(self._heard) > replies.MAX_REPLY_BYTES:
                raise self._nonsense(f"a line of more than {replies.MAX_REPLY_BYTES} bytes")
            self._hear(deadline - time.monotonic())
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        self._searched = 0
        return line

    def _hear(self, left_s: float) -> None:
        try:
            self._socket.settimeout(max(left_s, 0.001))
            piece = self._socket.recv(PIECE_BYTES)
        except TimeoutError as error:
            raise self._unreachable(error) from error
        except OSError as error:
            raise self._gone() from error
        if not piece:
            raise self._gone()
        self._heard += piece

    def _gone(self) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"the daemon at {self._path} closed the connection",
            "It stopped, or it dropped a client that was too slow; see its log.",
        )

    def _nonsense(self, what: str) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"what answers at {self._path} does not speak this protocol: {what}",
            "Name the socket of a daemon of this release with --socket.",
        )


_decoder: "msgspec.json.Decoder[replies.Reply]" = msgspec.json.Decoder(replies.Reply)
