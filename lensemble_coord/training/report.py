"""What a verification found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec

from lensemble.errors import LensembleError

MAX_PROBLEMS = 1000

Progress: TypeAlias = Callable[[str, int, int], None]
"""Told what is being checked, how much of it is done and how much there is."""


class Problem(msgspec.Struct, frozen=True):
    """``where`` is relative to the state directory; ``round`` is set where it belongs to one."""

    where: str
    what: str
    round: int | None = None


class Report(msgspec.Struct):
    """What was checked, how much of it, and what is wrong; ``recomputed`` counts outer steps."""

    directory: str
    federation: str = ""
    newest_round: int | None = None
    records: int = 0
    signatures: int = 0
    manifests: int = 0
    checkpoints: int = 0
    sums: int = 0
    recomputed: int = 0
    problems: list[Problem] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems

    def problem(self, where: str, what: str, round_index: int | None = None) -> None:
        """Add a problem; beyond ``MAX_PROBLEMS`` they are no longer listed."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(where, what, round_index))

    @contextmanager
    def noting(self, where: str, round_index: int | None = None) -> Iterator[None]:
        """Turn an error of the block into a problem."""
        try:
            yield
        except LensembleError as error:
            self.problem(where, error.message, round_index)
