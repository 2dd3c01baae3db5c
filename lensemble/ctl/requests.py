"""What may be asked of a daemon over its control socket; every field has a limit."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

CTL_VERSION = 1
MAX_REQUEST_BYTES = 1 << 20
MAX_ROUNDS = 1_000_000
MAX_LISTED = 10_000

Label = Annotated[str, Meta(max_length=64)]
Sentence = Annotated[str, Meta(max_length=500)]
RoundCount = Annotated[int, Meta(ge=1, le=MAX_ROUNDS)]
RunLabel = Annotated[str, Meta(pattern=r"\A[0-9a-f]{0,16}\Z")]
Listed = Annotated[int, Meta(ge=1, le=MAX_LISTED)]


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    pass


class Hello(_Request, frozen=True, kw_only=True, tag=True):
    """First request of every client."""

    ctl_version: int
    version: Label
    """Release of Lensemble the client belongs to."""


class Status(_Request, frozen=True, kw_only=True, tag=True):
    """Answered by one ``CoordinatorStatus`` or ``NodeStatus``, or with ``watch`` by many."""

    watch: bool = False
    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    """Longest pause between two replies; a change is sent at once."""


class Run(_Request, frozen=True, kw_only=True, tag=True):
    """Start a run of ``rounds`` rounds; refused while another run goes on.

    Answered by ``RunStarted``; then, unless ``detach``, by ``CoordinatorStatus`` at each change and
    ``RoundClosed`` for each round, and last by ``RunEnded``.
    """

    rounds: RoundCount
    open_timeout_s: Annotated[float, Meta(gt=0, le=604_800)] | None = None
    """Instead of the configured one; the run ends when a round finds no quorum for so long."""
    detach: bool = False


class Attach(_Request, frozen=True, kw_only=True, tag=True):
    """Watch the run that goes on; answered as ``Run`` is."""


class Abort(_Request, frozen=True, kw_only=True, tag=True):
    """End the round in flight and the run; what is committed stays.  Answered by ``Done``."""

    reason: Sentence = "aborted by the operator"


class Rounds(_Request, frozen=True, kw_only=True, tag=True):
    """The latest rounds; answered by ``RoundList``."""

    limit: Listed = 20


class Round(_Request, frozen=True, kw_only=True, tag=True):
    """One committed round in full; answered by ``RoundDetail``."""

    index: Annotated[int, Meta(ge=0, le=1 << 53)]


class Invite(_Request, frozen=True, kw_only=True, tag=True):
    """Make a ticket; answered by ``Invited``."""

    uses: Annotated[int, Meta(ge=1, le=4096)] = 1
    ttl_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 86_400.0


class Checkpoints(_Request, frozen=True, kw_only=True, tag=True):
    """Answered by ``CheckpointList``."""


class CheckpointExport(_Request, frozen=True, kw_only=True, tag=True):
    """Where a checkpoint lies, for the client to copy; answered by ``CheckpointLocation``."""

    which: Label = "latest"
    """``latest``, a round index, or a digest or the beginning of one."""


class Events(_Request, frozen=True, kw_only=True, tag=True):
    """The latest recorded events, oldest first, and with ``follow`` those to come.

    Answered by an ``EventRow`` for each.
    """

    limit: Listed = 50
    follow: bool = False


class Members(_Request, frozen=True, kw_only=True, tag=True):
    """Who lives; answered by one ``MemberList``, or with ``watch`` by many."""

    watch: bool = False
    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 1.0
    """Longest pause between two replies; a change is sent at once."""


class Join(_Request, frozen=True, kw_only=True, tag=True):
    """Make this node belong to the coordinator that gave ``ticket``; answered by ``Joined``."""

    ticket: Annotated[str, Meta(max_length=2048)]


class Leave(_Request, frozen=True, kw_only=True, tag=True):
    """Make this node leave its federation and stay idle; answered by ``Done``."""

    reason: Sentence = "left by the operator"


class _OfModel(_Request, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Absolute path of a GGUF file on the coordinator's host, or an HTTP or HTTPS address."""

    ctx: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Tokens of prompt and answer together; 0: what the model was trained for, up to 2048."""

    sessions: Annotated[int, Meta(ge=1, le=256)] = 1
    rows: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Tokens of a prompt that are computed at once."""

    split: Annotated[str, Meta(max_length=8192)] = ""
    """By hand: ``0:12,12:30@NODE``; empty: by the planner."""

    fetch: Literal["edge", "path"] = "edge"
    """Whether the coordinator sends the weights, or each node has the same path."""

    measure: bool = False
    """Measure the links between the nodes of the plan before, with a burst for each."""


class PlanModel(_OfModel, frozen=True, kw_only=True, tag=True):
    """Where the layers of a model would go; answered by ``ModelPlan``, and nothing is fetched."""


class ProvisionModel(_OfModel, frozen=True, kw_only=True, tag=True):
    """Put a model on the nodes; answered by ``ModelRunStatus`` at each change.

    The last one is of a run that takes requests, or is over.  A client that leaves before that
    stops the run, unless it asked to ``detach``, which is answered once.
    """

    detach: bool = False
    on_fault: Literal["", "fail", "replace"] = ""
    """What the loss of a stage does to the run; empty: as configured."""

    max_replacements: Annotated[int, Meta(ge=0, le=64)] | None = None
    """How often a lost stage is replaced; None: as configured."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one side of a conversation said."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Annotated[str, Meta(max_length=MAX_REQUEST_BYTES)]


class Prompt(_Request, frozen=True, kw_only=True, tag=True):
    """Answered by ``TokenText`` for each token and ``Answered`` at the end.

    A client that leaves before the end cancels the request.
    """

    run: RunLabel = ""
    """The beginning of a run's id; empty: the only one."""

    turns: Annotated[tuple[Turn, ...], Meta(max_length=1024)] = ()
    """A conversation, for the model's chat template."""

    text: Annotated[str, Meta(max_length=MAX_REQUEST_BYTES)] = ""
    """Without ``turns``: plain text to go on with."""

    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 512
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0 is greedy."""

    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)
    ] = ()


class ModelRuns(_Request, frozen=True, kw_only=True, tag=True):
    """Runs of models, those that are over last; answered by ``ModelRunList``."""


class InspectRun(_Request, frozen=True, kw_only=True, tag=True):
    """One run in full, its stages asked how far they are; answered by ``ModelRunStatus``."""

    run: RunLabel = ""


class TraceRun(_Request, frozen=True, kw_only=True, tag=True):
    """When the latest tokens of a run were where; answered by ``RunTrace``."""

    run: RunLabel = ""
    last: Annotated[int, Meta(ge=1, le=128)] = 32
    """Tokens."""


class StopRun(_Request, frozen=True, kw_only=True, tag=True):
    """End requests and the run.  Answered by ``ModelRunStatus`` when it is torn down."""

    run: RunLabel = ""
    reason: Sentence = "stopped by the operator"


class TeardownRun(_Request, frozen=True, kw_only=True, tag=True):
    """End the run once its requests have ended.  Answered as ``StopRun``."""

    run: RunLabel = ""
    reason: Sentence = "torn down by the operator"


class Drain(_Request, frozen=True, kw_only=True, tag=True):
    """Leave a node alone; answered by ``DrainStatus``, with ``wait`` at each change.

    It gets no further stages, and is not expected in rounds that open later.  Runs that replace
    move off it at once; others end by themselves, or now with ``force``.
    """

    node: Annotated[str, Meta(min_length=1, max_length=64)]
    """Its name, or the beginning of its id."""

    undo: bool = False
    force: bool = False
    wait: bool = False
    """Until nothing is left on it; then the last reply says drained."""

    reason: Sentence = "drained by the operator"


class Revoke(_Request, frozen=True, kw_only=True, tag=True):
    """Admit a node no more, and end its session.  Answered by ``Done``."""

    node: Annotated[str, Meta(min_length=1, max_length=64)]
    """Its name, or the beginning of its id."""

    undo: bool = False
    reason: Sentence = "revoked by the operator"


OfModels: TypeAlias = (
    PlanModel | ProvisionModel | Prompt | ModelRuns | InspectRun | TraceRun | StopRun | TeardownRun
)
Request: TypeAlias = (
    Hello
    | Status
    | Run
    | Attach
    | Abort
    | Rounds
    | Round
    | Invite
    | Checkpoints
    | CheckpointExport
    | Events
    | Members
    | Join
    | Leave
    | Drain
    | Revoke
    | OfModels
)
