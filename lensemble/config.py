"""Configuration files: TOML into a pydantic model, with errors a person can act on.

A relative path in a file is relative to that file.  ``commented`` writes a file that lists every
key at its default, so that the shipped examples cannot drift from the models.
"""

import difflib
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from lensemble.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
MAX_REPORTED_PROBLEMS = 10
MAX_SHOWN_VALUE = 60
LINE_COLUMNS = 98

Model = TypeVar("Model", bound=BaseModel)


class Section(BaseModel):
    """A table of a configuration file: unknown keys refused, no silent conversions, frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def _beside_the_file(path: Path, info: ValidationInfo) -> Path:
    base: Path | None = (info.context or {}).get("base")
    return path if base is None else base / path.expanduser()


def _empty_is_none(value: object) -> object:
    return None if value == "" else value


ConfigPath = Annotated[Path, Strict(False), AfterValidator(_beside_the_file)]
"""A path; relative to the directory of the file that names it."""

OptionalPath = Annotated[ConfigPath | None, BeforeValidator(_empty_is_none)]
"""A path, or the empty string for none."""

Names = Annotated[tuple[str, ...], Strict(False)]
"""A list of strings."""


def load(path: Path, model: type[Model]) -> Model:
    """Read ``path`` as TOML and validate it as ``model``.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or breaks the model; the message names
            the file, the line where it can be told, the key path, the value and what is right.
    """
    text = _read(path)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not TOML: {error}", "Correct that line; strings need quotes."
        ) from error
    return validate(tree, model, path=path, text=text)


def validate(tree: dict[str, Any], model: type[Model], *, path: Path, text: str = "") -> Model:
    """Validate an already parsed ``tree``; ``path`` and ``text`` are for paths and for errors.

    Raises:
        ConfigError: as ``load``.
    """
    try:
        return model.model_validate(
            _with_every_table(tree, model), context={"base": path.absolute().parent}
        )
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [_explain(problem, tree, model, text) for problem in problems]
        raise ConfigError(_headline(path, lines)) from error


def with_settings(tree: Mapping[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """``tree`` with each of ``words`` on top, such as ``rounds.min_participants=2``.

    The value is TOML; text that is none stands for itself.

    Raises:
        ConfigError: a word that names no key.
    """
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key.strip()):
            raise ConfigError(
                f"{word!r} sets nothing", "Write it as TABLE.KEY=VALUE, such as name=lab."
            )
        try:
            given = tomllib.loads(f"{key} = {value}")
        except tomllib.TOMLDecodeError:
            given = tomllib.loads(f"{key} = {json.dumps(value)}")
        tree = _merged(tree, given)
    return dict(tree)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(below[name], above[name])
        for name in below.keys() & above.keys()
        if isinstance(below[name], dict) and isinstance(above[name], dict)
    }
    return {**below, **above, **both}


def differing(before: object, after: object) -> tuple[str, ...]:
    """The keys at which two configurations of one model differ, such as ``log.level``, sorted."""
    found: list[str] = []
    if not isinstance(before, BaseModel):
        raise TypeError(before)
    for name in type(before).model_fields:
        one, other = getattr(before, name), getattr(after, name)
        if isinstance(one, BaseModel) and type(one) is type(other):
            found += [f"{name}.{key}" for key in differing(one, other)]
        elif one != other:
            found.append(name)
    return tuple(sorted(found))


def commented(model: type[BaseModel], title: str, given: Mapping[str, Any] | None = None) -> str:
    """TOML text that lists every key of ``model`` at its default, each commented out.

    Keys in ``given`` (nested as the tables are) are written uncommented with the value given.
    """
    out = [_wrapped(title)]
    given = given or {}
    fields = model.model_fields
    for name, field in fields.items():
        if _written_as(field) is None:
            out += _entry(name, field, given)
    out.append("")
    for name, field in fields.items():
        table = _written_as(field)
        if table is None:
            continue
        own = table.__annotations__  # before what it inherits
        out.append(f"[{name}]")
        if table.__doc__:
            out.append(_wrapped(" ".join(table.__doc__.replace("``", "`").split())))
        for key, inner in sorted(table.model_fields.items(), key=lambda pair: pair[0] not in own):
            out += _entry(key, inner, {**_choice(field), **given.get(name, {})})
        out.append("")
    return "\n".join(out).rstrip("\n").replace("\n\n\n", "\n\n") + "\n"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error.strerror}",
            "Give the path of a readable TOML file; `lensemblectl init` writes one.",
        ) from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_CONFIG_BYTES} bytes",
            "A configuration is a small TOML file; check that the path is the right one.",
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}, line {line}: byte {raw[error.start]:#04x} is not UTF-8",
            "Save the file as UTF-8 text.",
        ) from error


def _with_every_table(tree: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """``tree`` with an empty table for each absent one, so that defaults see the context."""
    full = dict(tree)
    for name, field in model.model_fields.items():
        table = _table_of(field)
        if table is None:
            continue
        inner = full.get(name, {})
        full[name] = _with_every_table(inner, table) if isinstance(inner, dict) else inner
    return full


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _written_as(field: FieldInfo) -> type[BaseModel] | None:
    """The table to write out: where several are possible, that of the default."""
    default = field.get_default(call_default_factory=True)
    return _table_of(field) or (type(default) if isinstance(default, BaseModel) else None)


def _choice(field: FieldInfo) -> dict[str, Any]:
    """The key that says which of several tables this is: it cannot be left to its default."""
    if not isinstance(field.discriminator, str):
        return {}
    default = field.get_default(call_default_factory=True)
    return {field.discriminator: getattr(default, field.discriminator)}


# ---- what went wrong ----


def _headline(path: Path, lines: list[str]) -> str:
    if len(lines) == 1:
        separator = ", " if lines[0].startswith("line ") else ": "
        return f"{path}{separator}{lines[0]}"
    shown = lines[:MAX_REPORTED_PROBLEMS]
    hidden = len(lines) - len(shown)
    rest = [f"and {hidden} more"] if hidden else []
    return "\n  ".join([f"{path} has {len(lines)} problems:", *shown, *rest])


def _explain(problem: ErrorDetails, tree: dict[str, Any], model: type[BaseModel], text: str) -> str:
    keys = _key_path(problem["loc"], tree)
    line = line_of(text, keys)
    where = ".".join(keys) or "the file"
    prefix = f"line {line}: " if line else ""
    match problem["type"]:
        case "extra_forbidden":
            return f"{prefix}{where}: no such key{_nearest(keys, model)}"
        case "missing":
            return f"{prefix}{where}: this key is required"
        case "value_error":
            what = problem["msg"].removeprefix("Value error, ")
        case _:
            what = problem["msg"].replace("Input should be", "must be")
    shown = "" if isinstance(problem["input"], dict) else f" = {_shown(problem['input'])}"
    return f"{prefix}{where}{shown}: {what}{_default_of(keys, model)}"


def _key_path(loc: tuple[int | str, ...], tree: object) -> tuple[str, ...]:
    """The keys as written in the file: pydantic also names union members, which are not keys."""
    keys: list[str] = []
    here = tree
    for position, part in enumerate(loc):
        if isinstance(here, dict) and part in here:
            here = here[part]
        elif isinstance(here, list) and isinstance(part, int):
            here = here[part] if part < len(here) else None
        elif position < len(loc) - 1 or not isinstance(here, dict):
            continue
        keys.append(str(part))
    return tuple(keys)


def line_of(text: str, keys: tuple[str, ...]) -> int | None:
    """The 1-based line of ``text`` that sets ``keys``, or its table; ``None`` if not found."""
    table: tuple[str, ...] = ()
    best: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.\" -]+?)\s*\]\]?\s*(#.*)?$", line):
            table = tuple(part.strip(' "') for part in header[1].split("."))
            if table == keys[: len(table)]:
                best = number
        elif entry := re.match(r"\s*([\w.\"-]+)\s*=", line):
            full = (*table, *(part.strip('"') for part in entry[1].split(".")))
            if full == keys[: len(full)]:
                return number
    return best


def _nearest(keys: tuple[str, ...], model: type[BaseModel]) -> str:
    known = [name for kind in _models_at(model, keys[:-1]) for name in kind.model_fields]
    close = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean `{close[0]}`?"
    return f"; known here: {', '.join(sorted(set(known)))}"


def _default_of(keys: tuple[str, ...], model: type[BaseModel]) -> str:
    for kind in _models_at(model, keys[:-1]):
        field = kind.model_fields.get(keys[-1]) if keys else None
        if field is not None and not field.is_required() and _table_of(field) is None:
            return f" (default {_toml(field.get_default(call_default_factory=True))})"
    return ""


def _models_at(model: type[BaseModel], keys: tuple[str, ...]) -> list[type[BaseModel]]:
    here = [model]
    for key in keys:
        here = [
            inner
            for kind in here
            if key in kind.model_fields
            for inner in _models_in(kind.model_fields[key].annotation)
        ]
    return here


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in {typing.Union, types.UnionType, Annotated}:
        for member in typing.get_args(annotation):
            yield from _models_in(member)


def _shown(value: object) -> str:
    text = _toml(value)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}..."


# ---- writing a commented file ----


def _entry(name: str, field: FieldInfo, given: Mapping[str, Any]) -> list[str]:
    lines = ["", _wrapped(field.description)] if field.description else []
    if name in given:
        return [*lines, f"{name} = {_toml(given[name])}"]
    return [*lines, f"#{name} = {_toml(field.get_default(call_default_factory=True))}"]


def _wrapped(prose: str) -> str:
    return "\n".join(f"# {line}" for line in textwrap.wrap(prose, LINE_COLUMNS))


def _toml(value: object) -> str:
    match value:
        case None:
            return '""'
        case bool():
            return "true" if value else "false"
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False)
        case list() | tuple():
            return f"[{', '.join(_toml(part) for part in value)}]"
        case _:
            return str(value)
