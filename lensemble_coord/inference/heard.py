"""What nodes say about stages, as events of a run."""

from lensemble.wire import stages
from lensemble.wire.stages import StageAnswer
from lensemble_coord.inference import staging
from lensemble_coord.inference.staging import Fault


def event_of(message: StageAnswer) -> staging.Event | None:
    """What ``message`` means to the staging machine; None if nothing."""
    match message:
        case stages.StageWants(stage=stage, ranges=ranges):
            return staging.Wanted(stage, ranges)
        case stages.StageProgress(stage=stage, phase=phase, done=done, total=total):
            return staging.Progressed(stage, phase, done, total)
        case stages.StageReady(stage=stage):
            loaded = staging.Loaded(
                message.weights_bytes,
                message.resident_bytes,
                message.fetched_bytes,
                message.seconds,
            )
            return staging.Ready(stage, loaded)
        case stages.StageOpened(stage=stage):
            return staging.Opened(stage)
        case stages.StageTornDown(stage=stage, outcome=outcome, reason=reason):
            return staging.StageGone(stage, "" if outcome == "clean" else reason or outcome)
        case stages.StageRefused() | stages.StageFault():
            return staging.Failed(_fault_of(message))
        case _:
            return None


def _fault_of(message: stages.StageRefused | stages.StageFault) -> Fault:
    if isinstance(message, stages.StageFault):
        return Fault(
            message.code, message.reason, message.stage, message.remediation, message.stderr
        )
    reason = f"refused: {message.field} is {message.have} there, {message.want} was asked for"
    return Fault("stage_refused", reason, message.stage, message.remediation)
