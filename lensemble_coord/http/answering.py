"""Carries the pieces of an answer to its client, and drops the request when the client leaves."""

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import trio

from lensemble.errors import LensembleError, OperatorError
from lensemble.web.serving import Message, Receive, Send
from lensemble_coord.http import refusal, shapes
from lensemble_coord.http.asked import MAX_BODY_BYTES, Wish
from lensemble_coord.http.choice import choose
from lensemble_coord.http.refusal import Refused, wrong
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.orchestrator import Orchestrator
from lensemble_coord.inference.request import Answer, Pause, Request, Token

BODY_TIMEOUT_S = 30.0
MAX_DRAINED_BYTES = 8 * MAX_BODY_BYTES
"""Of a body that is too long, so much is read and forgotten: its sender hears why it is refused."""

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
FINISHED = frozenset({"stop", "length"})


async def body(receive: Receive) -> bytes:
    """The whole body of a request.

    Raises:
        Refused: it is too long, or takes too long.
    """
    read, length = bytearray(), 0
    with trio.move_on_after(BODY_TIMEOUT_S):
        while length <= MAX_DRAINED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "no_body", "the client left before its body was whole")
            piece = message.get("body", b"")
            length += len(piece)
            if length <= MAX_BODY_BYTES:
                read += piece
            if not message.get("more_body", False):
                break
    if length > MAX_BODY_BYTES:
        raise Refused(413, "body_too_large", f"the body has over {MAX_BODY_BYTES} bytes")
    if message.get("more_body", False):
        raise Refused(408, "body_too_slow", f"no whole body within {BODY_TIMEOUT_S:g} s")
    return bytes(read)


async def send_whole(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes
) -> None:
    """A response in one piece."""
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send(_piece(content, more=False))


async def send_refusal(send: Send, refused: Refused) -> None:
    await send_whole(send, refused.status, refused.headers(), refused.body())


async def while_there(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do ``work`` for a client whose request is read; cancelled when the client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await work()
        nursery.cancel_scope.cancel()


async def answer(orchestrator: Orchestrator, wish: Wish, send: Send) -> None:
    """Have ``wish`` answered and send that, or why not."""
    try:
        run, request = await _begin(orchestrator, wish)
    except Refused as refused:
        await send_refusal(send, refused)
        return
    except LensembleError as error:
        await send_refusal(send, refusal.of(error))
        return
    shape = shapes.Shape(run, chats=wish.chats, include_usage=wish.include_usage)
    try:
        await _carry(run, request, (_Stream if wish.stream else _Whole)(shape, send))
    finally:
        request.cancel()


async def _begin(orchestrator: Orchestrator, wish: Wish) -> tuple[ModelRun, Request]:
    """A run that answers for the model, and the request it took on.

    Raises:
        Refused, LensembleError: none does.
    """
    tokenizer = choose(orchestrator, wish.model).model.tokenizer
    if wish.chats and not tokenizer.chats:
        message = "the model's file has no chat template: use /v1/completions"
        raise Refused(400, "no_chat_template", message, "model")
    prompt = wish.tokens
    if not prompt:
        encode = partial(tokenizer.encode, wish.text)
        if wish.chats:
            encode = partial(tokenizer.chat, wish.messages)
        prompt = await trio.to_thread.run_sync(encode)
    run = choose(orchestrator, wish.model)
    if max(prompt, default=0) >= run.model.facts.vocabulary:
        raise wrong("prompt", f"has a token beyond the vocabulary of {run.model.facts.vocabulary}")
    if run.model.tokenizer is not tokenizer:
        raise OperatorError(f"the model {wish.model} was replaced meanwhile", "Ask again.")
    return run, run.begin(prompt, wish.sampling, wish.max_tokens, wish.stops)


class _Whole:
    """An answer in one piece."""

    def __init__(self, shape: shapes.Shape, send: Send) -> None:
        self._shape, self._send = shape, send
        self._said: list[str] = []

    async def add(self, text: str) -> None:
        self._said.append(text)

    async def wait(self) -> None:
        pass

    async def finish(self, end: Answer) -> None:
        tree = self._shape.whole("".join(self._said) + end.text, end.finish, end.usage)
        await send_whole(self._send, 200, JSON, msgspec.json.encode(tree))

    async def fail(self, refused: Refused) -> None:
        await send_refusal(self._send, refused)


class _Stream:
    """An answer as events; until its first token it may still be refused with a status."""

    def __init__(self, shape: shapes.Shape, send: Send) -> None:
        self._shape, self._send = shape, send
        self._begun = False

    async def add(self, text: str) -> None:
        if not self._begun:
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        if text or not self._begun:
            await self._send(_piece(self._shape.piece(text)))
        self._begun = True

    async def wait(self) -> None:
        """A comment, which clients pass over: the connection is alive."""
        if self._begun:
            await self._send(_piece(b": a stage is replaced; the answer goes on\n\n"))

    async def finish(self, end: Answer) -> None:
        rest = self._shape.piece(end.text) if end.text else b""
        last = self._shape.piece("", end.finish) + self._shape.usage(end.usage)
        await self._send(_piece(rest + last + shapes.DONE, more=False))

    async def fail(self, refused: Refused) -> None:
        if self._begun:
            await self._send(_piece(shapes.failure(refused), more=False))
        else:
            await send_refusal(self._send, refused)


async def _carry(run: ModelRun, request: Request, out: _Whole | _Stream) -> None:
    end: Answer | None = None
    async for piece in request.pieces:
        match piece:
            case Token(text=text):
                await out.add(text)
            case Pause():
                await out.wait()
            case Answer():
                end = piece
    if end is None or end.finish not in FINISHED:
        await out.fail(_unfinished(run, end))
    else:
        await out.finish(end)


def _piece(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def _unfinished(run: ModelRun, end: Answer | None) -> Refused:
    """Why an answer has no proper end."""
    fault = None if end is None else end.fault
    if fault is None:
        return Refused(503, "run_stopped", f"run {run.run} was stopped", retry=True)
    where = ""
    if fault.stage is not None:
        where = f"stage {fault.stage} on {run.plan.stages[fault.stage].name}: "
    return Refused(503, fault.code, f"run {run.run} faulted: {where}{fault.reason}", retry=True)
