"""A real HTTP server on loopback that answers ranges, and misbehaves as it is told to."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Fault = Callable[[BaseHTTPRequestHandler, int, int], bool]
"""``fault(request, begin, end)``: True if it answered in the server's stead."""


class Origin:
    """``content`` at any path; ``faults`` are used up one per request, None: behave."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.etag = '"first"'
        self.faults: list[Fault | None] = []
        self.asked: list[tuple[int, int]] = []
        self.sent = 0
        self.hold_after: int | None = None
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        first, last = request.headers["Range"].removeprefix("bytes=").split("-")
        begin, end = int(first), int(last) + 1
        self.asked.append((begin, end - begin))
        fault = self.faults.pop(0) if self.faults else None
        if fault is None or not fault(request, begin, end):
            self.send(request, begin, end)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        begin: int,
        end: int,
        *,
        body: bytes | None = None,
        size: int | None = None,
    ) -> None:
        request.send_response(206)
        total = len(self.content) if size is None else size
        request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{total}")
        request.send_header("Content-Length", str(end - begin))
        if self.etag:
            request.send_header("ETag", self.etag)
        request.end_headers()
        body = self.content[begin:end] if body is None else body
        for at in range(0, len(body), 1 << 16):
            if self.hold_after is not None and self.sent >= self.hold_after:
                self.held.set()
                self.go_on.wait()
            piece = body[at : at + (1 << 16)]
            # Before it is gone: who has it may look at once.
            self.sent += len(piece)
            request.wfile.write(piece)


@contextmanager
def serving(content: bytes, tls: ssl.SSLContext | None = None) -> Iterator[Origin]:
    """Over HTTPS with ``tls``."""
    origin = Origin(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                origin.answer(self)
            except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    origin.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}/models/m.gguf?token=secret"
    try:
        yield origin
    finally:
        origin.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def status(code: int, **headers: str) -> Fault:
    def answer(request: BaseHTTPRequestHandler, _begin: int, _end: int) -> bool:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", "0")
        request.end_headers()
        return True

    return answer


def whole_file(request: BaseHTTPRequestHandler, _begin: int, _end: int) -> bool:
    request.send_response(200)
    request.send_header("Content-Length", "4")
    request.end_headers()
    request.wfile.write(b"GGUF")
    return True
