"""What a daemon answers; plain facts, which ``lensemblectl`` puts into words and tables.

Seconds are counted back from now (``since_s``, ``last_seen_s``) or forward (``deadline_in_s``), so
that no two clocks have to agree.  Replies may gain fields; a client ignores what it does not know.
"""

from typing import Literal, TypeAlias

import msgspec

MAX_REPLY_BYTES = 1 << 24


class _Fact(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    pass


# ---- the protocol itself ----


class Greeting(_Fact, frozen=True, kw_only=True, tag=True):
    daemon: Literal["coordinator", "node"]
    name: str
    version: str
    ctl_version: int


class Alive(_Fact, frozen=True, kw_only=True, tag=True):
    """The answer goes on; there is nothing new to say."""


class End(_Fact, frozen=True, kw_only=True, tag=True):
    """The answer is complete."""


class Failed(_Fact, frozen=True, kw_only=True, tag=True):
    """The answer ends here, without what was asked for."""

    code: str
    message: str
    remediation: str = ""


class Done(_Fact, frozen=True, kw_only=True, tag=True):
    """It was done, or was so already; ``message`` says which, in a sentence."""

    message: str


# ---- parts of a status ----


class RoundStatus(_Fact, frozen=True, kw_only=True):
    """Where the round in flight is, or what the coordinator waits for between rounds."""

    index: int
    attempt: int
    """Counts from 0: the attempts of this round before it."""
    state: str
    """A ``RoundState``: open, collecting, aggregating, aligning, committing, closed, aborted."""
    reason: str
    """Why it is not further, as a sentence: "waiting for 1 more participant (have 1, quorum 2)"."""
    since_s: float
    deadline_in_s: float | None = None
    """Until the timer of this state expires; ``None`` if it has none."""
    waiting_on: tuple[str, ...] = ()
    """Names of the nodes that have not yet done their part."""
    quorum: int = 0
    bound: int = 0
    arrived: int = 0


class RunStatus(_Fact, frozen=True, kw_only=True):
    """The run that goes on: ``remaining`` of ``rounds`` are not closed yet."""

    run: str
    rounds: int
    closed: int
    remaining: int
    attempts_aborted: int = 0
    elapsed_s: float = 0.0


class ParticipantStatus(_Fact, frozen=True, kw_only=True):
    name: str
    node: str
    connected: bool
    activity: str
    """What it is doing, in a word or two: idle, receiving state, training, sending update, lost."""
    step: int = 0
    steps: int = 0
    bytes: int = 0
    """Bytes of the blob on its way, of ``total_bytes``."""
    total_bytes: int = 0
    loss: float | None = None
    """Only from nodes that share it."""
    epsilon: float | None = None
    """What its releases have spent, as it reports; None where nothing is accounted."""
    state_by: Literal["", "nothing", "sum", "state"] = ""
    """How it last came to the state of a round: it held that, took the steps by their sums, or was
    sent all of it."""
    state_bytes: int = 0
    """Of states and sums, on the wire, since it joined."""
    last_seen_s: float | None = None
    rtt_ms: float | None = None
    path: str = ""
    """The address it is reached at, or "relay"."""
    epoch: int = 0
    contributions: int = 0
    refused: dict[str, int] = {}
    last_reason: str = ""
    """Why it last dropped out, was refused or left; empty if it never did."""
    drain: str = ""
    """draining, drained; empty where it is in use."""


class EdgeStatus(_Fact, frozen=True, kw_only=True):
    id: int
    peer: str
    direction: Literal["tx", "rx"]
    state: str
    bytes: int = 0
    fault: str = ""


class StageStatus(_Fact, frozen=True, kw_only=True):
    """One stage of a model on a node; layers ``first`` to ``last`` (not included) of it."""

    run: str
    run_epoch: int
    stage: int
    stages: int
    model: str
    first: int
    last: int
    phase: str
    """``waiting for room``, ``starting``, ``fetching``, ..., ``ready``, ``live``, ``ending``."""

    since_s: float
    done: int = 0
    total: int = 0
    pid: int | None = None
    bytes: int = 0
    """What it takes of the node's memory."""

    rss_bytes: int = 0
    ctx: int = 0
    sessions: int = 0
    computed: int = 0
    held: int = 0
    """Chunks that are here and not computed yet."""

    refused: int = 0
    last_step_ms: float | None = None


class HostingStatus(_Fact, frozen=True, kw_only=True):
    """What a node offers to hold of models."""

    memory_bytes: int
    taken_bytes: int
    engine: str = ""
    device: str = ""
    reason: str = ""
    """Why it hosts nothing."""

    links: tuple[str, ...] = ()
    """Nodes it has a link to."""


class StorageStatus(_Fact, frozen=True, kw_only=True):
    state_dir: str
    records: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    spool_bytes: int = 0
    free_bytes: int = 0


class LinkStatus(_Fact, frozen=True, kw_only=True):
    """A node's connection to its coordinator."""

    state: str
    """unconfigured, dialing, waiting, joined, refused."""
    reason: str = ""
    coordinator: str = ""
    name: str = ""
    addresses: tuple[str, ...] = ()
    federation: str = ""
    attempt: int = 0
    next_attempt_in_s: float | None = None
    last_seen_s: float | None = None
    rtt_ms: float | None = None
    path: str = ""
    epoch: int = 0


class NodeRoundStatus(_Fact, frozen=True, kw_only=True):
    """What a node does for the round in flight."""

    index: int
    attempt: int
    activity: str
    reason: str
    since_s: float
    step: int = 0
    steps: int = 0
    bytes: int = 0
    total_bytes: int = 0


class WorkerStatus(_Fact, frozen=True, kw_only=True):
    state: str
    """starting, ready, busy, stopped, or waiting to be started again."""
    pid: int | None = None
    reason: str = ""
    generation: int = 0
    restarts: int = 0
    rss_bytes: int = 0


class DatasetStatus(_Fact, frozen=True, kw_only=True):
    path: str
    root: str = ""
    """Merkle root, 64 hex digits; empty until the worker has read the data."""
    episodes: int = 0
    steps: int = 0
    observation_dim: int = 0
    action_dim: int = 0
    embodiment: str = ""


class PrivacyStatus(_Fact, frozen=True, kw_only=True):
    """A node's privacy budget: what its releases have spent of ``epsilon`` at ``delta``."""

    unit: str
    """"participant" or "episode": what the promise is about."""
    spent: float
    epsilon: float
    delta: float
    releases: int
    rounds_left: int
    """Further releases under the workload's noise; 0 stops the federation."""
    clip_factor: float | None = None
    """By which the last update was scaled down; 1 if it was not, None if not known."""
    clip_fraction: float | None = None
    """Of the updates made since the daemon started; None before the first."""


class DriftStatus(_Fact, frozen=True, kw_only=True):
    """How a node's last training turned the latents of the public probe.  Stays on the node.

    ``before``, ``after``: squared distance from the latents of the round's start, untouched and as
    released, in latent variances.  Degrees: of the principal angles.  ``dimension``: effective
    dimension of the latent.  ``std``: square root of its mean variance.
    """

    before: float
    after: float
    mean_degrees: float
    rms_degrees: float
    max_degrees: float
    dimension: float
    std: float
    aligned: bool
    warning: str = ""


class PublicFigures(_Fact, frozen=True, kw_only=True):
    """What a state is worth on the coordinator's public data; None is not known or not finite.

    Errors are over those of predicting no change: of the latent after one step, of the observed
    state after five.  Drift is against the state before, as in ``DriftStatus``.
    """

    finite: bool
    std: float | None = None
    probe_r2: float | None = None
    latent_error: float | None = None
    state_error: float | None = None
    dimension: float | None = None
    drift_before: float | None = None
    drift_after: float | None = None
    mean_degrees: float | None = None
    rms_degrees: float | None = None
    max_degrees: float | None = None
    warning: str = ""


class RoundSummary(_Fact, frozen=True, kw_only=True):
    """One round that closed."""

    index: int
    attempt: int
    contributors: tuple[str, ...]
    digest: str
    seconds: float | None = None
    closed_unix_s: float | None = None
    update_norm: float | None = None
    loss: float | None = None
    by_sum: int = 0
    """Contributors that came to its prior state by sums, and so verified the commits before it."""
    bytes_saved: int = 0
    """By that, against sending them the parameters."""
    alerts: tuple[str, ...] = ()


# ---- answers ----


class CoordinatorStatus(_Fact, frozen=True, kw_only=True, tag=True):
    name: str
    node: str
    version: str
    addresses: tuple[str, ...]
    uptime_s: float
    federation: str
    workload: str
    config_hash: str
    digest: str
    aggregation: str
    """In words: "plain: the coordinator sees each update"."""
    field: str = ""
    """Width of the words of the updates of this round, in words."""
    round: RoundStatus
    run: RunStatus | None = None
    last_round: RoundSummary | None = None
    participants: tuple[ParticipantStatus, ...] = ()
    edges: tuple[EdgeStatus, ...] = ()
    refused: dict[str, int] = {}
    """Refused input by reason: unknown peers, malformed messages, ctl lines, log records."""
    storage: StorageStatus | None = None
    leased_bytes: int = 0
    """Of the arena, by the edges there are."""
    rss_bytes: int = 0
    alerts: tuple[str, ...] = ()
    surfaces: dict[str, str] = {}
    """Where HTTP is served: the address of ``http`` and of ``metrics``."""


class NodeStatus(_Fact, frozen=True, kw_only=True, tag=True):
    name: str
    node: str
    version: str
    addresses: tuple[str, ...]
    uptime_s: float
    state_dir: str
    link: LinkStatus
    round: NodeRoundStatus | None = None
    worker: WorkerStatus | None = None
    dataset: DatasetStatus | None = None
    config_hash: str = ""
    digest: str = ""
    state_by: Literal["", "nothing", "sum", "state"] = ""
    """How it came to the state it last trained from: by ``sum``, it has taken the outer step itself
    and found the coordinator's digests right."""
    contributions: int = 0
    last_contribution: int | None = None
    """Index of the last round this node contributed to."""
    shares_norms: bool = False
    privacy: PrivacyStatus | None = None
    """Where the workload asks for noise."""
    field_use: float | None = None
    """Of the last update: its largest coordinate over the most the field has room for."""
    drift: DriftStatus | None = None
    """Where the workload names a probe."""
    edges: tuple[EdgeStatus, ...] = ()
    leased_bytes: int = 0
    """Of the arena, by the edges there are."""
    hosting: HostingStatus | None = None
    stages: tuple[StageStatus, ...] = ()
    refused: dict[str, int] = {}
    rss_bytes: int = 0
    alerts: tuple[str, ...] = ()


class RunStarted(_Fact, frozen=True, kw_only=True, tag=True):
    """A run goes on; with ``already`` it had been started before."""

    run: str
    rounds: int
    first_round: int
    already: bool = False
    warnings: tuple[str, ...] = ()


class RoundClosed(_Fact, frozen=True, kw_only=True, tag=True):
    round: RoundSummary


class RoundAborted(_Fact, frozen=True, kw_only=True, tag=True):
    """An attempt failed; ``next`` says what follows."""

    index: int
    attempt: int
    code: str
    reason: str
    next: str


class RunEnded(_Fact, frozen=True, kw_only=True, tag=True):
    """``completed`` only if every round of the run closed."""

    run: str
    rounds: int
    closed: int
    completed: bool
    digest: str
    seconds: float
    code: str = ""
    reason: str = ""
    remediation: str = ""


class RoundList(_Fact, frozen=True, kw_only=True, tag=True):
    """Newest last."""

    rounds: tuple[RoundSummary, ...]


class Contributor(_Fact, frozen=True, kw_only=True):
    name: str
    node: str
    dataset_root: str
    update_digest: str = ""


class RoundDetail(_Fact, frozen=True, kw_only=True, tag=True):
    """One record of the ledger."""

    round: RoundSummary
    prior_digest: str
    momentum_digest: str
    field_sum_digest: str
    config_hash: str
    record_hash: str
    previous_record_hash: str
    contributors: tuple[Contributor, ...]
    dropped: dict[str, str] = {}
    """Name of each participant that was left out, and why."""
    seconds_by_state: dict[str, float] = {}
    public: PublicFigures | None = None
    """Where the coordinator tests states on public data."""


class MemberStatus(_Fact, frozen=True, kw_only=True):
    """A member of the federation as the daemon that answers sees it."""

    name: str
    node: str
    state: str
    """alive, suspect, dead or left."""
    since_s: float
    incarnation: int
    rtt_ms: float | None = None
    """Of probes and their answers, smoothed; by way of the coordinator if ``path`` is relayed."""
    path: str = ""
    """direct, relayed (by the coordinator), or none."""
    heard_s: float | None = None
    """Since something last came from itself."""
    flaps: int = 0
    """Times that it was suspected or dead, and then alive in the same life."""
    reason: str = ""
    """Of the last change."""
    coordinator: bool = False
    drain: str = ""
    """draining, drained; only the coordinator tells."""


class MemberList(_Fact, frozen=True, kw_only=True, tag=True):
    """Who lives, in the eyes of the daemon that answers.

    ``health`` 0 is well; a member that misses answers doubts itself first, up to 8.
    """

    name: str
    """Of the one that answers, and ``node`` its identity."""
    node: str = ""
    profile: str = ""
    """Empty of a node that has joined no federation yet."""
    interval_s: float = 0.0
    incarnation: int = 0
    health: int = 0
    members: tuple[MemberStatus, ...] = ()
    refused: dict[str, int] = {}


class Invited(_Fact, frozen=True, kw_only=True, tag=True):
    ticket: str
    uses: int
    expires_in_s: float
    warnings: tuple[str, ...] = ()


class CheckpointEntry(_Fact, frozen=True, kw_only=True):
    round: int
    """The round that made it; -1 is the warm start."""
    digest: str
    bytes: int
    path: str
    verifiable: bool = False
    """Whether its outer step can still be recomputed."""


class CheckpointList(_Fact, frozen=True, kw_only=True, tag=True):
    checkpoints: tuple[CheckpointEntry, ...]


class CheckpointLocation(_Fact, frozen=True, kw_only=True, tag=True):
    checkpoint: CheckpointEntry


class EventRow(_Fact, frozen=True, kw_only=True, tag=True):
    sequence: int
    unix_s: float
    event: str
    fields: dict[str, str | int | float | bool | None] = {}


class Joined(_Fact, frozen=True, kw_only=True, tag=True):
    """This node belongs to ``coordinator`` and dials it; ``status`` says how that goes."""

    coordinator: str
    addresses: tuple[str, ...]
    federation: str
    warnings: tuple[str, ...] = ()


# ---- models over several nodes ----


class PlannedStage(_Fact, frozen=True, kw_only=True):
    """Layers ``first`` to ``last`` (not included) and the bytes they would take."""

    node: str
    name: str
    first: int
    last: int
    weights_bytes: int
    cache_bytes: int
    planned_bytes: int
    required_bytes: int
    """With headroom."""
    have_bytes: int


class UnusedNode(_Fact, frozen=True, kw_only=True):
    node: str
    name: str
    reason: str


class PlannedHop(_Fact, frozen=True, kw_only=True):
    """A link that every token takes; ``before`` or ``after`` is empty where it is the coordinator.

    Ages are in seconds; None where nothing is known and something is assumed.
    """

    before: str
    after: str
    rtt_ms: float | None = None
    """None if nobody has measured it; 1 ms is assumed then."""
    rtt_age_s: float | None = None
    mbit_s: float = 1000.0
    rate: str = "assumed"
    """How it is known: measured by a burst; seen, at least, when weights went that way; assumed."""
    rate_age_s: float | None = None


class ModelPlan(_Fact, frozen=True, kw_only=True, tag=True):
    model: str
    architecture: str
    layers: int
    file_bytes: int
    engine: str
    ctx: int
    sessions: int
    rows: int
    stages: tuple[PlannedStage, ...]
    unused: tuple[UnusedNode, ...] = ()
    link_ms: float = 0.0
    """Predicted time on links for one token."""
    chunk_ms: float = 0.0
    """The same for ``rows`` tokens of a prompt."""
    unmeasured: tuple[str, ...] = ()
    """Links that were to be measured and were not, and why."""
    hops: tuple[PlannedHop, ...] = ()
    exhaustive: bool = True


class RunStage(_Fact, frozen=True, kw_only=True):
    """One stage of a run, as its coordinator knows it."""

    index: int
    node: str
    name: str
    first: int
    last: int
    phase: str
    """asked, fetching, verifying, loading, compiling, ready, opening, opened."""
    done: int = 0
    total: int = 0
    """Bytes while fetching, verifying and loading; steps while compiling."""
    planned_bytes: int = 0
    weights_bytes: int = 0
    resident_bytes: int = 0
    """Measured, of the whole worker; 0 until it is ready."""
    fetched_bytes: int = 0
    seconds: float = 0.0
    chunks: int = 0
    held: int = 0
    compute_ms: float | None = None
    """Median of its latest one-token chunks."""


class FaultStatus(_Fact, frozen=True, kw_only=True):
    """Why a run ended; ``stage`` and ``node`` where it is theirs, with their last words."""

    code: str
    reason: str
    stage: int | None = None
    node: str = ""
    name: str = ""
    remediation: str = ""
    stderr: tuple[str, ...] = ()


class SessionStatus(_Fact, frozen=True, kw_only=True):
    slot: int | None
    """None while it waits for one."""
    phase: str
    prompt_tokens: int
    tokens: int
    elapsed_s: float


class Replacement(_Fact, frozen=True, kw_only=True):
    """A plan of a run that another one took over from; seconds count from its loss."""

    run_epoch: int
    """Of the plan that was left."""
    reason: str
    fault: FaultStatus | None = None
    """None where one of its nodes was drained."""
    dropped: str = ""
    """The node that is left out since; empty where none was to blame."""
    dropped_name: str = ""
    teardown: str = ""
    """clean, faulted, timed out; empty until its stages are gone."""
    complaints: tuple[str, ...] = ()
    cleared_s: float | None = None
    """Until its stages held nothing any more."""
    planned_s: float | None = None
    ready_s: float | None = None
    """Until the next plan went on with the answers; None before."""


class ModelRunStatus(_Fact, frozen=True, kw_only=True, tag=True):
    run: str
    run_epoch: int
    model: str
    digest: str
    architecture: str
    engine: str
    state: str
    """planned, provisioning, opening, probing, provisioned, running, replacing, draining, faulted,
    tearing down, torn down, waiting for nodes."""
    takes_requests: bool
    layers: int
    ctx: int
    sessions: int
    rows: int
    stages: tuple[RunStage, ...]
    requests: tuple[SessionStatus, ...] = ()
    finished: dict[str, int] = {}
    """Requests that ended, by how: stop, length, cancelled, faulted."""
    tokens: int = 0
    tokens_per_s: float | None = None
    """Of the latest tokens."""
    hops: tuple[PlannedHop, ...] = ()
    """What is known of its links at the moment."""
    trip_ms: float | None = None
    """Median of one token's way round the ring."""
    hop_ms: float | None = None
    """Median of what a hop costs beside computing; None until stages have told."""
    late_results: int = 0
    since_s: float = 0.0
    """Since it was planned; of a run that is over, how long it lasted."""
    outcome: str = ""
    """completed, faulted, stopped; empty while it goes on."""
    reason: str = ""
    fault: FaultStatus | None = None
    teardown: str = ""
    """clean, faulted, timed out; empty until it is over."""
    complaints: tuple[str, ...] = ()
    on_fault: str = "fail"
    """What the loss of a stage does: fail, replace."""
    replacements: tuple[Replacement, ...] = ()
    """The plans before this one, oldest first."""


class ModelRunList(_Fact, frozen=True, kw_only=True, tag=True):
    """Those that go on first, oldest first, then those that are over."""

    runs: tuple[ModelRunStatus, ...]


class DrainStatus(_Fact, frozen=True, kw_only=True, tag=True):
    """What is still on a node that is to be left alone."""

    node: str
    name: str
    state: str
    """draining, drained; in use after an undo."""
    runs: tuple[str, ...] = ()
    """Runs with a stage on it."""
    in_round: bool = False
    """It takes part in the round that goes on."""
    stays: tuple[str, ...] = ()
    """For each run that does not leave it, why."""


class TracedStage(_Fact, frozen=True, kw_only=True):
    """A stage of a trace; its times may be off by ``uncertain_us`` against those of others."""

    index: int
    name: str
    uncertain_us: int | None
    """Half the round trip of the question to its node; None of a stage that did not answer."""


class Trip(_Fact, frozen=True, kw_only=True):
    """A token's way round, by the coordinator's clock."""

    step: int
    session: int
    index: int
    """Of the token in its answer."""
    sent_us: int
    received_us: int


class Visit(_Fact, frozen=True, kw_only=True):
    """A chunk at a stage; what is between these four times is exact, being of one clock."""

    stage: int
    step: int
    rows: int
    landed_us: int
    began_us: int
    ended_us: int
    left_us: int
    """With the outbound edge; as ``ended_us`` where nothing left."""


class RunTrace(_Fact, frozen=True, kw_only=True, tag=True):
    """Where the latest tokens were when; microseconds since the first of them was sent.

    ``visits`` are of ``trips``, and of the chunks of prompts between them.
    """

    run: str
    run_epoch: int
    model: str
    stages: tuple[TracedStage, ...]
    trips: tuple[Trip, ...]
    visits: tuple[Visit, ...]


class TokenText(_Fact, frozen=True, kw_only=True, tag=True):
    """One token; ``text`` is what may be shown after it, perhaps nothing yet."""

    token: int
    log_probability: float
    text: str


class Paused(_Fact, frozen=True, kw_only=True, tag=True):
    """The plan that computes the answer is gone; the answer goes on under the next one."""

    run: str
    reason: str
    name: str = ""
    """Of the node that is to blame, if one is."""
    planned: bool = False
    """Nothing was lost: a node of the plan is drained."""


class Answered(_Fact, frozen=True, kw_only=True, tag=True):
    """The end of an answer; ``text`` is what was still held back."""

    run: str
    text: str
    finish: str
    """stop, length, cancelled, faulted."""
    prompt_tokens: int
    completion_tokens: int
    queued_s: float
    first_token_s: float | None
    seconds: float
    tokens_per_s: float | None = None
    """After the first token."""
    fault: FaultStatus | None = None


Reply: TypeAlias = (
    Greeting
    | Alive
    | End
    | Failed
    | Done
    | CoordinatorStatus
    | NodeStatus
    | RunStarted
    | RoundClosed
    | RoundAborted
    | RunEnded
    | RoundList
    | RoundDetail
    | MemberList
    | Invited
    | CheckpointList
    | CheckpointLocation
    | EventRow
    | Joined
    | ModelPlan
    | ModelRunStatus
    | ModelRunList
    | RunTrace
    | DrainStatus
    | TokenText
    | Paused
    | Answered
)
