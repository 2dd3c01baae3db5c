"""SIGKILL of the coordinator, of a node and of its worker at every named point.

``make crash-matrix`` visits all of it; the default run a sample.  A case that fails is repeated
alone with ``pytest -m "soak or not soak" tests/e2e/test_crash_matrix.py -k LABEL``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lensemble
from lensemble.crash_points import kind
from tests.e2e.crash_grounds import DEED_TERMS, TERMS, VICTIM, Grounds
from tests.e2e.crash_matrix import CASES, ELSEWHERE, SAMPLE, Case
from tests.e2e.federation import COORDINATOR, START_S, until

ROOT = Path(lensemble.__file__).resolve().parent.parent
e2e = pytest.mark.e2e


class Keeper:
    """One federation at a time, used until a case fails on it or needs another."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._held: tuple[str, Grounds] | None = None

    def visit(self, case: Case) -> None:
        key = case.deed if case.deed in DEED_TERMS else ""
        if self._held is None or self._held[0] != key:
            self.end()
            root = self._factory.mktemp("grounds")
            self._held = key, Grounds(root, DEED_TERMS.get(key, TERMS))
        (_, grounds), self._held = self._held, None
        try:
            grounds.visit(case)
        except BaseException:
            for process in grounds.members.processes():
                print(process.name, process.last_words(8), sep="\n")
            grounds.members.end()
            raise
        self._held = key, grounds

    def end(self) -> None:
        """End the federation there is, look over what is left, and what it has passed."""
        if self._held is not None:
            (_, grounds), self._held = self._held, None
            grounds.end()
            known = {case.point for case in CASES} | set(ELSEWHERE)
            assert grounds.passed() <= known, "points that the matrix does not visit"


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    made = Keeper(tmp_path_factory)
    yield made
    made.end()


def _params(*deeds: str) -> list[object]:
    # In the order of their federations, since each of those takes a while to start.
    return [
        pytest.param(case, id=case.label, marks=() if case in SAMPLE else pytest.mark.soak)
        for case in sorted(CASES, key=lambda case: case.deed if case.deed in DEED_TERMS else "")
        if case.deed in deeds
    ]


@e2e
@pytest.mark.parametrize("case", _params("round", "fetch", "abort", "leave", "return", "private"))
def test_a_process_killed_at_a_point_costs_at_most_the_attempt(keeper: Keeper, case: Case) -> None:
    keeper.visit(case)


@e2e
@pytest.mark.parametrize("case", _params("begin"))
def test_a_daemon_killed_as_it_starts_for_the_first_time_starts_again(
    tmp_path: Path, keeper: Keeper, case: Case
) -> None:
    keeper.end()
    grounds = Grounds(tmp_path, TERMS, begun=False)
    process = grounds.members[COORDINATOR if case.victim == COORDINATOR else VICTIM]
    order = process.place / "order"
    order.write_text(f"kill {case.count} {case.point}\n")
    try:
        process.begin()
        until(f"{case} is reached", lambda: not order.exists(), START_S)
        assert process.exit_status() == -9
        process.begin()
        until(f"{process.name} serves", process.serves, START_S)
        key = process.place / "state" / "identity.key"
        assert len(key.read_bytes()) == 32
        assert not list((process.place / "state").rglob(".*part*"))
        assert not list((process.place / "state").glob(".identity*")), "a key lies around"
    finally:
        grounds.end()


@e2e
@pytest.mark.parametrize("case", _params("join"))
def test_a_process_killed_while_a_node_joins_lets_it_join(
    tmp_path: Path, keeper: Keeper, case: Case
) -> None:
    keeper.end()
    grounds = Grounds(tmp_path, TERMS, begun=False)
    try:
        grounds.members.start(COORDINATOR, VICTIM)
        grounds.join_through(case)
    finally:
        grounds.end()


def _named_in_source() -> set[str]:
    """The first word of every point, wherever it stands in the packages."""
    found = set()
    for package in ("lensemble", "lensemble_coord", "lensemble_node"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reached":
                    (point, *_) = node.args
                    assert isinstance(point, ast.Constant), f"{path}:{node.lineno}: not a name"
                    found.add(str(point.value))
    return found


def test_the_matrix_visits_every_point_there_is_and_no_other() -> None:
    visited = {case.point.split()[0] for case in CASES}
    assert visited == _named_in_source()
    assert len(CASES) == len(set(CASES)) == len({case.label for case in CASES})
    assert set(CASES) >= SAMPLE


def test_a_point_is_known_by_the_kind_of_its_file() -> None:
    assert kind(Path("/state/run-0123456789abcdef.json")) == "run-*.json"
    assert kind("weights") == "weights"
