"""What a client asks for: read, checked, and refused by name where it is not honoured.

A field that would change the answer is honoured or refused, never passed over.  What only concerns
the service that the shapes come from (``user``, ``metadata``, ...) is accepted and means nothing.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from lensemble.stage_chunk import Sampling
from lensemble_coord.http.refusal import Refused, unsupported, wrong
from lensemble_coord.inference.tokens import Message

MAX_BODY_BYTES = 1 << 20
DEFAULT_COMPLETION_TOKENS = 16
"""Of ``/v1/completions``; a chat goes on to the end of its context."""

ALL_TOKENS = 1 << 20
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields that are not honoured, with the values that ask for nothing."""

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_Temperature = Annotated[float, Meta(ge=0, le=100)]
_Mass = Annotated[float, Meta(gt=0, le=1)]
_Penalty = Annotated[float, Meta(gt=0, le=100)]
_Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Limit = Annotated[int, Meta(ge=1, le=ALL_TOKENS)]
_TokenId = Annotated[int, Meta(ge=0, le=1 << 32)]
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both ways of asking have."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _Limit | None = None
    temperature: _Temperature | None = None
    top_p: _Mass | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    """Of this engine, not of the OpenAI API; so is ``repeat_penalty``."""

    repeat_penalty: _Penalty | None = None
    seed: _Seed | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=16)] | None = None


Shape = TypeVar("Shape", bound=_Asked)


class ChatAsked(_Asked, frozen=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: _Limit | None = None


class CompletionAsked(_Asked, frozen=True, kw_only=True):
    prompt: str | Annotated[list[str | _TokenId], Meta(min_length=1)]
    """Text, one text in a list, or token ids."""


class Wish(msgspec.Struct, frozen=True):
    """One answer that is asked for: a conversation, or text or tokens to go on with."""

    model: str
    messages: tuple[Message, ...]
    text: str
    tokens: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool

    @property
    def chats(self) -> bool:
        return bool(self.messages)


def chat(raw: bytes, seed: int) -> Wish:
    """Read the body of ``/v1/chat/completions``; ``seed`` is taken where it names none.

    Raises:
        Refused: it is not one, or asks for what there is not.
    """
    asked = _convert(raw, ChatAsked)
    both = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(both) == 2:
        raise wrong("max_tokens", "and `max_completion_tokens` differ: give one of them")
    messages = tuple(_message(each, index) for index, each in enumerate(asked.messages))
    most = asked.max_completion_tokens or asked.max_tokens or ALL_TOKENS
    return _wish(asked, seed, most, _Said(messages))


def completion(raw: bytes, seed: int) -> Wish:
    """Read the body of ``/v1/completions``; as ``chat``.

    Raises:
        Refused: as ``chat``.
    """
    asked = _convert(raw, CompletionAsked)
    prompt = asked.prompt
    most = asked.max_tokens or DEFAULT_COMPLETION_TOKENS
    if isinstance(prompt, str):
        return _wish(asked, seed, most, _Said(text=prompt))
    tokens = tuple(each for each in prompt if isinstance(each, int))
    if len(tokens) == len(prompt):
        return _wish(asked, seed, most, _Said(tokens=tokens))
    if len(prompt) > 1:
        raise unsupported("prompt", "one text, or one list of tokens, is answered at a time")
    return _wish(asked, seed, most, _Said(text=str(prompt[0])))


class _Said(msgspec.Struct, frozen=True):
    """What is to be answered, one of three."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    tokens: tuple[int, ...] = ()


def _wish(asked: _Asked, seed: int, most: int, said: _Said) -> Wish:
    options = asked.stream_options or StreamOptions()
    if asked.stream_options is not None and not asked.stream:
        raise wrong("stream_options", "is only for `stream`: true")
    stop = asked.stop or []
    return Wish(
        model=asked.model,
        messages=said.messages,
        text=said.text,
        tokens=said.tokens,
        sampling=Sampling(
            temperature=_given(asked.temperature, 1.0),
            top_p=_given(asked.top_p, 1.0),
            top_k=asked.top_k or 0,
            repeat_penalty=_given(asked.repeat_penalty, 1.0),
            seed=seed if asked.seed is None else asked.seed,
        ),
        max_tokens=most,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(asked.stream),
        include_usage=options.include_usage,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _convert(raw: bytes, shape: type[Shape]) -> Shape:
    tree = _object(raw)
    known = set(shape.__struct_fields__)
    _check_rest({key: value for key, value in tree.items() if key not in known})
    try:
        return msgspec.convert({key: tree[key] for key in tree if key in known}, shape)
    except msgspec.ValidationError as error:
        raise _of_validation(error) from error


def _object(raw: bytes) -> dict[str, Any]:
    try:
        tree = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise Refused(400, "invalid_json", "the body is not a JSON object")
    return tree


def _check_rest(rest: dict[str, Any]) -> None:
    for name, value in rest.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name not in NEUTRAL:
            raise Refused(
                400, "unknown_parameter", f"`{name[:64]}` is unknown here; leave it out", name[:64]
            )
        if not any(type(value) is type(each) and value == each for each in NEUTRAL[name]):
            if isinstance(value, float) and value in NEUTRAL[name]:
                continue
            only = " or ".join(msgspec.json.encode(each).decode() for each in NEUTRAL[name])
            raise unsupported(name, f"leave it out, or give {only}")


def _of_validation(error: msgspec.ValidationError) -> Refused:
    """The field that is wrong, from a sentence that ends with its path or names it as missing."""
    said = str(error)
    what, _, where = said.partition(" - at `$")
    if "missing required field" in what:
        name = what.rpartition("field ")[2].strip("`")
        return Refused(400, "missing_parameter", f"`{name}` is required", name)
    name = where.strip("`.") or "body"
    return wrong(name, f"cannot be: {what[:1].lower()}{what[1:]}")


def _message(tree: dict[str, Any], index: int) -> Message:
    where = f"messages[{index}]"
    role = tree.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"is {role!r:.64}; {', '.join(ROLES)} are known")
    for name, value in tree.items():
        if name not in {"role", "content"} and value not in (None, [], ""):
            raise unsupported(f"{where}.{name[:64]}", "a message has a role and content")
    return Message(ROLES[role], _content(tree.get("content"), f"{where}.content"))


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "has to be text, or a list of parts of type text")
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            raise unsupported(f"{where}[{index}]", f"of type {kind!r:.64}; only text is read")
        parts.append(text)
    return "".join(parts)
