"""The daemon's end of the control socket.

Each client has one task, which asks the daemon for replies only as fast as the client takes them: a
slow client delays itself, a stuck or vanished one is dropped, and neither is waited for elsewhere.
"""

import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
import trio

from lensemble.ctl import replies, requests, socket_file
from lensemble.errors import InvariantError, LensembleError, OperatorError
from lensemble.logs import logger
from lensemble.state_dir import GROUP

MAX_CLIENTS = 32
SEND_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 10.0
ALIVE_S = 2.0
LOOK_S = 2.0
"""How often the daemon looks whether its socket is there still."""

PIECE_BYTES = 1 << 14

Answer = Callable[[requests.Request], AsyncGenerator[replies.Reply, None]]
"""Answers one request; raises ``LensembleError`` to refuse it.

It is closed when the client leaves, at whatever it then waits for; it must not yield from within a
nursery or cancel scope of its own.
"""

_decoder: "msgspec.json.Decoder[requests.Request]" = msgspec.json.Decoder(requests.Request)
_encoder = msgspec.json.Encoder()


class Counts:
    """What the socket has seen; ``refused`` by reason."""

    def __init__(self) -> None:
        self.clients = 0
        self.answered = 0
        self.refused: Counter[str] = Counter()


class _Gone(Exception):
    """The client closed, broke or outstayed its connection; its tasks end, nothing else."""


async def serve(
    path: Path,
    answer: Answer,
    greeting: replies.Greeting,
    *,
    task_status: trio.TaskStatus[Counts] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer at ``path`` until cancelled; the socket is removed at the end.

    Starts with its ``Counts``.

    Raises:
        ConfigError, StorageError: the socket cannot be made there; see ``socket_file.bind``.
    """
    counts = Counts()

    async def attend(stream: trio.SocketStream) -> None:
        await _Client(stream, answer, greeting, counts).attend()

    door = _Door(path)
    try:
        task_status.started(counts)
        async with trio.open_nursery() as clients:
            while True:
                async with trio.open_nursery() as open_door:
                    serve_here = partial(trio.serve_listeners, handler_nursery=clients)
                    open_door.start_soon(serve_here, attend, [door.listener])
                    await door.missing()
                    open_door.cancel_scope.cancel()
                await door.make_again()
    finally:
        door.remove()


class _Door:
    """The socket at ``path``, made again when somebody has deleted it.

    Raises:
        ConfigError, StorageError: it cannot be made there; see ``socket_file.bind``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._make()

    def _make(self) -> None:
        bound = socket_file.bind(self._path, MAX_CLIENTS)
        self.listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))
        self._made = os.lstat(self._path)

    async def missing(self) -> None:
        """Wait until there is nothing at the path; what others put there is left alone."""
        there = trio.Path(self._path)
        while True:
            if not await there.exists():
                return
            await trio.sleep(LOOK_S)

    async def make_again(self) -> None:
        """Make the socket anew, however long its directory does not allow that."""
        said = ""
        while True:
            try:
                self._make()
            except OperatorError as error:
                if error.message != said:
                    said = error.message
                    logger("ctl").warning("ctl.socket_refused", reason=said)
                await trio.sleep(LOOK_S)
            else:
                logger("ctl").warning("ctl.socket_remade", path=self._path)
                return

    def remove(self) -> None:
        socket_file.remove(self._path, self._made)


class _Client:
    def __init__(
        self, stream: trio.SocketStream, answer: Answer, greeting: replies.Greeting, counts: Counts
    ) -> None:
        self._stream = stream
        self._answer = answer
        self._greeting = greeting
        self._counts = counts
        self._heard = bytearray()
        self._mouth = trio.Lock()

    async def attend(self) -> None:
        """Answer this client until it leaves."""
        self._counts.clients += 1
        try:
            async with self._stream:
                await self._attend()
        except* _Gone:
            pass
        finally:
            self._counts.clients -= 1

    async def _attend(self) -> None:
        if self._counts.clients > MAX_CLIENTS:
            await self._refuse("busy", f"{MAX_CLIENTS} clients are connected", "Close some.")
            return
        if not await self._may_ask():
            return
        with trio.move_on_after(HELLO_TIMEOUT_S) as patience:
            if not await self._greet():
                return
        if patience.cancelled_caught:
            self._counts.refused["ctl:no_hello"] += 1
            return
        while True:
            await self._attend_one(await self._request())

    async def _may_ask(self) -> bool:
        raw = self._stream.socket.getsockopt(
            trio.socket.SOL_SOCKET, trio.socket.SO_PEERCRED, socket_file.CREDENTIALS_BYTES
        )
        uid, gid = socket_file.credentials(raw)
        if await trio.to_thread.run_sync(socket_file.may_ask, uid, gid):
            return True
        logger("ctl").warning("ctl.peer_refused", uid=uid)
        await self._refuse(
            "not_permitted",
            f"user {uid} may not use this socket",
            f"Run it as the daemon's user, as root, or as a member of group {GROUP}.",
        )
        return False

    async def _greet(self) -> bool:
        hello = await self._request()
        if not isinstance(hello, requests.Hello):
            await self._refuse("no_hello", "the first request must be Hello")
            return False
        if hello.ctl_version != requests.CTL_VERSION:
            older = "lensemblectl" if hello.ctl_version < requests.CTL_VERSION else "the daemon"
            await self._refuse(
                "contract_violation",
                f"lensemblectl {hello.version} speaks version {hello.ctl_version} of this socket, "
                f"the daemon {self._greeting.version} speaks {requests.CTL_VERSION}",
                f"Upgrade {older}.",
            )
            return False
        await self._send(self._greeting)
        return True

    async def _attend_one(self, request: requests.Request) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen_for_end)
            nursery.start_soon(self._keep_alive)
            try:
                async with aclosing(self._answer(request)) as answers:
                    async for reply in answers:
                        await self._send(reply)
                await self._send(replies.End())
                self._counts.answered += 1
            except InvariantError:
                raise
            except LensembleError as error:
                await self._refuse(error.code, error.message, error.remediation)
            except OSError as error:
                await self._refuse(
                    "system", f"the system refuses: {error}", "Free what it has run out of."
                )
            nursery.cancel_scope.cancel()

    async def _refuse(self, code: str, message: str, remediation: str = "") -> None:
        self._counts.refused[f"ctl:{code}"] += 1
        await self._send(replies.Failed(code=code, message=message, remediation=remediation))

    async def _keep_alive(self) -> None:
        while True:
            await trio.sleep(ALIVE_S)
            await self._send(replies.Alive())

    async def _send(self, reply: replies.Reply) -> None:
        line = _encoder.encode(reply) + b"\n"
        with trio.move_on_after(SEND_TIMEOUT_S) as patience:
            async with self._mouth:
                try:
                    await self._stream.send_all(line)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    raise _Gone from error
        if patience.cancelled_caught:
            self._counts.refused["ctl:slow_client"] += 1
            raise _Gone

    async def _request(self) -> requests.Request:
        """The next request; one that is malformed is refused, and the next one read."""
        while True:
            line = await self._line()
            try:
                return _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                await self._refuse(
                    "malformed", f"not a request: {error}", "Upgrade the older of the two sides."
                )

    async def _line(self) -> bytes:
        limit = requests.MAX_REQUEST_BYTES
        while (end := self._heard.find(b"\n")) < 0 and len(self._heard) <= limit:
            await self._hear()
        if not 0 <= end <= limit:
            await self._refuse("oversized", f"a request is at most {limit} bytes")
            raise _Gone
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line

    async def _hear(self) -> None:
        try:
            piece = await self._stream.receive_some(PIECE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise _Gone from error
        if not piece:
            raise _Gone
        self._heard += piece

    async def _listen_for_end(self) -> None:
        """Notice a client that leaves during an answer; what it says meanwhile waits, bounded."""
        while len(self._heard) <= requests.MAX_REQUEST_BYTES:
            await self._hear()
