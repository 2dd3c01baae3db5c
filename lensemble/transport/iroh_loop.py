"""Awaiting iroh from trio, and moving payload past the slow half of its binding.

The binding (UniFFI) polls a Rust future on the calling thread and is told by a QUIC thread when to
poll again.  ``TrioLoop`` is the event loop it is given: a future that is ready at the poll is taken
at once, so no cancel can come between data leaving Rust and reaching its caller.

This is the only module that knows the binding's private names.  ``install`` checks them first.
"""

import ctypes
import gc
import importlib.metadata
import itertools
import struct
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import trio
from iroh import iroh_ffi

from lensemble.errors import ConfigError

SUPPORTED = "1.2."
"""What the version of the binding starts with."""

CONTRACT_VERSION = 30
MAX_CALL_BYTES = 256 << 10
"""Payload of one call; the trio thread stands still for 0.3 ms meanwhile."""

_LENGTH = struct.Struct(">i")
MAX_BEYOND_BYTES = 8 << 10
_Window = ctypes.c_char * (MAX_CALL_BYTES + MAX_BEYOND_BYTES + 256)
_FREED_LATE = (
    "Endpoint",
    "Connection",
    "SendStream",
    "RecvStream",
    "BiStream",
    "Incoming",
    "Accepting",
    "Connecting",
)
_LIBRARY_NAMES = (
    "ffi_iroh_ffi_uniffi_contract_version",
    "uniffi_iroh_ffi_fn_method_sendstream_write_all",
    "uniffi_iroh_ffi_fn_method_recvstream_read",
    "uniffi_iroh_ffi_fn_clone_sendstream",
    "uniffi_iroh_ffi_fn_clone_recvstream",
    "ffi_iroh_ffi_rust_future_poll_void",
    "ffi_iroh_ffi_rust_future_complete_void",
    "ffi_iroh_ffi_rust_future_free_void",
    "ffi_iroh_ffi_rust_future_poll_rust_buffer",
    "ffi_iroh_ffi_rust_future_complete_rust_buffer",
    "ffi_iroh_ffi_rust_future_free_rust_buffer",
    *(f"uniffi_iroh_ffi_fn_free_{name.lower()}" for name in _FREED_LATE),
)
_MODULE_NAMES = (
    "uniffi_set_event_loop",
    "_UniffiRustBuffer",
    "_UniffiFfiConverterBytes",
    "_UniffiFfiConverterTypeIrohError__as_error",
    "_UniffiRustCallStatus",
    "_uniffi_check_call_status",
    "_uniffi_rust_call",
    *_FREED_LATE,
)

_lib: Any = getattr(iroh_ffi, "_UniffiLib", None)
_ffi: Any = SimpleNamespace(
    **{name.removeprefix("_"): getattr(iroh_ffi, name, None) for name in _MODULE_NAMES}
)
_handle_of = attrgetter("_handle")
_grave: deque[tuple[Callable[..., Any], int]] = deque()


class _Future:
    """One poll of one Rust future; belongs to the trio run and thread that made it."""

    waits = 0
    """How often any of them was not ready at once: then its task made way for others."""

    def __init__(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self.thread = get_ident()
        self._task: trio.lowlevel.Task | None = None
        self.code: int | None = None
        self._dropped = False

    def cancelled(self) -> bool:
        return self._dropped

    def set_result(self, code: int) -> None:
        self.code = code
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    def __await__(self) -> Any:
        return self.wait().__await__()

    async def wait(self) -> int | None:
        if self.code is None:
            self._task = trio.lowlevel.current_task()
            _Future.waits += 1
            await trio.lowlevel.wait_task_rescheduled(self._drop)
        return self.code

    def _drop(self, _: object) -> trio.lowlevel.Abort:
        self._dropped = True
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class TrioLoop:
    """As much of an event loop as the binding asks for."""

    def create_future(self) -> _Future:
        _bury()
        return _Future()

    def call_soon_threadsafe(
        self, resolve: Callable[..., None], future: _Future, code: int
    ) -> None:
        """Called from inside Rust, locks held: resolve or pass on, and nothing else."""
        if get_ident() == future.thread:
            resolve(future, code)
            return
        try:
            future.token.run_sync_soon(resolve, future, code)
        except trio.RunFinishedError:
            return


def _wake(number: int, code: int) -> None:
    """Called from inside Rust, as ``TrioLoop.call_soon_threadsafe`` is."""
    _LOOP.call_soon_threadsafe(_resolve, _polled.pop(number), code)


def _resolve(future: _Future, code: int) -> None:
    if not future.cancelled():
        future.set_result(code)


_LOOP = TrioLoop()
_READY = 0
_numbers = itertools.count()
_polled: dict[int, _Future] = {}
"""Futures that Rust has not called back about yet, by the number it was given."""

_woken = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int8)(_wake)


def install() -> None:
    """Make iroh awaitable from trio; once or often.

    Raises:
        ConfigError: this is not a binding whose private surface is known.
    """
    check(importlib.metadata.version("iroh"), iroh_ffi, _lib)
    _ffi.uniffi_set_event_loop(_LOOP)
    for name in _FREED_LATE:
        free = getattr(_lib, f"uniffi_iroh_ffi_fn_free_{name.lower()}")
        getattr(iroh_ffi, name).__del__ = _late_free(free)


def check(version: str, module: object, library: Any) -> None:
    """Compare a binding with what this module was written for.

    Raises:
        ConfigError: a version, a name or the shape of a buffer differs; says which.
    """
    remedy = f"Install iroh {SUPPORTED}*."
    if not version.startswith(SUPPORTED):
        raise ConfigError(f"iroh {version} is installed; iroh {SUPPORTED}* is needed", remedy)
    missing = [name for name in _MODULE_NAMES if not hasattr(module, name)]
    missing += [name for name in _LIBRARY_NAMES if not hasattr(library, name)]
    if missing:
        raise ConfigError(f"iroh {version} lacks {', '.join(missing)}", remedy)
    contract = library.ffi_iroh_ffi_uniffi_contract_version()
    if contract != CONTRACT_VERSION:
        raise ConfigError(
            f"iroh {version} speaks contract {contract}; {CONTRACT_VERSION} is needed", remedy
        )
    sample = bytes(range(256))
    if _ffi.UniffiFfiConverterBytes.lift(_lower(sample[:4], memoryview(sample[4:]))) != sample:
        raise ConfigError(f"iroh {version} lays out its buffers in another way", remedy)


async def write(stream: Any, prefix: bytes, piece: memoryview) -> None:
    """Write both to a ``SendStream``, whole; together at most ``MAX_CALL_BYTES``.

    Raises:
        IrohError: the stream is torn.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    await _outcome(
        _lib.uniffi_iroh_ffi_fn_method_sendstream_write_all(
            _cloned(stream, _lib.uniffi_iroh_ffi_fn_clone_sendstream), _lower(prefix, piece)
        ),
        _lib.ffi_iroh_ffi_rust_future_poll_void,
        _lib.ffi_iroh_ffi_rust_future_complete_void,
        _lib.ffi_iroh_ffi_rust_future_free_void,
    )
    # Others have their turn, but only once this is on its way; and it is not torn by a cancel.
    await trio.lowlevel.cancel_shielded_checkpoint()


async def read_into(stream: Any, into: memoryview, beyond: memoryview) -> int:
    """Take from a ``RecvStream`` what is there, at least one byte; 0 at its end.

    Bytes go to ``into`` and, once that is full, to ``beyond`` of at most ``MAX_BEYOND_BYTES``.  A
    cancelled call takes nothing.

    Raises:
        IrohError: the stream is torn.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    waits = _Future.waits
    limit = len(into) + len(beyond) if len(into) <= MAX_CALL_BYTES else MAX_CALL_BYTES

    buffer = await _outcome(
        _lib.uniffi_iroh_ffi_fn_method_recvstream_read(
            _cloned(stream, _lib.uniffi_iroh_ffi_fn_clone_recvstream), limit
        ),
        _lib.ffi_iroh_ffi_rust_future_poll_rust_buffer,
        _lib.ffi_iroh_ffi_rust_future_complete_rust_buffer,
        _lib.ffi_iroh_ffi_rust_future_free_rust_buffer,
    )
    payload = _window(buffer)[_LENGTH.size : buffer.len]
    taken, first = len(payload), min(len(payload), len(into))
    into[:first] = payload[:first]
    if taken > first:
        beyond[: taken - first] = payload[first:]
    buffer.free()
    if _Future.waits == waits:
        await trio.lowlevel.cancel_shielded_checkpoint()
    return taken


async def _outcome(rust: int, poll: Any, complete: Any, free: Any) -> Any:
    """What the Rust future ``rust`` comes to, in as few steps as the binding allows.

    It does what the binding's own generated call does, for the two calls that every chunk takes.

    Raises:
        IrohError: that is what it came to.
    """
    try:
        code: int | None = None
        while code != _READY:
            if _grave:
                _bury()
            future = _Future()
            number = next(_numbers)
            _polled[number] = future
            poll(rust, _woken, number)
            code = await future.wait() if future.code is None else future.code
        status = _ffi.UniffiRustCallStatus()
        result = complete(rust, ctypes.byref(status))
        if status.code:
            _ffi.uniffi_check_call_status(_ffi.UniffiFfiConverterTypeIrohError__as_error, status)
        return result
    finally:
        free(rust)


def _cloned(handled: Any, clone: Any) -> int:
    """A handle of the same object, for one call, which takes it."""
    status = _ffi.UniffiRustCallStatus()
    handle: int = clone(_handle_of(handled), ctypes.byref(status))
    if status.code:
        _ffi.uniffi_check_call_status(None, status)
    return handle


def _lower(prefix: bytes, piece: memoryview) -> Any:
    """The two as the binding's argument of type bytes, by block copy; Rust frees it."""
    head = _LENGTH.pack(len(prefix) + len(piece)) + prefix
    buffer = _ffi.UniffiRustBuffer.alloc(len(head) + len(piece))
    window = _window(buffer)
    window[: len(head)] = head
    window[len(head) : len(head) + len(piece)] = piece
    buffer.len = len(head) + len(piece)
    return buffer


def _window(buffer: Any) -> memoryview:
    """The memory of a Rust buffer; only as far as its own length may it be touched."""
    address = ctypes.cast(buffer.data, ctypes.c_void_p).value
    if address is None:
        return memoryview(b"")
    return memoryview(_Window.from_address(address)).cast("B")


def _late_free(free: Callable[..., Any]) -> Callable[[Any], None]:
    """A finaliser that leaves the freeing to a moment when Rust holds no lock.

    A collection may run inside a wake callback, where the connection's lock is held; freeing a
    handle there takes the same lock and the QUIC thread would hang for ever.
    """

    def finalise(self: Any) -> None:
        handle = self.__dict__.pop("_handle", None)
        if handle is not None:
            _grave.append((free, handle))

    return finalise


def release() -> None:
    """Free every handle that nothing refers to any more; on a trio thread, outside of callbacks.

    A socket stays bound as long as any handle of its endpoint lives, closed or not.
    """
    gc.collect()
    _bury()


def _bury() -> None:
    while _grave:
        free, handle = _grave.popleft()
        _ffi.uniffi_rust_call(free, handle)
