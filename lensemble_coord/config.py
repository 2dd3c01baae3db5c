"""The coordinator's configuration; ``configs/coord.toml`` lists every key at its default."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from msgspec import structs
from pydantic import Field, Strict, model_validator

from lensemble.addresses import is_loopback
from lensemble.config import ConfigPath, Names, OptionalPath, Section, commented
from lensemble.membership.profiles import PROFILES, Profile
from lensemble.settings import (
    SOCKET_NAME,
    Address,
    Addresses,
    Heartbeats,
    Listen,
    LogSection,
    MetricsSection,
    NodeKey,
    SocketSection,
    Title,
)

TITLE = (
    "Configuration of lensemble-coord. Every key is listed at its default; uncomment what you "
    "change. Relative paths are relative to this file. `lensemble-coord check FILE` tests it."
)

DEFAULT_PORT = 7707
MIN_MASKED = 3


class ListenSection(Heartbeats):
    """Where nodes reach this coordinator, over QUIC."""

    addresses: Listen = Field(
        (f"127.0.0.1:{DEFAULT_PORT}", f"[::1]:{DEFAULT_PORT}"),
        description=(
            "Addresses to bind, at most one of each family; nothing else is bound. The default "
            f'serves this machine only. For other hosts: ["0.0.0.0:{DEFAULT_PORT}", '
            f'"[::]:{DEFAULT_PORT}"], or the address of one interface.'
        ),
    )

    advertise: Addresses = Field(
        (),
        description=(
            "Addresses that invites name, such as the public one of this host; empty: those bound."
        ),
    )


class AdmissionSection(Section):
    """Which nodes may join. Everyone else is refused and counted."""

    allow: Annotated[tuple[NodeKey, ...], Strict(False)] = Field(
        (),
        description=(
            "Node ids that may join without an invite: 64 hex digits each, printed by "
            "`lensemblectl init node`."
        ),
    )
    invites: bool = Field(
        True, description="Whether a ticket from `lensemblectl invite` admits a new node."
    )


class RoundsSection(Section):
    """When a round opens, closes, aborts and is tried again."""

    min_participants: int = Field(
        3, ge=1, le=4096, description="A round needs at least this many participants."
    )
    secure_agg_threshold: int = Field(
        0,
        ge=0,
        le=4096,
        description=(
            "The quorum is the larger of min_participants and this, and a masked sum is revealed "
            "only with so many answers, always with more than half; 0 asks for nothing more."
        ),
    )
    max_participants: int = Field(
        64, ge=1, le=4096, description="Nodes beyond this many are refused."
    )
    open_timeout_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="An open round that has no quorum after this many seconds is aborted.",
    )
    open_grace_s: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="Once the quorum is bound, wait this long for others that are joining.",
    )
    collect_timeout_s: float = Field(
        600.0,
        gt=0,
        le=604_800,
        description=(
            "A participant that makes no progress for this many seconds while updates are "
            "collected is left out, if the others are a quorum; one that is slow and moves is "
            "waited for, at most 144 times as long."
        ),
    )
    collect_max_s: float = Field(
        0.0,
        ge=0,
        le=31_536_000,
        description=(
            "Collect for at most this many seconds, whoever still moves; 0 sets no such limit."
        ),
    )
    max_attempts: int = Field(
        5, ge=1, le=1000, description="A round that aborts is tried at most this many times."
    )
    retry_backoff_s: float = Field(
        1.0, ge=0, le=3600, description="Wait before the second attempt; doubles from there."
    )
    retry_backoff_max_s: float = Field(
        30.0, ge=0, le=86_400, description="The longest wait between two attempts."
    )
    on_commitment_mismatch: Literal["abort", "exclude"] = Field(
        "abort",
        description=(
            "An update that is not bound to its participant's dataset: abort and stop the "
            'federation, or "exclude" that update and go on with a quorum.'
        ),
    )
    aggregation: Literal["masked", "plain"] = Field(
        "masked",
        description=(
            '"masked": the coordinator learns the sum of the updates and who contributed, nothing '
            'about one update. "plain": it sees each one; for research, and every status says so.'
        ),
    )
    allow_two_party: bool = Field(
        False,
        description=(
            "Whether a masked round may have fewer than three contributors, who could each tell "
            "the other's update from the sum."
        ),
    )
    share_timeout_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Masked: wait this long for the participants' encrypted mask shares.",
    )
    unmask_timeout_s: float = Field(
        15.0,
        gt=0,
        le=86_400,
        description=(
            "Masked: once a threshold has answered, wait at most this long for other survivors."
        ),
    )

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "RoundsSection":
        if self.max_participants < self.quorum:
            raise ValueError(
                f"max_participants = {self.max_participants} admits no quorum of {self.quorum}"
            )
        if self.masked and self.quorum < MIN_MASKED and not self.allow_two_party:
            raise ValueError(
                f"a masked round with {self.quorum} contributors hides nothing between the two: "
                f"give min_participants = {MIN_MASKED} or more, or accept that with "
                "allow_two_party = true"
            )
        if self.retry_backoff_max_s < self.retry_backoff_s:
            raise ValueError(
                f"retry_backoff_max_s = {self.retry_backoff_max_s} is below retry_backoff_s = "
                f"{self.retry_backoff_s}"
            )
        return self

    @property
    def masked(self) -> bool:
        """Whether updates are masked."""
        return self.aggregation == "masked"

    @property
    def quorum(self) -> int:
        """K: the fewest contributors a round closes with."""
        return max(self.min_participants, self.secure_agg_threshold)


class GateSection(Section):
    """What each new global state is tested on. Public data only; nothing of a node's own."""

    data: OptionalPath = Field(
        None,
        description=(
            "A public data set, in any format that nodes read; empty: no state is tested. The test "
            "needs torch on this machine, as a node does."
        ),
    )
    mode: Literal["alert", "reject", "off"] = Field(
        "alert",
        description=(
            '"alert": test a state once it is committed, and say what is wrong with it. "reject": '
            "test it before; one that fails is not adopted, and the round's record says so. A test "
            "that cannot be made never holds or rejects a round."
        ),
    )
    std_min: float = Field(
        0.3, ge=0, le=1e6, description="Least spread of the latent: root of its mean variance."
    )
    std_max: float = Field(2.0, gt=0, le=1e6, description="Largest spread of the latent.")
    r2_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="The linear probe's R2 is to be at least this part of the prior state's.",
    )
    latent_ratio: float = Field(
        1.2,
        ge=1,
        le=1e6,
        description=(
            "The one-step latent error, over that of predicting no change, is to be at most this "
            "many times the prior state's."
        ),
    )
    collapse_std: float = Field(
        0.1, ge=0, le=1e6, description="A spread below this together with ..."
    )
    collapse_r2: float = Field(
        0.5, ge=-1, le=1, description="... an R2 below this is a latent that has collapsed."
    )
    observation_keys: Names = Field((), description="As in a node's [data]; so are these four:")
    image_keys: Names = ()
    action_keys: Names = ()
    embodiment: str = Field("", max_length=256)
    format: str = Field("auto", max_length=32)
    timeout_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="A test that takes more seconds, or the start of its program, is given up.",
    )
    memory_bytes: int = Field(
        1 << 34,
        ge=0,
        le=1 << 44,
        description="Address space of the testing program, in bytes; 0 sets no limit.",
    )
    niceness: int = Field(10, ge=0, le=19, description="Of the testing program.")

    @model_validator(mode="after")
    def _spread_is_a_range(self) -> "GateSection":
        if self.std_max < self.std_min:
            raise ValueError(f"std_max = {self.std_max} is below std_min = {self.std_min}")
        return self

    @property
    def tests(self) -> bool:
        """Whether anything is tested."""
        return self.data is not None and self.mode != "off"


LEAST_CHUNK_BYTES = 4096
SMALL_CHUNK_BYTES, LARGE_CHUNK_BYTES = 1 << 18, 1 << 20
RINGS_BYTES = 1 << 28
"""What the rings of all nodes may take together while their chunks are large."""


class EdgesSection(Section):
    """The conduits that carry model states and updates."""

    capacity_bytes: int = Field(
        0,
        ge=0,
        le=1 << 26,
        description=(
            "The largest chunk of an edge, in bytes, at least 4096; 0: 1 MiB, or down to 256 KiB "
            "where rounds.max_participants lets many nodes in."
        ),
    )
    slots: int = Field(2, ge=1, le=64, description="Chunks that may be in flight on one edge-end.")
    arena_bytes: int = Field(
        1 << 30,
        ge=1 << 16,
        le=1 << 40,
        description="Address space of the arena; memory is used only for leased slots, in bytes.",
    )

    @model_validator(mode="after")
    def _one_edge_fits(self) -> "EdgesSection":
        if 0 < self.capacity_bytes < LEAST_CHUNK_BYTES:
            raise ValueError(
                f"capacity_bytes = {self.capacity_bytes} is neither 0 nor at least "
                f"{LEAST_CHUNK_BYTES}"
            )
        least = self.slots * (self.capacity_bytes or SMALL_CHUNK_BYTES)
        if least > self.arena_bytes:
            raise ValueError(
                f"one edge needs slots x capacity_bytes = {least} bytes, more than arena_bytes = "
                f"{self.arena_bytes}"
            )
        return self

    def chunk_bytes(self, nodes: int) -> int:
        """The capacity of each edge where up to ``nodes`` nodes have one edge each way.

        A large chunk costs fewer steps of all who pass it on, a small one less memory for a ring.
        """
        if self.capacity_bytes:
            return self.capacity_bytes
        each = min(RINGS_BYTES, self.arena_bytes) // (2 * self.slots * nodes)
        fits = 1 << (max(each, SMALL_CHUNK_BYTES).bit_length() - 1)
        return min(fits, LARGE_CHUNK_BYTES)


class MembershipSection(Section):
    """How the nodes and the coordinator find out who lives; told to every node."""

    profile: Literal["lan", "wan", "relay"] = Field(
        "wan",
        description=(
            'How patient members are: "lan" for one site (a death is known after about 7 s), "wan" '
            'across the internet (15 s), "relay" where links are bad (40 s).'
        ),
    )
    interval_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description=(
            "Seconds between two probes of one member; 0: what the profile says, and so below."
        ),
    )
    probe_timeout_s: float = Field(
        0.0, ge=0, le=3600, description="Least seconds that a probe waits for its answer."
    )
    suspicion_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="Seconds from suspect to dead when others suspect it too; else up to twice.",
    )

    @property
    def figures(self) -> Profile:
        """The profile with what is set here."""
        said = PROFILES[self.profile]
        return structs.replace(
            said,
            interval_s=self.interval_s or said.interval_s,
            probe_s=self.probe_timeout_s or said.probe_s,
            suspicion_s=self.suspicion_s or said.suspicion_s,
        )


class StorageSection(Section):
    """What is kept on disk, and what in memory."""

    spool_memory_bytes: int = Field(
        1 << 30,
        ge=0,
        le=1 << 44,
        description="Updates of the round in flight beyond this many bytes are spooled to disk.",
    )
    keep_last: int = Field(
        5, ge=1, le=1_000_000, description="Keep the checkpoints of this many latest rounds."
    )
    keep_every: int = Field(
        50, ge=0, le=1_000_000, description="Also keep every n-th round's checkpoint; 0 keeps none."
    )
    verify_keep_rounds: int = Field(
        50,
        ge=0,
        le=1_000_000,
        description=(
            "Keep what `lensemblectl verify` needs to recompute the outer step of this many "
            "latest rounds; older rounds are verified by the chain of records."
        ),
    )


class InferenceSection(Section):
    """Models that are split over nodes (`lensemblectl provision`)."""

    step_deadline_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description=(
            "A token may take this many seconds to come back. If no stage has moved in the second "
            "half of them, the run ends with the name of the stage that stands still."
        ),
    )
    stall_timeout_s: float = Field(
        180.0,
        gt=0,
        le=86_400,
        description=(
            "A stage that makes no progress for this many seconds while it fetches, loads or "
            "compiles ends the run."
        ),
    )
    teardown_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Wait this long for the stages of an ended run."
    )
    on_fault: Literal["fail", "replace"] = Field(
        "fail",
        description=(
            'What the loss of a stage does to a run that does not say: "fail" ends it; "replace" '
            "plans again without the node to blame, and its answers go on."
        ),
    )
    max_replacements: int = Field(
        3, ge=0, le=64, description="So often a lost stage of one run is replaced, then it ends."
    )
    restart_wait_s: float = Field(
        120.0,
        ge=0,
        le=86_400,
        description=(
            "After a restart of the coordinator, a run that replaces waits this many seconds for "
            "its nodes; then it takes what is there."
        ),
    )
    measure_links: bool = Field(
        False,
        description=(
            "Measure the links between the nodes of a plan before it is made for good, with a "
            "burst of 1 MiB each, as `--measure` does. Never beside a stage or in a round."
        ),
    )
    max_runs: int = Field(8, ge=1, le=1024, description="Models that are provisioned at once.")
    max_waiting: int = Field(
        64,
        ge=0,
        le=4096,
        description="Requests of one run that wait for a session; more are refused.",
    )


class HttpSection(Section):
    """Models over HTTP, for clients of the OpenAI API. Needs the extra `http` of the package."""

    enabled: bool = Field(False, description="Whether anything is served here.")
    address: Address = Field(
        "127.0.0.1:8080",
        description=(
            "Where; anything but loopback needs keys. There is no encryption: put a proxy before "
            "it for other hosts."
        ),
    )
    api_keys: Annotated[tuple[ConfigPath, ...], Strict(False)] = Field(
        (),
        description=(
            "Files of keys, one a line, that clients show as `Authorization: Bearer KEY`; not "
            "readable by everybody. Read at the start. Empty: whoever reaches the address may ask."
        ),
    )
    max_requests: int = Field(
        256, ge=1, le=4096, description="Requests that are answered, or wait, at once."
    )

    @model_validator(mode="after")
    def _keys_beyond_loopback(self) -> "HttpSection":
        if not is_loopback(self.address) and not self.api_keys:
            raise ValueError(
                f'address = "{self.address}" reaches beyond this host: name files of keys in '
                "api_keys, or take an address of loopback"
            )
        return self


class CoordinatorConfig(Section):
    name: Title = Field("coordinator", description="Shown in status and logs.")
    state_dir: ConfigPath = Field(
        Path("state"),
        description="Identity key, ledger and checkpoints; one running daemon per directory.",
    )
    workload: OptionalPath = Field(
        Path("workload.toml"),
        description=(
            "What is trained: the terms every participant shares; empty: this federation trains "
            "nothing, and its nodes need no data."
        ),
    )
    warm_start: OptionalPath = Field(
        None,
        description=(
            "A checkpoint directory or safetensors file to start round 0 from; empty: from the "
            "workload's root_seed."
        ),
    )
    listen: ListenSection = ListenSection()
    admission: AdmissionSection = AdmissionSection()
    rounds: RoundsSection = RoundsSection()
    gate: GateSection = GateSection()
    edges: EdgesSection = EdgesSection()
    inference: InferenceSection = InferenceSection()
    membership: MembershipSection = MembershipSection()
    storage: StorageSection = StorageSection()
    http: HttpSection = HttpSection()
    metrics: MetricsSection = MetricsSection()
    ctl: SocketSection = SocketSection()
    log: LogSection = LogSection()

    @property
    def chunk_bytes(self) -> int:
        """The capacity of the edges of a node: of its largest chunk."""
        return self.edges.chunk_bytes(self.rounds.max_participants)

    @property
    def trains(self) -> bool:
        """Whether rounds can be run."""
        return self.workload is not None

    @property
    def socket_path(self) -> Path:
        return self.ctl.socket or self.state_dir / SOCKET_NAME


if __name__ == "__main__":
    sys.stdout.write(commented(CoordinatorConfig, TITLE))
