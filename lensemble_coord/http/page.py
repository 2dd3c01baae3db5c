"""The read-only page of a coordinator: the federation at a glance, in any browser of this host.

One document, one style sheet and one script, all from here; what changes comes as server-sent
events.  Nothing can be ordered by it, so that it needs no keys; it is served on loopback only.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.resources import files
from typing import Any

import msgspec
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lensemble.ctl import replies
from lensemble.web.figures import Collect
from lensemble.web.figures import text as figures_text
from lensemble.web.hosts import names_this_machine
from lensemble.web.serving import App, Receive, Scope, Send
from lensemble_coord.http.parts import Parts
from lensemble_coord.inference import run_status

MAX_ROUNDS = 300
MAX_WATCHERS = 32
MAX_RUNS = 16
MAX_PARTICIPANTS = 256
EVERY_S = 1.0
"""The longest that a page waits for a change to show; and the shortest, however much changes."""

STATIC = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
GUARDS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_json = msgspec.json.Encoder()


def app(parts: Parts, figures: Collect) -> App:
    """The page at ``/``, what it shows at ``/page/...``, and figures at ``/metrics``."""
    pages = _Pages(parts)

    async def metrics(_: Request) -> Response:
        content, kind = await figures_text(figures)
        return Response(content, media_type=kind)

    inner = Starlette(
        routes=[
            *(Route(path, partial(_static, name)) for path, name in STATIC.items()),
            Route("/page/rounds", pages.rounds),
            Route("/page/live", pages.live),
            Route("/metrics", metrics),
        ]
    )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = next((value for name, value in scope["headers"] if name == b"host"), b"")
            if not names_this_machine(host.decode("latin-1")):
                refused = Response("ask by a loopback address\n", 421, media_type="text/plain")
                await refused(scope, receive, send)
                return
        await inner(scope, receive, send)

    return guarded


async def _static(name: str, _: Request) -> Response:
    content = files("lensemble_coord.http").joinpath("static", name).read_bytes()
    kind = KINDS[name.rpartition(".")[2]]
    return Response(content, media_type=kind, headers=GUARDS)


class _Pages:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._watchers = 0

    async def rounds(self, _: Request) -> Response:
        """The latest rounds with what is known of each, oldest first."""
        observer = self._parts.observer
        listed = await trio.to_thread.run_sync(observer.rounds, MAX_ROUNDS)
        public = await trio.to_thread.run_sync(self._public, listed)
        return Response(_json.encode({"rounds": public}), media_type="application/json")

    def _public(self, listed: replies.RoundList) -> list[dict[str, Any]]:
        gate = self._parts.rounds.gate
        found = []
        for each in listed.rounds:
            verdict = gate.verdict(each.index)
            facts = msgspec.to_builtins(each)
            facts["figures"] = None if verdict is None else msgspec.to_builtins(verdict.figures)
            found.append(facts)
        return found

    async def live(self, request: Request) -> Response:
        """What goes on, as server-sent events: at once, then whenever something has changed."""
        if self._watchers >= MAX_WATCHERS:
            return JSONResponse({"error": f"{MAX_WATCHERS} pages are open"}, 503)
        return StreamingResponse(
            self._told(request), media_type="text/event-stream", headers=GUARDS
        )

    async def _told(self, _: Request) -> AsyncIterator[bytes]:
        self._watchers += 1
        said = b""
        try:
            while True:
                now = _json.encode(self._now())
                if now != said:
                    said = now
                    yield b"event: now\ndata: " + now + b"\n\n"
                else:
                    # A comment: it finds out who has left.
                    yield b":\n\n"
                await trio.sleep(EVERY_S)
        finally:
            self._watchers -= 1

    def _now(self) -> dict[str, Any]:
        status = self._parts.observer.status()
        runs = list(self._parts.orchestrator.runs.values())[:MAX_RUNS]
        few = status.participants[:MAX_PARTICIPANTS]
        return {
            "status": msgspec.structs.replace(status, participants=few, edges=()),
            "nodes": len(status.participants),
            "edges": _edges(status.edges),
            "members": self._parts.circle.listing(status.name),
            "runs": [run_status.run(each) for each in runs],
        }


def _edges(edges: tuple[replies.EdgeStatus, ...]) -> dict[str, Any]:
    """How many there are in each state, and what has passed through them."""
    count: Callable[[str], int] = [each.state for each in edges].count
    return {
        "states": {state: count(state) for state in sorted({each.state for each in edges})},
        "up_bytes": sum(each.bytes for each in edges if each.direction == "rx"),
        "down_bytes": sum(each.bytes for each in edges if each.direction == "tx"),
        "faults": sorted({f"{each.peer}: {each.fault}" for each in edges if each.fault})[:8],
    }
