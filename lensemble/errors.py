"""The error taxonomy: every class says whose fault it is, what follows, and how to go on.

Three roots decide what a caller does.  ``PeerError``: refuse that peer's input and carry on.
``InvariantError``: our own promise is broken, abort and never swallow.  ``OperatorError``:
configuration or usage, tell the person what to do.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar


class Response(StrEnum):
    """What the round does when this error ends one of its phases."""

    REFUSE = "refuse"
    RETRY = "retry"
    STOP = "stop"


class LensembleError(Exception):
    """A failure with a stable ``code`` and a sentence that says what to do about it.

    Args:
        message: names the thing and the value that is wrong.
        remediation: the way out, as a sentence in the imperative.
    """

    code: ClassVar[str] = "lensemble"
    response: ClassVar[Response] = Response.REFUSE
    default_remediation: ClassVar[str] = "See the log of the daemon for the events before this one."

    def __init__(self, message: str, remediation: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remediation = remediation or self.default_remediation


class PeerError(LensembleError):
    """A peer sent something that must be refused; we carry on."""

    code = "peer"


class InvariantError(LensembleError):
    """A promise of our own is broken; abort, never swallow."""

    code = "invariant"
    response = Response.STOP
    default_remediation = "This is a fault in Lensemble: keep the log and the state directory."


class OperatorError(LensembleError):
    """Configuration or usage; a person must act."""

    code = "operator"
    response = Response.STOP


class ConfigError(OperatorError):
    code = "config"
    default_remediation = "Correct the named key; `lensemblectl doctor --config FILE` tests it."


class InvalidTransition(InvariantError):
    """A machine was fed an event that its state does not answer."""

    code = "invalid_transition"

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"{type(state).__name__} does not answer {type(event).__name__}: {event}")


class ContractViolation(PeerError):
    """A peer's terms, protocol or layout differ from ours."""

    code = "contract_violation"
    default_remediation = "Upgrade the older side, or give both the same workload."


class ResidencyViolation(InvariantError):
    """Something that must stay on its node was about to leave it."""

    code = "residency_violation"


class GaugeError(LensembleError):
    code = "gauge"
    default_remediation = "Start this node again from the federation's warm start."


class FrameDriftExceeded(GaugeError):
    code = "frame_drift_exceeded"


class DegenerateProcrustes(GaugeError):
    code = "degenerate_procrustes"


class AggregationError(LensembleError):
    code = "aggregation"
    response = Response.RETRY


class SecureAggregationError(AggregationError):
    code = "secure_aggregation"


class NonDeterministicAggregation(AggregationError, InvariantError):
    """The same spooled inputs gave two different sums."""

    code = "agg_nondeterministic"
    response = Response.STOP
    default_remediation = (
        "Suspect memory or disk of the coordinator's host; test them before going on."
    )


class PrivacyBudgetExceeded(OperatorError):
    code = "dp_budget_exceeded"
    default_remediation = (
        "Plan a larger budget or fewer rounds; the spent budget cannot be taken back."
    )


class ProvenanceError(LensembleError):
    code = "provenance"


class CommitmentMismatch(ProvenanceError):
    """An update is not bound to the dataset its participant committed to."""

    code = "commitment_mismatch"
    response = Response.STOP
    default_remediation = "Find out why the dataset changed during the round before running again."


class MerkleVerificationError(ProvenanceError):
    code = "merkle_verification"


class ArtifactError(LensembleError):
    code = "artifact"


class SchemaVersionMismatch(ArtifactError):
    code = "schema_version_mismatch"
    default_remediation = "Open it with a version of Lensemble that writes this schema."


class CheckpointIntegrityError(ArtifactError):
    code = "checkpoint_integrity"
    response = Response.RETRY
    default_remediation = "Restore the file from a copy; `lensemblectl verify` names what differs."


class LedgerIntegrityError(ArtifactError):
    code = "ledger_integrity"
    response = Response.STOP
    default_remediation = "Restore the state directory from a copy; do not edit the ledger."


class RoundError(PeerError):
    """A malformed, stale or misplaced message; the state does not move."""

    code = "round"


class FaultToleranceExceeded(LensembleError):
    """Fewer than K participants are left."""

    code = "fault_tolerance_exceeded"
    response = Response.RETRY
    default_remediation = "Start more nodes, or lower `min_participants`."


class ProbeError(LensembleError):
    code = "probe"


class EvaluationError(LensembleError):
    code = "evaluation"


class DatasetError(OperatorError):
    """A dataset that cannot be used as it is; names file, episode and column."""

    code = "dataset"
    default_remediation = "Repair or leave out the named episode."


class TaskError(LensembleError):
    """A node's own task cannot be used, or failed; says which of its calls, and where."""

    code = "task"
    default_remediation = 'Set `log.level = "debug"` on that node: its log then has the traceback.'


class AdmissionRefused(PeerError):
    code = "admission_refused"
    default_remediation = (
        "Ask the operator of the coordinator for an invite (`lensemblectl invite`)."
    )


class FrameError(PeerError):
    """Bytes that are not a frame or message of this protocol."""

    code = "frame"


class LinkLost(PeerError):
    """The connection to a peer is gone."""

    code = "link_lost"


class EdgeFault(PeerError):
    """An edge is torn; the edge is replaced, nothing else is harmed."""

    code = "edge_fault"


class ArenaExhausted(OperatorError):
    """A lease that can never fit in the arena."""

    code = "arena_exhausted"


class WorkerFault(LensembleError):
    """A worker process died or answered something that is not its protocol."""

    code = "worker_fault"
    response = Response.RETRY


class StorageError(OperatorError):
    """A state directory that cannot be used: full, read-only, in use by another process."""

    code = "storage"
    response = Response.RETRY


class OutOfMemory(StorageError):
    """Memory for bytes that were to be kept or mapped is not to be had."""

    code = "out_of_memory"
    default_remediation = (
        "Allow more memory: `worker.memory_bytes` of the node, MemoryMax= of the unit."
    )


class ModelFileError(ArtifactError):
    """A model file that contradicts itself, is cut short or goes beyond a limit."""

    code = "model_file"
    default_remediation = "Get the file again from where it was published."


class UnsupportedModel(OperatorError):
    """A model that no engine here computes; nothing of it was fetched."""

    code = "unsupported_model"
    default_remediation = "Take a llama model in a common quantisation: Q8_0, Q4_K_M, Q4_0."


class PlanInfeasible(OperatorError):
    """No placement of the model's layers fits the nodes; nothing was fetched.

    Args:
        message: as of every error.
        remediation: as of every error.
        detail: the arithmetic, as JSON may carry it.
    """

    code = "plan_infeasible"
    default_remediation = "Lower --ctx or --sessions, free memory on a node, or add a node."

    def __init__(
        self, message: str, remediation: str = "", detail: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message, remediation)
        self.detail: Mapping[str, object] = detail or {}


class ContextLengthExceeded(OperatorError):
    """A prompt that leaves no room for an answer; ``have`` and ``most`` are tokens."""

    code = "context_length_exceeded"

    def __init__(self, have: int, most: int) -> None:
        super().__init__(
            f"the prompt has {have} tokens, the context {most} with room for one answer token",
            "Shorten the prompt, or provision the model with a larger --ctx.",
        )
        self.have = have
        self.most = most


class QueueFull(OperatorError):
    """Too many requests wait for a session of a run."""

    code = "queue_full"
    default_remediation = "Ask again later, or provision the model with more --sessions."


class WeightsError(LensembleError):
    """Weights that could not be fetched, kept or believed."""

    code = "weights"
    default_remediation = "Correct the source of the model, then provision again."


class WeightsUnreachable(WeightsError):
    """The source does not answer, or denies it has the file."""

    code = "weights_unreachable"
    default_remediation = "Check the path or URL on that node; what was fetched is kept."


class WeightsBusy(WeightsError):
    """The source said 429 or 5xx until patience ended."""

    code = "weights_busy"
    default_remediation = "Provision again later; what was fetched is kept."


class WeightsUnranged(WeightsError):
    """The source sends the whole file where a range was asked for."""

    code = "weights_unranged"
    default_remediation = "Serve the model from a server that honours Range requests."


class WeightsRangeRefused(WeightsError):
    """The source has no such bytes (416)."""

    code = "weights_range_refused"
    default_remediation = "The file there is another or shorter one; name the right one."


class WeightsShort(WeightsError):
    """Bodies kept ending early."""

    code = "weights_short"
    default_remediation = "Provision again; what was fetched is kept."


class WeightsChanged(WeightsError):
    """The file at the source is no longer the one that was planned with."""

    code = "weights_changed"
    default_remediation = "Provision again, so that the header is read anew."


class WeightsDigestMismatch(WeightsError):
    """Bytes of a tensor that are not what its digest says; they were dropped."""

    code = "weights_digest_mismatch"
    default_remediation = "Get the file again from where it was published."


class WeightsUnasked(WeightsError):
    """Bytes that were not asked for, or not in order."""

    code = "weights_unasked"


class WeightsDiskFull(WeightsError):
    """No room on the node's file system; nothing was marked complete."""

    code = "weights_disk_full"
    default_remediation = "Free space there, or `lensemblectl models prune`."


class WeightsCacheFull(WeightsError):
    """The stage does not fit the limit of the cache beside the models in use."""

    code = "weights_cache_full"
    default_remediation = "Raise `inference.cache_bytes` of that node, or end a run on it."


class EngineMissing(OperatorError):
    """Nothing on this node computes a stage: no engine, no compiler, or no such device."""

    code = "engine_missing"
    default_remediation = "Install it: `pip install 'lensemble[inference,cpu-inference]'`."


class ChunkRefused(PeerError):
    """A chunk of a stage edge that cannot be computed; the stage goes on."""

    code = "chunk_refused"
    default_remediation = "Start the request again; if it recurs, stop the run and provision anew."
