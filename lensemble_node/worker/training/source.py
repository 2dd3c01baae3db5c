"""Where a node's data is, and what code of its own reads it, as its configuration says it."""

from dataclasses import dataclass
from pathlib import Path

from lensemble.workload import CustomTask, NoopTask, Workload
from lensemble_node import signals


@dataclass(frozen=True)
class DataSource:
    """Trajectories in a file or a directory, and what to take from them.

    ``observation_keys``: state columns, concatenated in this order; none given, every float vector
    among the observations, keys sorted.  ``image_keys``: image columns, their channels concatenated
    in this order; none given, the only one there is, where no state columns are beside it.
    ``action_keys``: action columns; none given, ``action`` or every ``action.KEY``, sorted.
    ``embodiment``: which one, where the data name them.  ``format``: a layout, or ``auto``.
    """

    path: Path
    observation_keys: tuple[str, ...] = ()
    embodiment: str = ""
    image_keys: tuple[str, ...] = ()
    action_keys: tuple[str, ...] = ()
    format: str = "auto"


@dataclass(frozen=True)
class TaskCode:
    """The only task whose code this node runs, ``module:Class``, and the data it is given.

    ``folder``: where the module is, if it is not installed.
    """

    entry: str
    data: Path
    folder: Path | None = None


def source_of(configure: signals.Configure, workload: Workload) -> DataSource | TaskCode | None:
    """What ``workload`` is trained on, as the daemon says it; None where nothing is named."""
    if isinstance(workload.task, CustomTask):
        folder = Path(configure.task_folder) if configure.task_folder else None
        return TaskCode(configure.task_entry, Path(configure.path), folder)
    if isinstance(workload.task, NoopTask) or not configure.path:
        return None
    return DataSource(
        path=Path(configure.path),
        observation_keys=configure.observation_keys,
        embodiment=configure.embodiment,
        image_keys=configure.image_keys,
        action_keys=configure.action_keys,
        format=configure.format,
    )
