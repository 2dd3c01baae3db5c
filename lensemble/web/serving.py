"""An HTTP server on trio: hypercorn's protocols, with limits on connections and on patience.

Every connection is one task tree.  A client that sends its header too slowly, takes its answer too
slowly or leaves ends that tree, and what it asked for is cancelled with it.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias, cast

import h11
import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from lensemble.addresses import split_address
from lensemble.errors import ConfigError
from lensemble.logs import logger

MAX_CONNECTIONS = 256
"""More wait in the kernel's queue until one ends."""

MAX_HEADER_BYTES = 1 << 14
PIECE_BYTES = 1 << 13
"""Read at once, so that a header that is too long is noticed before it is whole."""

HEADER_TIMEOUT_S = 10.0
"""From the opening of a connection, or the end of an answer, to a whole header."""

LINGER_S = 2.0
"""What a client that has left may still cost."""

SEND_TIMEOUT_S = 30.0
"""A client that takes nothing for so long is dropped."""

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


async def serve(
    app: App,
    address: str,
    key: str,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Answer HTTP at ``address`` with ``app`` until cancelled; starts with the bound address.

    ``key`` is the configuration key that names the address, for the error.

    Raises:
        ConfigError: nothing can be bound there.
    """
    host, port = split_address(address)
    try:
        (listener,) = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigError(
            f'{key} = "{address}" cannot be bound: {error.strerror or error}',
            f"Name a free port of this host in `{key}`.",
        ) from error
    bound = listener.socket.getsockname()
    task_status.started(f"[{host}]:{bound[1]}" if ":" in host else f"{host}:{bound[1]}")
    await _Server(app).serve(listener)


class _Server:
    def __init__(self, app: App) -> None:
        self._config = _settings()
        typed: Any = app
        self._app = wrap_app(typed, self._config.wsgi_max_body_size, "asgi")
        self._places = trio.Semaphore(MAX_CONNECTIONS)
        self._open: set[_Stream] = set()

    async def serve(self, listener: trio.SocketListener) -> None:
        async with listener, trio.open_nursery() as clients:
            try:
                while True:
                    await self._places.acquire()
                    clients.start_soon(self._attend, await _accepted(listener))
            finally:
                # What is being sent is shielded from cancelling, but not from this.
                for stream in self._open:
                    stream.socket.close()

    async def _attend(self, accepted: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            stream: Any = _Stream(accepted, scope)
            self._open.add(stream)
            context, state = WorkerContext(None), ConnectionState({})
            try:
                await _Connection(self._app, self._config, context, state, stream).run()
            except* Exception:  # noqa: BLE001 - what a stranger sends must not end the daemon
                logger("http").warning("http.connection_fault", exc_info=True)
            finally:
                stream.socket.close()
                self._open.discard(stream)
                self._places.release()


class _Http1(H11Protocol):
    """Nothing but HTTP/1.1: over HTTP/2 a client could hold an answer back for ever."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """An offer to speak HTTP/2 is not taken up."""


class _Connection(TCPServer):
    """A client of that protocol, without encryption."""

    async def run(self) -> None:
        """Answer until it leaves, or is dropped."""
        try:
            await self._answer()
        except OSError:
            return
        finally:
            await self._close()

    async def _answer(self) -> None:
        ends = self.stream.socket
        client = parse_socket_addr(ends.family, ends.getpeername())
        server = parse_socket_addr(ends.family, ends.getsockname())
        state = ConnectionState(self.state)
        async with TaskGroup() as self._task_group:
            tasks, say = self._task_group, self.protocol_send
            common = self.app, self.config, self.context, tasks, state, False
            speaks: Any = _Http1(*common, client, server, say)
            self.protocol = speaks
            await self.idle_task.restart(tasks, self._idle_timeout)
            await self._read_data()
            # Nothing more will be asked: there is nothing to wait for but answers under way.
            await self.idle_task.stop()


async def _accepted(listener: trio.SocketListener) -> trio.SocketStream:
    """The next client; a lack of descriptors passes."""
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            logger("http").warning("http.accept_refused", reason=error.strerror or "")
            await trio.sleep(1.0)


class _Stream(trio.abc.HalfCloseableStream):
    """A client's stream whose closing ends everything about that client."""

    def __init__(self, accepted: trio.SocketStream, scope: trio.CancelScope) -> None:
        self.socket = accepted.socket
        """Where the server reads the addresses of both sides."""

        self._under = accepted
        self._scope = scope

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._under.receive_some(min(max_bytes or PIECE_BYTES, PIECE_BYTES))
        if not data:
            # The client has said its last word, which the server takes for its leaving.
            self._scope.deadline = trio.current_time() + LINGER_S
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send ``data``, with a limit and an end, for the server shields its sends.

        Raises:
            BrokenResourceError: the client does not take it.
        """
        try:
            with trio.fail_after(SEND_TIMEOUT_S):
                await self._under.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            self._scope.cancel()
            self.socket.close()
            raise trio.BrokenResourceError from error

    async def wait_send_all_might_not_block(self) -> None:
        await self._under.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._under.send_eof()

    async def aclose(self) -> None:
        self.socket.close()
        self._scope.cancel()
        await trio.lowlevel.checkpoint()


class _Log:
    """Takes what the server has to say; only faults of an application are worth a record."""

    def __init__(self, config: Config) -> None:
        self._log = logger("http")

    async def exception(self, *_: object) -> None:
        self._log.error("http.fault", exc_info=True)

    async def info(self, *_: object, **__: object) -> None:
        pass

    access = critical = error = warning = debug = log = info


def _settings() -> Config:
    made = Config()
    made.logger_class = cast(Any, _Log)
    made.h11_max_incomplete_size = MAX_HEADER_BYTES
    made.keep_alive_timeout = HEADER_TIMEOUT_S
    made.include_server_header = False
    return made
