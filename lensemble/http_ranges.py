"""Byte ranges of a file behind HTTP or HTTPS: blocking, patient, and interruptible.

What a server may do instead of answering a range (RFC 9110, sections 14 and 15) ends in an error
with a name of its own.  Proxies of the environment are not used.
"""

import http.client
import io
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Protocol, cast
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec

from lensemble.errors import (
    WeightsBusy,
    WeightsChanged,
    WeightsError,
    WeightsRangeRefused,
    WeightsShort,
    WeightsUnranged,
    WeightsUnreachable,
)
from lensemble.version import VERSION

PIECE_BYTES = 1 << 18
MAX_REDIRECTS = 5
POLL_S = 0.25
"""How long a read waits before it asks whether to stop."""

LEAST_PROGRESS_BYTES = 1 << 16
"""An answer that brought less before it broke off counts as a failed try."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_REDIRECTS = {301, 302, 303, 307, 308}
_GONE = {401, 403, 404, 410}


class Stopped(Exception):
    """``should_stop`` said so."""


class Patience(msgspec.Struct, frozen=True):
    """Tries without progress before giving up; waits double from ``first_wait_s``."""

    tries: int = 6
    first_wait_s: float = 0.5
    most_wait_s: float = 60.0
    silence_s: float = 30.0
    connect_s: float = 5.0


class Identity(msgspec.Struct, frozen=True):
    """What tells one state of the file from another; ``etag`` is empty where none is given."""

    file_bytes: int
    etag: str


class _Retry(Exception):
    """This try failed; ``error`` is what it comes to if no other succeeds."""

    def __init__(self, error: WeightsError, wait_s: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.wait_s = wait_s


class RangeReader:
    """One file.  The first answer fixes its identity; every later one must agree.

    Args:
        url: where.
        should_stop: asked several times a second; ``Stopped`` is raised once it is true.
        patience: with a server that fails.
        file_bytes: of the file, where known beforehand.
    """

    def __init__(
        self,
        url: str,
        should_stop: Callable[[], bool] = lambda: False,
        patience: Patience | None = None,
        file_bytes: int | None = None,
    ) -> None:
        self._url = url
        self._should_stop = should_stop
        self._patience = patience or Patience()
        self._file_bytes = file_bytes
        self.title = shown(url)
        self.identity: Identity | None = None
        self.received_bytes = 0
        """Of bodies, whether they were used or not."""

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on; raises as ``pieces``."""
        return b"".join(bytes(piece) for piece in self.pieces(offset, length))

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """The same bytes in order, as they come.

        Raises:
            WeightsError: a subclass that names what the server did.
            Stopped: asked to.
        """
        end, failures, mark = offset + length, 0, offset
        while offset < end:
            try:
                for piece in self._answer(offset, end):
                    yield piece
                    offset += piece.nbytes
            except _Retry as failed:
                failures = 1 if offset - mark >= LEAST_PROGRESS_BYTES else failures + 1
                mark = offset
                if failures >= self._patience.tries:
                    raise failed.error from failed
                self._wait(failed, failures)

    def _answer(self, begin: int, end: int) -> Iterator[memoryview]:
        """One request and what came of its body, until it ends or breaks off."""
        with self._connected(begin, end) as response:
            self._check(response, begin, end)
            while begin < end:
                # What has come, not as much as fits: a crash must lose little.
                piece = response.read1(min(PIECE_BYTES, end - begin))
                if not piece:
                    raise _Retry(
                        WeightsShort(f"{self.title}: the body ended {end - begin} bytes early")
                    )
                self.received_bytes += len(piece)
                begin += len(piece)
                yield memoryview(piece)

    @contextmanager
    def _connected(self, begin: int, end: int) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request for bytes ``begin`` to ``end``, redirects followed."""
        url = self._url
        for _ in range(MAX_REDIRECTS + 1):
            with self._requested(url, begin, end) as response:
                if response.status not in _REDIRECTS:
                    yield response
                    return
                url = self._redirected(url, response.getheader("Location") or "")
        raise WeightsUnreachable(f"{self.title} redirects more than {MAX_REDIRECTS} times")

    @contextmanager
    def _requested(self, url: str, begin: int, end: int) -> Iterator[http.client.HTTPResponse]:
        parts = _split(url)
        connection = _connection(parts, self._patience.connect_s)
        patient: _PatientSocket | None = None
        try:
            connection.connect()
            patient = _PatientSocket(connection.sock, self._should_stop, self._patience.silence_s)
            connection.sock = cast("socket.socket", patient)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {
                "Range": f"bytes={begin}-{end - 1}",
                "Accept-Encoding": "identity",
                "User-Agent": f"lensemble/{VERSION}",
            }
            connection.request("GET", target, headers=headers)
            yield connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            raise WeightsUnreachable(f"{self.title}: {error.verify_message}") from error
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
            raise _Retry(WeightsUnreachable(f"{self.title}: {said}")) from error
        finally:
            if patient is None:
                connection.close()
            else:
                patient.shut()

    def _check(self, response: http.client.HTTPResponse, begin: int, end: int) -> None:
        status = response.status
        if status != http.client.PARTIAL_CONTENT:
            self._refuse(response, status, begin, end)
        found = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range") or "")
        if found is None or (int(found[1]), int(found[2])) != (begin, end - 1):
            sent = response.getheader("Content-Range")
            if found is None or int(found[1]) != begin or int(found[2]) >= end:
                raise WeightsUnranged(
                    f"{self.title}: bytes {begin}-{end - 1} were asked for, {sent!r} came"
                )
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise WeightsUnranged(f"{self.title} sends its bytes encoded")
        seen = Identity(int(found[3]), response.getheader("ETag") or "")
        if self._file_bytes not in {None, seen.file_bytes}:
            raise WeightsChanged(
                f"{self.title} has {seen.file_bytes} bytes, the planned model {self._file_bytes}"
            )
        if self.identity not in {None, seen}:
            raise WeightsChanged(f"{self.title} changed while it was read: {self.identity}, {seen}")
        self.identity = seen

    def _refuse(
        self, response: http.client.HTTPResponse, status: int, begin: int, end: int
    ) -> None:
        said = f"{self.title} answers {status} {response.reason}".rstrip()
        if status == http.client.OK:
            raise WeightsUnranged(f"{self.title} sends the whole file where a range was asked for")
        if status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            size = response.getheader("Content-Range") or "it does not say how many"
            raise WeightsRangeRefused(f"{self.title} has no bytes {begin}-{end - 1}; it has {size}")
        if status == http.client.TOO_MANY_REQUESTS or status >= 500:
            raise _Retry(WeightsBusy(said), self._asked_to_wait(response, said))
        if status in _GONE:
            raise WeightsUnreachable(said, "Check the address, and that the node may read it.")
        raise WeightsUnreachable(said)

    def _asked_to_wait(self, response: http.client.HTTPResponse, said: str) -> float | None:
        text = response.getheader("Retry-After")
        if text is None:
            return None
        wait = _seconds(text.strip())
        if wait is not None and wait > self._patience.most_wait_s:
            raise WeightsBusy(
                f"{said} and to come back in {wait:.0f} s; "
                f"{self._patience.most_wait_s:.0f} s are the most that is waited"
            )
        return wait

    def _wait(self, failed: _Retry, failures: int) -> None:
        wait = failed.wait_s
        if wait is None:
            wait = min(
                self._patience.first_wait_s * 2 ** (failures - 1), self._patience.most_wait_s
            )
        until = time.monotonic() + wait
        while (left := until - time.monotonic()) > 0:
            if self._should_stop():
                raise Stopped
            time.sleep(min(left, POLL_S))

    def _redirected(self, url: str, location: str) -> str:
        target = urljoin(url, location)
        if not location or (url.startswith("https:") and not target.startswith("https:")):
            raise WeightsUnreachable(f"{self.title} redirects to {shown(target)!r}")
        return target


def shown(url: str) -> str:
    """``url`` without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_is_number = parts.port is None or parts.port > 0
    except ValueError as error:
        raise WeightsUnreachable(f"not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_number:
        raise WeightsUnreachable(f"{shown(url)!r} is no http or https address")
    if parts.username is not None:
        raise WeightsUnreachable(
            f"{shown(url)}: a name in the address is not sent", "Leave it out of the URL."
        )
    if not url.isascii() or any(each.isspace() for each in url):
        raise WeightsUnreachable(
            f"{shown(url)!r} has blanks or letters beyond ASCII", "Write them as %XX."
        )
    return parts


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)


def _seconds(text: str) -> float | None:
    """Of a ``Retry-After``: a number, or an HTTP date."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (when - when.now(when.tzinfo)).total_seconds())


class _Wire(Protocol):
    """What is used of a socket."""

    def recv_into(self, into: memoryview, /) -> int: ...
    def sendall(self, data: bytes, /) -> None: ...
    def settimeout(self, seconds: float, /) -> None: ...
    def close(self) -> None: ...


class _PatientSocket:
    """A socket whose reads ask now and then whether to stop; it closes when it is told to."""

    def __init__(self, wire: _Wire, should_stop: Callable[[], bool], silence_s: float) -> None:
        wire.settimeout(POLL_S)
        self._wire = wire
        self._reader = _PatientReader(wire, should_stop, silence_s)

    def sendall(self, data: bytes) -> None:
        self._wire.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """For reading, the only ``mode`` that an HTTP answer asks for."""
        del mode
        return io.BufferedReader(self._reader)

    def close(self) -> None:
        """The connection object lets go; the answer may still be read."""

    def shut(self) -> None:
        self._wire.close()


class _PatientReader(io.RawIOBase):
    def __init__(self, wire: _Wire, should_stop: Callable[[], bool], silence_s: float) -> None:
        super().__init__()
        self._wire = wire
        self._should_stop = should_stop
        self._silence_s = silence_s

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]  # only ever a view
        """Raises ``TimeoutError`` after so much silence, ``Stopped`` when asked to."""
        until = time.monotonic() + self._silence_s
        while True:
            if self._should_stop():
                raise Stopped
            try:
                return self._wire.recv_into(into)
            except TimeoutError:
                if time.monotonic() > until:
                    raise TimeoutError(f"silent for {self._silence_s:.0f} s") from None
