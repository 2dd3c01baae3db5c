"""How answers look to clients of the OpenAI API."""

import secrets
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio

from lensemble_coord.http.refusal import Refused
from lensemble_coord.inference import sequence
from lensemble_coord.inference.model_run import ModelRun

DONE = b"data: [DONE]\n\n"
Tree = dict[str, Any]


def now() -> int:
    """Seconds since the epoch."""
    return int(datetime.now(tz=UTC).timestamp())


def event(tree: Tree) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(tree) + b"\n\n"


def failure(refused: Refused) -> bytes:
    """The event that ends a stream that was not finished."""
    return b"data: " + refused.body() + b"\n\n"


def model(run: ModelRun) -> Tree:
    """A model in a list of them; ``ctx`` is ours, in tokens."""
    return {
        "id": run.model.facts.name,
        "object": "model",
        "created": now() - int(trio.current_time() - run.since),
        "owned_by": "lensemble",
        "ctx": run.plan.ctx,
    }


class Shape:
    """One answer, in the shape of a chat or of a completion of text."""

    def __init__(self, run: ModelRun, *, chats: bool, include_usage: bool) -> None:
        self._chats = chats
        self._include_usage = include_usage
        self._opened = False
        self._head: Tree = {
            "id": f"{'chatcmpl' if chats else 'cmpl'}-{secrets.token_hex(12)}",
            "created": now(),
            "model": run.model.facts.name,
            "system_fingerprint": run.model.digest[:16],
        }

    def whole(self, text: str, finish: str, usage: sequence.Usage) -> Tree:
        """The answer in one piece."""
        said: Tree = {"text": text}
        if self._chats:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        kind = "chat.completion" if self._chats else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": _usage(usage)}

    def piece(self, text: str, finish: str | None = None) -> bytes:
        """More of the answer, as an event of a stream; the last one has ``finish``."""
        said: Tree = {"text": text}
        if self._chats:
            delta: Tree = {} if self._opened else {"role": "assistant", "content": ""}
            if text:
                delta["content"] = text
            said = {"delta": delta}
        self._opened = True
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._chunk([choice], None)

    def usage(self, usage: sequence.Usage) -> bytes:
        """What it took, as the event after the last piece; nothing where it was not asked for."""
        return self._chunk([], usage) if self._include_usage else b""

    def _chunk(self, choices: list[Tree], usage: sequence.Usage | None) -> bytes:
        kind = "chat.completion.chunk" if self._chats else "text_completion"
        tree: Tree = {**self._head, "object": kind, "choices": choices}
        if self._include_usage:
            tree["usage"] = None if usage is None else _usage(usage)
        return event(tree)


def _usage(usage: sequence.Usage) -> Tree:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
