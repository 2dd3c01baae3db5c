"""Logging: one JSON line per event, or a coloured one on a terminal; nothing private in either.

A record is an event name and named values.  ``Redactor`` lets pass what an operator needs (numbers,
short text, digests, shapes) and refuses what may be payload: tensors, arrays, bytes, lists of
floats, secrets.  A refused record is counted, and a record that says so takes its place.
"""

import math
import re
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import PurePath
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from lensemble.errors import ResidencyViolation

MAX_TEXT = 400
MAX_KEYS = 32
MAX_SEQUENCE = 64
MAX_FRAMES = 20
MAX_INTEGER = 1 << 64

EVENT = re.compile(r"[a-z][a-z0-9_ .:-]{0,79}")
KEY = re.compile(r"[a-z_][a-z0-9_]{0,39}")
SECRET_KEYS = frozenset({"key", "password", "private_key", "secret", "seed", "ticket", "token"})
SECRET_TEXT = re.compile(r"lensemble[0-9]+:")

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

Fields = MutableMapping[str, Any]
Scalar = bool | int | float | str | None


def logger(part: str = "", **bound: Scalar) -> FilteringBoundLogger:
    """A logger that adds the ``part`` of the daemon and ``bound`` (node, round, ...) to records."""
    named = {"part": part, **bound} if part else bound
    made: FilteringBoundLogger = structlog.get_logger(**named)
    return made


def configure(
    level: Literal["debug", "info", "warning", "error"] = "info",
    style: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
) -> "Redactor":
    """Set up logging of this process to ``stream`` (standard error), once, at its start.

    Returns:
        The redactor, whose ``refused`` counts the records it held back.
    """
    target = sys.stderr if stream is None else stream
    console = style == "console" or (style == "auto" and target.isatty())
    redactor = Redactor()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            redactor,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            *_rendering(console, colors=target.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: _Sink(target),
        cache_logger_on_first_use=False,
    )
    return redactor


class Redactor:
    """A structlog processor that lets pass only what ``admit`` admits."""

    def __init__(self) -> None:
        self.refused = 0

    def __call__(self, _logger: object, method: str, fields: Fields) -> Mapping[str, Any]:
        failure = fields.pop("exc_info", None)
        try:
            kept = admit(fields)
        except ResidencyViolation as violation:
            self.refused += 1
            kept = {
                "event": "log record refused",
                "level": "error",
                "method": method,
                "reason": violation.message,
                "refused": self.refused,
            }
        if failure:
            kept["exception"] = _describe(failure)
        return kept


def admit(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same record with paths as text and long text cut.

    Raises:
        ResidencyViolation: a value that may be payload or a secret; the message names its key and
            type, never the value.
    """
    if len(fields) > MAX_KEYS:
        raise ResidencyViolation(f"a record of {len(fields)} keys, more than {MAX_KEYS}")
    event = fields.get("event")
    if not isinstance(event, str) or not EVENT.fullmatch(event):
        raise ResidencyViolation("an event that is not a short lower-case name")
    return {key: _admit_value(key, value) for key, value in fields.items()}


def _admit_value(key: str, value: object) -> object:
    if not KEY.fullmatch(key) or key in SECRET_KEYS:
        raise ResidencyViolation("a key that is not a plain name or that names a secret")
    match value:
        case None | bool() | int() | float() | str() | PurePath():
            return _admit_scalar(key, value)
        case tuple() | list():
            if len(value) > MAX_SEQUENCE:
                raise ResidencyViolation(f"{key}: a sequence of {len(value)} values")
            if any(not isinstance(part, int | str) for part in value):
                raise ResidencyViolation(f"{key}: a sequence of other than integers and text")
            return [_admit_scalar(key, part) for part in value]
        case _:
            raise ResidencyViolation(f"{key}: a value of type {type(value).__name__}")


def _admit_scalar(key: str, value: Scalar | PurePath) -> Scalar:
    match value:
        case float() if not math.isfinite(value):
            raise ResidencyViolation(f"{key}: a number that is not finite")
        case float():
            return float(value)
        case bool() | None:
            return value
        case int() if abs(value) > MAX_INTEGER:
            raise ResidencyViolation(f"{key}: an integer of {value.bit_length()} bits")
        case int():
            return int(value)
        case _:
            return _admit_text(key, str(value))


def _admit_text(key: str, text: str) -> str:
    if SECRET_TEXT.search(text):
        raise ResidencyViolation(f"{key}: text that holds a ticket")
    plain = "".join(char if char.isprintable() else " " for char in text[:MAX_TEXT])
    return plain if len(text) <= MAX_TEXT else f"{plain}..."


def _describe(failure: object) -> str:
    """Where and what, innermost last; values of variables are never in it."""
    error = failure if isinstance(failure, BaseException) else sys.exc_info()[1]
    if error is None:
        return "unknown"
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    where = [f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    message = SECRET_TEXT.sub("", str(error))[:MAX_TEXT]
    return " > ".join([*where, f"{type(error).__name__}: {message}"])


def _rendering(console: bool, *, colors: bool) -> list[Processor]:
    if console:
        return [structlog.dev.ConsoleRenderer(colors=colors, timestamp_key="time")]
    return [structlog.processors.JSONRenderer(ensure_ascii=False)]


class _Sink:
    """Writes lines to a stream whose reader may go away without taking the daemon along."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = critical = msg
