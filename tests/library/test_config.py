"""Loading of configuration files: what is accepted, and what a person is told otherwise."""

import contextlib
import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from lensemble.config import (
    MAX_CONFIG_BYTES,
    ConfigPath,
    Names,
    OptionalPath,
    Section,
    commented,
    load,
    with_settings,
)
from lensemble.errors import ConfigError


class Inner(Section):
    """A table."""

    count: int = Field(2, ge=1, le=9, description="How many.")
    rate: float = Field(1.5, gt=0)
    mode: Literal["a", "b"] = "a"
    names: Names = ()


class Square(BaseModel, extra="forbid"):
    kind: Literal["square"] = "square"
    side: int = 1


class Circle(BaseModel, extra="forbid"):
    kind: Literal["circle"] = "circle"
    radius: int = 1


class Outer(Section):
    name: str = "x"
    home: ConfigPath = Path("state")
    start: OptionalPath = None
    inner: Inner = Inner()
    shape: Square | Circle = Field(Square(), discriminator="kind")


def write(directory: Path, text: str) -> Path:
    path = directory / "some.toml"
    path.write_text(text)
    return path


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(directory, text), Outer)
    assert caught.value.remediation
    return caught.value.message


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, 'start = "w/a"\n'), Outer)
    assert loaded.home == tmp_path / "state"
    assert loaded.start == tmp_path / "w/a"
    assert load(write(tmp_path, 'home = "/srv/x"\nstart = ""\n'), Outer).home == Path("/srv/x")


def test_a_whole_number_may_stand_for_a_float(tmp_path: Path) -> None:
    assert load(write(tmp_path, "[inner]\nrate = 3\n"), Outer).inner.rate == 3.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[inner]\ncount = 0\n", ["line 2", "inner.count = 0", "greater than or equal to 1", "2"]),
        ('\n[inner]\ncount = "3"\n', ["line 3", 'inner.count = "3"', "valid integer"]),
        ("[inner]\ncount = true\n", ["inner.count = true", "integer"]),
        ("[inner]\ncoutn = 3\n", ["line 2", "inner.coutn", "did you mean `count`?"]),
        ("[innr]\ncount = 3\n", ["line 1", "innr", "did you mean `inner`?"]),
        ("[inner]\nzzz = 3\n", ["inner.zzz", "known here: count, mode, names, rate"]),
        ('[inner]\nmode = "c"\n', ['mode = "c"', "'a' or 'b'", 'default "a"']),
        ("inner = 3\n", ["line 1", "inner = 3"]),
        ('[shape]\nkind = "circle"\nradios = 3\n', ["line 3", "shape.radios", "`radius`"]),
        ('[inner]\nnames = ["a", 3]\n', ["line 2", "inner.names.1 = 3", "string"]),
        ("inner.count = 12\n", ["line 1", "inner.count = 12"]),
    ],
)
def test_a_problem_names_line_key_value_and_what_is_right(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    message = refusal(tmp_path, text)
    assert str(tmp_path / "some.toml") in message
    for part in parts:
        assert part in message


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, 'nam = "x"\n[inner]\ncount = 0\nrate = -1\n')
    assert "has 3 problems" in message
    assert len(message.splitlines()) == 4


def test_many_problems_are_cut_short(tmp_path: Path) -> None:
    message = refusal(tmp_path, "".join(f"key{n} = 1\n" for n in range(300)))
    assert message.endswith("and 290 more")


def test_what_is_not_a_configuration_file(tmp_path: Path) -> None:
    assert "line 2" in refusal(tmp_path, "a = 1\nb = = 2\n")
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "absent.toml", Outer)
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path, Outer)
    path = tmp_path / "latin.toml"
    path.write_bytes(b'a = 1\nname = "\xe9"\n')
    with pytest.raises(ConfigError, match=re.escape("line 2: byte 0xe9 is not UTF-8")):
        load(path, Outer)
    path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load(path, Outer)


def test_commented_text_is_the_defaults(tmp_path: Path) -> None:
    text = commented(Inner, "A title.")
    assert load(write(tmp_path, text), Inner) == Inner()
    active = re.sub(r"(?m)^#(?=[a-z_]+ = )", "", text)
    assert load(write(tmp_path, active), Inner) == Inner()


def test_given_values_are_written_and_read_back(tmp_path: Path) -> None:
    text = commented(Outer, "T", {"name": 'a "b"', "inner": {"count": 5, "names": ["x", "y"]}})
    loaded = load(write(tmp_path, text), Outer)
    assert (loaded.name, loaded.inner.count, loaded.inner.names) == ('a "b"', 5, ("x", "y"))


@given(raw=st.binary(max_size=200))
def test_any_bytes_load_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(raw)
    with contextlib.suppress(ConfigError):
        load(path, Outer)


LINES = st.sampled_from(
    ["[inner]", "[shape]", "count = 3", "count = []", "name = 1", "[[inner]]", 'kind = "circle"',
     "[inner.count]", "shape = 1", "names = [[1]]", "x.y.z = 1", "[a.b]", "home = {a = 1}"]
)  # fmt: skip


@given(lines=st.lists(LINES, max_size=8))
def test_any_toml_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_text("\n".join(lines))
    with contextlib.suppress(ConfigError):
        load(path, Outer)


def test_settings_on_a_command_line_are_toml_or_stand_for_themselves() -> None:
    below = {"name": "a", "rounds": {"min_participants": 3}}
    words = ["name=lab 2", "rounds.allow_two_party=true", 'listen.addresses=["192.0.2.1:7707"]']
    assert with_settings(below, words) == {
        "name": "lab 2",
        "rounds": {"min_participants": 3, "allow_two_party": True},
        "listen": {"addresses": ["192.0.2.1:7707"]},
    }
    assert below["rounds"] == {"min_participants": 3}


@pytest.mark.parametrize("word", ["name", "=3", "a b=3", "rounds.=2"])
def test_a_setting_that_names_no_key_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(word))):
        with_settings({}, [word])
