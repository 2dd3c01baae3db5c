"""Which run answers for a model."""

from collections.abc import Iterable

from lensemble.ctl.replies import ModelRunStatus
from lensemble_coord.http.refusal import Refused
from lensemble_coord.inference import run_status
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.orchestrator import Orchestrator
from lensemble_coord.inference.revival import WAITING


def names(orchestrator: Orchestrator) -> list[ModelRun]:
    """The oldest run of each model that takes requests, by name."""
    found: dict[str, ModelRun] = {}
    for run in orchestrator.runs.values():
        if run.takes_requests:
            found.setdefault(run.model.facts.name, run)
    return [found[name] for name in sorted(found)]


def choose(orchestrator: Orchestrator, model: str) -> ModelRun:
    """The run of ``model`` with the most room: a free session, or else the shortest queue.

    Raises:
        Refused: there is no such model, or it is not ready, or its last run faulted.
    """
    named = [run for run in orchestrator.runs.values() if run.model.facts.name == model]
    able = [run for run in named if run.takes_requests]
    if able:
        return min(able, key=lambda run: (run.replacing, _load(run)))
    states = [run_status.public_state(run) for run in named]
    states += [WAITING for each in orchestrator.reviving.values() if each.row.status.model == model]
    if states:
        message = f"the model `{model}` is not ready: its run is {states[-1]}"
        raise Refused(503, "model_not_ready", message, retry=True)
    last = next((each for each in reversed(orchestrator.over) if each.model == model), None)
    if last is not None and last.outcome == "faulted":
        raise of_faulted(last)
    raise Refused(404, "model_not_found", _unknown(model, orchestrator), "model")


def of_faulted(last: ModelRunStatus) -> Refused:
    """What is said of a model whose run ended by a fault."""
    return Refused(
        503,
        "run_faulted",
        f"run {last.run} of the model `{last.model}` faulted: {last.reason}. "
        "Provision it again with `lensemblectl provision`.",
        retry=True,
    )


def _load(run: ModelRun) -> float:
    """Requests for each session; under 1 a session is free."""
    return len(run.requests) / run.plan.sessions


def _unknown(model: str, orchestrator: Orchestrator) -> str:
    known = _listed(run.model.facts.name for run in names(orchestrator))
    return f"the model `{model}` does not exist here; {known or 'no model is provisioned'}"


def _listed(known: Iterable[str]) -> str:
    listed = ", ".join(f"`{each}`" for each in known)
    return f"there is {listed}" if listed else ""
