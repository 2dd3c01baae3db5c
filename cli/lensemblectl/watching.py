"""A bar for work that takes long, where somebody looks at a terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Of episodes, on standard error; nothing is drawn before there is something to tell."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden or not sys.stderr.isatty()
        self._progress = Progress(
            TextColumn("reading episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=self._hidden,
        )
        self._bar = self._progress.add_task("", visible=False)

    def at(self, done: int, total: int) -> None:
        self._progress.update(self._bar, completed=done, total=total, visible=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
