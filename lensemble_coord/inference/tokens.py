"""Text to tokens and back, as the model's own file says: vocabulary, merges, chat template.

Byte-level BPE only, split beforehand as ``tokenizer.ggml.pre`` names it; anything else is refused
by name, since a wrong split gives wrong tokens and not an error.  Loading takes a good part of a
second and belongs into a thread; encoding and decoding do not.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lensemble.errors import ModelFileError, OperatorError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

MAX_TEXT_CHARS = 1 << 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_MESSAGES = 1024

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = (rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",)
_LLAMA3 = (rf"{_ANY_CASE}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_ANY_CASE}|{_WORDS}|\p{{N}}|{_REST}",)
SPLITS: dict[str, tuple[str, ...]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": (r"\p{N}", *_GPT2),
}
"""Patterns for each value of ``tokenizer.ggml.pre``, applied one after the other."""

_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama-v3", "llama3"})
_CONTROL, _USER_DEFINED = 3, 4
_MARK = "\ue000{}\ue001"


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation, as chat templates name it."""

    role: str
    content: str


class Tokenizer:
    """Of one model.

    Args:
        metadata: of its GGUF file.

    Raises:
        ModelFileError: without a vocabulary, or with one that contradicts itself.
        UnsupportedModel: another kind of tokenizer, or a way to split that is unknown here.
        OperatorError: the packages that tokenise are not installed.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._tokens: tuple[str, ...] = _texts(metadata, "tokenizer.ggml.tokens")
        self._types = _types(metadata, len(self._tokens))
        self._bos = _special(metadata, "tokenizer.ggml.bos_token_id", len(self._tokens))
        self._eos = _special(metadata, "tokenizer.ggml.eos_token_id", len(self._tokens))
        split = _split(metadata)
        self._adds_bos = bool(
            metadata.get("tokenizer.ggml.add_bos_token", split in _WHOLE_WORDS_FIRST)
        )
        self._template = str(metadata.get("tokenizer.chat_template", ""))
        self._controls = [t for t, k in zip(self._tokens, self._types, strict=True) if k == 3]
        self._encoder = self._made(_texts(metadata, "tokenizer.ggml.merges"), split)
        self._bytes_of = {character: byte for byte, character in _byte_characters().items()}

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return len(self._tokens)

    @property
    def chats(self) -> bool:
        """Whether the file has a chat template."""
        return bool(self._template)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of ``text``; names of control tokens in it stand for those tokens.

        Raises:
            OperatorError: over ``MAX_TEXT_CHARS`` characters.
        """
        return self._begun(self._encode(text))

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens of a conversation up to where the model answers.

        What a message says never becomes a control token, whatever it spells.

        Raises:
            OperatorError: no chat template, one that refuses these messages, or too much text.
        """
        if any(name in each.content for each in messages for name in self._controls):
            return self._begun(self._chat_in_pieces(messages))
        return self._begun(self._encode(self._rendered(messages)))

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes, perhaps part of a character, that ``token`` adds to a text.

        A head may have more rows than the vocabulary has tokens: what they stand for has no text.
        """
        if not 0 <= token < len(self._tokens):
            return b""
        text, kind = self._tokens[token], self._types[token]
        if kind == _CONTROL:
            return b""
        if kind == _USER_DEFINED or any(each not in self._bytes_of for each in text):
            return text.encode()
        return bytes(self._bytes_of[each] for each in text)

    # ---- how ----

    def _made(self, merges: tuple[str, ...], split: str) -> "tokenizers.Tokenizer":
        package = _tokenizers()
        ids = {token: index for index, token in enumerate(self._tokens)}
        if len(ids) != len(self._tokens):
            raise ModelFileError("the vocabulary has a token twice")
        pairs = [_pair(merge) for merge in merges]
        whole = split in _WHOLE_WORDS_FIRST
        try:
            bpe = package.models.BPE(vocab=ids, merges=pairs, ignore_merges=whole)
        except Exception as error:  # the package raises nothing more specific
            raise ModelFileError(f"the merges do not fit the vocabulary: {error}") from error
        made: tokenizers.Tokenizer = package.Tokenizer(bpe)
        pre = package.pre_tokenizers
        steps = [pre.Split(package.Regex(each), "isolated") for each in SPLITS[split]]
        bytewise = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre.Sequence([*steps, bytewise])
        made.add_special_tokens(
            [package.AddedToken(each, normalized=False) for each in self._controls]
        )
        defined = [t for t, k in zip(self._tokens, self._types, strict=True) if k == _USER_DEFINED]
        made.add_tokens([package.AddedToken(each, normalized=False) for each in defined])
        return made

    def _encode(self, text: str, *, controls: bool = True) -> list[int]:
        if len(text) > MAX_TEXT_CHARS:
            raise OperatorError(
                f"a text of {len(text)} characters; {MAX_TEXT_CHARS} are the most", "Shorten it."
            )
        self._encoder.encode_special_tokens = not controls
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _begun(self, ids: list[int]) -> tuple[int, ...]:
        if self._adds_bos and self._bos is not None and ids[:1] != [self._bos]:
            return (self._bos, *ids)
        return tuple(ids)

    def _chat_in_pieces(self, messages: Sequence[Message]) -> list[int]:
        """As ``chat``, where a message spells a control token: it is encoded by itself."""
        marks = [_MARK.format(index) for index in range(len(messages))]
        marked = [Message(e.role, mark) for e, mark in zip(messages, marks, strict=True)]
        rest, ids = self._rendered(marked), list[int]()
        for message, mark in zip(messages, marks, strict=True):
            before, found, rest = rest.partition(mark)
            ids += self._encode(before)
            if found:
                ids += self._encode(message.content, controls=False)
        return ids + self._encode(rest)

    def _rendered(self, messages: Sequence[Message]) -> str:
        if not self._template:
            raise OperatorError(
                "the model's file has no chat template", "Use `prompt --raw` with plain text."
            )
        if len(messages) > MAX_MESSAGES:
            raise OperatorError(f"{len(messages)} messages; {MAX_MESSAGES} are the most")
        return _render(
            self._template,
            [{"role": each.role, "content": each.content} for each in messages],
            self._named(self._bos),
            self._named(self._eos),
        )

    def _named(self, token: int | None) -> str:
        return "" if token is None else self._tokens[token]


class TextStream:
    """The text of an answer as its tokens come, whole characters only.

    Text that may turn out to be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(each for each in stops if each)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """What may be shown after ``token``; ``stopped`` is set where a stop string is complete."""
        self._held += self._decoder.decode(self._tokenizer.token_bytes(token))
        return self._clear()

    def flush(self) -> str:
        """What is left when no token follows."""
        if not self.stopped:
            self._held += self._decoder.decode(b"", final=True)
        shown = self._clear()
        rest, self._held = self._held, ""
        return shown + rest

    def _clear(self) -> str:
        found = [at for each in self._stops if (at := self._held.find(each)) >= 0]
        if found:
            shown, self._held, self.stopped = self._held[: min(found)], "", True
            return shown
        keep = max((_overlap(self._held, each) for each in self._stops), default=0)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _tokenizers() -> Any:  # noqa: ANN401 - a package that is not always there
    try:
        import tokenizers  # noqa: PLC0415 - only coordinators that serve models have it
    except ImportError as error:
        raise OperatorError(
            f"the package {error.name} is not installed", "pip install 'lensemble[inference]'"
        ) from error
    return tokenizers


def _render(template: str, messages: list[dict[str, str]], bos: str, eos: str) -> str:
    """``template`` over ``messages``; it is another's program and runs in a sandbox."""
    try:
        import jinja2  # noqa: PLC0415 - as tokenizers
        from jinja2 import sandbox  # noqa: PLC0415
    except ImportError as error:
        raise OperatorError(
            f"the package {error.name} is not installed", "pip install 'lensemble[inference]'"
        ) from error

    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    place = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    place.globals["raise_exception"] = refuse
    try:
        return place.from_string(template).render(
            messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=True
        )
    except (jinja2.TemplateError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise OperatorError(
            f"the model's chat template refuses these messages: {error}",
            "Use the roles system, user and assistant, in turn; or `prompt --raw`.",
        ) from error


def _split(metadata: Mapping[str, Any]) -> str:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"a tokenizer of kind {kind!r}; byte-level BPE (gpt2) is read",
            "Take a model with a BPE vocabulary, such as Llama 3, Qwen 2 or SmolLM 2.",
        )
    split = str(metadata.get("tokenizer.ggml.pre", "default"))
    if split not in SPLITS:
        raise UnsupportedModel(
            f"text is to be split as {split!r}, which is unknown here; {', '.join(SPLITS)} are",
            "Take a model with a BPE vocabulary, such as Llama 3, Qwen 2 or SmolLM 2.",
        )
    return split


def _texts(metadata: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found: object = metadata.get(key)
    if not isinstance(found, tuple | list) or {str} != set(map(type, found)):
        raise ModelFileError(f"{key} is missing, or not a list of strings")
    return tuple(map(str, found))


def _types(metadata: Mapping[str, Any], count: int) -> tuple[int, ...]:
    found = metadata.get("tokenizer.ggml.token_type", (1,) * count)
    if not isinstance(found, tuple | list) or len(found) != count:
        raise ModelFileError(f"tokenizer.ggml.token_type is not a list of {count} numbers")
    return tuple(int(each) for each in found)


def _special(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    found = metadata.get(key)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < count:
        raise ModelFileError(f"{key} is {found!r}; there are {count} tokens")
    return found


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    return table | {byte: chr(256 + index) for index, byte in enumerate(others)}
