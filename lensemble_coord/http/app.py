"""The routes, and what every request has to pass before it reaches one."""

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
import trio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lensemble.web.hosts import names_this_machine
from lensemble.web.serving import App, Message, Receive, Scope, Send
from lensemble_coord.http import answering, asked, choice, shapes
from lensemble_coord.http.keys import Keys
from lensemble_coord.http.refusal import Refused
from lensemble_coord.inference.orchestrator import Orchestrator

OPEN_PATHS = frozenset({"/health"})
Read: TypeAlias = Callable[[bytes, int], asked.Wish]
Figures: TypeAlias = Callable[[], Awaitable[tuple[bytes, str]]]
"""The figures for Prometheus and their media type."""


class Front:
    """Lets requests in: host, key, number; counts what became of them in ``answered``.

    Args:
        orchestrator: whose runs answer.
        keys: that clients have to show.
        figures: of ``/metrics``.
        max_requests: that are answered, or wait, at once.
    """

    def __init__(
        self, orchestrator: Orchestrator, keys: Keys, figures: Figures, max_requests: int
    ) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        """By path and status."""

        self.under_way = 0
        self._keys = keys
        self._max_requests = max_requests
        self._inner = _routes(orchestrator, figures)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application."""
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        self.under_way += 1
        try:
            self._check(scope)
            await self._inner(scope, receive, partial(self._counted, scope, send))
        except Refused as refused:
            await answering.send_refusal(partial(self._counted, scope, send), refused)
        finally:
            self.under_way -= 1

    async def _counted(self, scope: Scope, send: Send, message: Message) -> None:
        if message["type"] == "http.response.start":
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.answered[path, message["status"]] += 1
        await send(message)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=dict(scope))
        if scope["path"] in OPEN_PATHS:
            return
        if self._keys.asked:
            if not self._keys.admit(headers.get("authorization", "")):
                message = "no valid API key: send `Authorization: Bearer KEY`"
                raise Refused(401, "invalid_api_key", message)
        elif not names_this_machine(headers.get("host", "")):
            # A page in a browser here could have its own name lead to this machine.
            raise Refused(421, "wrong_host", "without API keys, ask by a loopback address")
        if self.under_way > self._max_requests:
            message = f"{self._max_requests} requests are under way (http.max_requests)"
            raise Refused(429, "too_many_requests", message, retry=True)


PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"})


def _routes(orchestrator: Orchestrator, figures: Figures) -> App:
    async def models(_: Request) -> Response:
        listed = [shapes.model(run) for run in choice.names(orchestrator)]
        return _json({"object": "list", "data": listed})

    async def model(request: Request) -> Response:
        name = str(request.path_params["name"])
        for run in choice.names(orchestrator):
            if run.model.facts.name == name:
                return _json(shapes.model(run))
        choice.choose(orchestrator, name)
        raise Refused(503, "model_not_ready", f"the model `{name}` is not ready", retry=True)

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(_: Request) -> Response:
        content, media_type = await figures()
        return Response(content, media_type=media_type)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", Answering(orchestrator, asked.chat), methods=["POST"]),
            Route("/v1/completions", Answering(orchestrator, asked.completion), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _no_route, Refused: _refused},
    )


class Answering:
    """An endpoint that has what ``read`` makes of its body answered."""

    def __init__(self, orchestrator: Orchestrator, read: Read) -> None:
        self._orchestrator = orchestrator
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = Headers(scope=dict(scope)).get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            # Anything else could be sent by a page in a browser without asking first.
            raise Refused(415, "not_json", "send `Content-Type: application/json`")
        raw = await answering.body(receive)
        wish = await trio.to_thread.run_sync(self._read, raw, secrets.randbits(63))
        work = partial(answering.answer, self._orchestrator, wish, send)
        await answering.while_there(receive, work)


def _json(tree: shapes.Tree) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refused):
        raise error
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    code = "method_not_allowed" if status == 405 else "not_found"
    refused = Refused(status, code, f"{request.method} {request.url.path:.100}: {code}")
    return Response(refused.body(), status, media_type="application/json")
