"""The node's configuration; ``configs/node.toml`` lists every key at its default."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Strict, StringConstraints, model_validator

from lensemble.config import ConfigPath, Names, OptionalPath, Section, commented
from lensemble.settings import (
    SOCKET_NAME,
    Addresses,
    Heartbeats,
    Listen,
    LogSection,
    MetricsSection,
    SocketSection,
    Title,
)
from lensemble.task import ENTRY_PATTERN

TITLE = (
    "Configuration of lensemble-node. Every key is listed at its default; uncomment what you "
    "change. Relative paths are relative to this file. `lensemble-node check FILE` tests it."
)


class CoordinatorSection(Section):
    """Whom this node joins. Left empty, `lensemblectl join TICKET` says it."""

    id: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = Field(
        "", description="Node id of the coordinator, 64 hex digits; empty: as joined by ticket."
    )
    addresses: Addresses = Field(
        (), description='Where it listens, such as ["192.0.2.7:7707", "[2001:db8::7]:7707"].'
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> "CoordinatorSection":
        if bool(self.id) != bool(self.addresses):
            raise ValueError("give both id and addresses, or neither and join by ticket")
        return self


class ListenSection(Heartbeats):
    """Where this node sends from and is reached."""

    addresses: Listen = Field(
        ("127.0.0.1:0", "[::1]:0"),
        description=(
            "Addresses to bind, at most one of each family; port 0 takes any free one. The default "
            "reaches a coordinator on this machine only. For one on another host: "
            '["0.0.0.0:0", "[::]:0"], or the address of one interface.'
        ),
    )
    advertise: Addresses = Field(
        (),
        description=(
            "Addresses where other nodes reach this one, for stages of a model; empty: those bound."
        ),
    )
    reconnect_backoff_s: float = Field(
        0.5,
        gt=0,
        le=3600,
        description="Wait before dialing the coordinator a second time; doubles from there.",
    )
    reconnect_backoff_max_s: float = Field(
        15.0, gt=0, le=86_400, description="The longest wait between two attempts to dial."
    )

    @model_validator(mode="after")
    def _backoff_is_ordered(self) -> "ListenSection":
        if self.reconnect_backoff_max_s < self.reconnect_backoff_s:
            raise ValueError(
                f"reconnect_backoff_max_s = {self.reconnect_backoff_max_s} is below "
                f"reconnect_backoff_s = {self.reconnect_backoff_s}"
            )
        return self


class DataSection(Section):
    """The private trajectories; only this node's worker reads them."""

    path: ConfigPath = Field(
        Path("data.hdf5"),
        description=(
            "An HDF5 file of episodes (robomimic, Minari, D4RL or flat columns), a directory of "
            "such files, a LeRobot data set, or a zarr group as diffusion policy writes it. "
            "`lensemblectl data inspect` says what is in it."
        ),
    )
    format: Literal["auto", "robomimic", "minari", "flat", "d4rl", "lerobot", "zarr"] = Field(
        "auto", description="How episodes are laid out; auto: found out from the content."
    )
    observation_keys: Names = Field(
        (),
        description=(
            "Observation columns, concatenated in this order; empty: every float vector, by name."
        ),
    )
    image_keys: Names = Field(
        (),
        description=(
            "Picture columns, their channels concatenated in this order, for a model of pixels; "
            "empty: the only one, where there are no state vectors beside it."
        ),
    )
    action_keys: Names = Field(
        (),
        description="Action columns, concatenated in this order; empty: `action`, or all of it.",
    )
    embodiment: Annotated[str, StringConstraints(pattern=r"^[a-z0-9._-]{0,64}$")] = Field(
        "",
        description=(
            "What kind of machine recorded the data. Where the data name several, only episodes "
            "of this one are trained on; where they name none, it is a label for status and logs."
        ),
    )
    probe: OptionalPath = Field(
        None,
        description=(
            "The federation's public probe, for workloads whose objective has an anchor; its hash "
            "must be the workload's."
        ),
    )


class TaskSection(Section):
    """Code of this node's owner that trains something else than the world model."""

    entry: Annotated[str, StringConstraints(pattern=rf"^({ENTRY_PATTERN})?$")] = Field(
        "",
        description=(
            'The class that is run for a workload of kind "custom", such as "my_package.tasks:'
            'Letters"; the workload must name the same. Empty: none, whatever a coordinator asks.'
        ),
    )
    folder: OptionalPath = Field(
        None,
        description=(
            "A directory that its module is imported from; empty: from what is installed beside "
            "this program."
        ),
    )


class WorkerSection(Section):
    """The child process that holds the tensors."""

    threads: int = Field(1, ge=1, le=1024, description="Threads of its tensor library.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description=(
            'Where it trains: "cuda" needs an accelerator, "auto" uses one if it is there. Results '
            "differ in the last bits between devices."
        ),
    )
    processes: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        1,
        description=(
            "How many processes train as one, each on its part of every batch, with an accelerator "
            'of its own where there are any; "auto": one for each accelerator. `inner.batch` of '
            "the workload must be divisible by it."
        ),
    )
    command_prefix: Names = Field(
        (),
        description=(
            "Put before the worker's command line, such as ["
            '"numactl", "--cpunodebind=0"'
            "]; a program that becomes the worker (exec) and does not start it as its child."
        ),
    )
    group_timeout_s: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description=(
            "One of several processes that lets the others wait for so long is taken for hung, and "
            "all are started again."
        ),
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        le=1 << 44,
        description="Limit of its address space in bytes, of each process; 0: no limit.",
    )
    niceness: int = Field(0, ge=0, le=19, description="Added to its scheduling priority.")
    restart_backoff_s: float = Field(
        1.0, ge=0, le=3600, description="Wait before a dead worker is started again; doubles."
    )
    restart_backoff_max_s: float = Field(
        30.0, ge=0, le=86_400, description="The longest wait between two starts."
    )

    start_timeout_s: float = Field(
        3600.0,
        gt=0,
        le=604_800,
        description="A worker that has not opened its dataset after so long is started again.",
    )

    @model_validator(mode="after")
    def _backoff_is_ordered(self) -> "WorkerSection":
        if self.restart_backoff_max_s < self.restart_backoff_s:
            raise ValueError(
                f"restart_backoff_max_s = {self.restart_backoff_max_s} is below "
                f"restart_backoff_s = {self.restart_backoff_s}"
            )
        return self


class ShareSection(Section):
    """What this node says about its training, beside the update itself."""

    norms: bool = Field(
        False, description="Send the loss and the norm of each update with it, in the clear."
    )
    plain: bool = Field(
        False,
        description=(
            "Whether this node sends updates that the coordinator can read one by one. If not, it "
            "takes part only where updates are masked."
        ),
    )


class EdgesSection(Section):
    """The conduits that carry model states and updates; their sizes come from the coordinator."""

    arena_bytes: int = Field(
        1 << 30,
        ge=1 << 16,
        le=1 << 40,
        description="Address space of the arena; memory is used only for leased slots, in bytes.",
    )


Sources = Annotated[
    tuple[Annotated[str, StringConstraints(pattern=r"^(/|https?://[^/]+/)")], ...], Strict(False)
]


class InferenceSection(Section):
    """Stages of models that are spread over several nodes; each has a worker process of its own."""

    enabled: bool = Field(True, description="Whether this node computes stages.")
    memory_bytes: int = Field(
        0,
        ge=0,
        le=1 << 44,
        description=(
            "Memory that all stages here may take together, in bytes; 0: what is free when this "
            "node joins, less a reserve."
        ),
    )
    device: Annotated[str, StringConstraints(pattern=r"^[A-Z0-9:_]{0,64}$")] = Field(
        "", description='Where stages are computed, such as "CPU" or "CUDA"; empty: the CPU.'
    )
    cache_dir: OptionalPath = Field(
        None, description="Where weights are kept; empty: `models` in state_dir."
    )
    cache_bytes: int = Field(
        0, ge=0, le=1 << 50, description="Most that the cache of weights may hold; 0: no limit."
    )
    sources: Sources = Field(
        (),
        description=(
            "From where a coordinator may have weights read, beside what it sends itself: "
            'directories of this host, such as "/srv/models", and URLs, such as '
            '"https://example.org/models/". Empty: from nowhere else.'
        ),
    )
    threads: int = Field(1, ge=1, le=1024, description="Threads of a stage's worker.")
    niceness: int = Field(0, ge=0, le=19, description="Added to its scheduling priority.")
    address_space_bytes: int = Field(
        0, ge=0, le=1 << 46, description="Limit of its address space in bytes; 0: no limit."
    )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """``sources``, each with a slash at its end."""
        return tuple(each.rstrip("/") + "/" for each in self.sources)


class MembershipSection(Section):
    """How this node reaches others to find out who lives; the coordinator says how often."""

    direct: bool = Field(
        True,
        description=(
            "Whether it takes calls of other nodes and calls them, at listen.addresses; if not, "
            "all it says to them goes by way of the coordinator."
        ),
    )
    direct_links: int = Field(
        32,
        ge=0,
        le=1024,
        description=(
            "Most links to other nodes beside those that stages of a model need; beyond these it "
            "goes by way of the coordinator."
        ),
    )


class NodeConfig(Section):
    name: Title = Field(
        "node", description="Shown in status and logs, here and at the coordinator."
    )
    state_dir: ConfigPath = Field(
        Path("state"),
        description="Identity key, action head and caches; one running daemon per directory.",
    )
    expected_config_hash: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = Field(
        "",
        description=(
            "Take part only in the workload with this config hash, 64 hex digits as `lensemblectl "
            "status` shows; empty: in whatever the coordinator trains."
        ),
    )
    coordinator: CoordinatorSection = CoordinatorSection()
    listen: ListenSection = ListenSection()
    data: DataSection = DataSection()
    task: TaskSection = TaskSection()
    worker: WorkerSection = WorkerSection()
    share: ShareSection = ShareSection()
    edges: EdgesSection = EdgesSection()
    inference: InferenceSection = InferenceSection()
    membership: MembershipSection = MembershipSection()
    metrics: MetricsSection = MetricsSection()
    ctl: SocketSection = SocketSection()
    log: LogSection = LogSection()

    @property
    def models_dir(self) -> Path:
        """Where weights are kept."""
        return self.inference.cache_dir or self.state_dir / "models"

    @property
    def socket_path(self) -> Path:
        return self.ctl.socket or self.state_dir / SOCKET_NAME


if __name__ == "__main__":
    sys.stdout.write(commented(NodeConfig, TITLE))
