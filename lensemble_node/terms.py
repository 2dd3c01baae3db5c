"""What a coordinator asks for, checked against what this node can hold to."""

import msgspec
from pydantic import ValidationError

from lensemble.errors import ContractViolation, GaugeError, LensembleError, ProbeError
from lensemble.ids import Digest, FederationId
from lensemble.params import PARAMETER_BYTES
from lensemble.secagg.scale import why_wide
from lensemble.seeds import sketch
from lensemble.wire.messages import RoundOpen, Welcome
from lensemble.workload import CustomTask, Workload, layout


class Terms(msgspec.Struct, frozen=True):
    """A workload that this node takes part in; ``workload`` is its canonical JSON."""

    federation: FederationId
    workload: str
    config_hash: Digest
    layout_digest: Digest
    root_seed: int
    inner_steps: int
    field_k: int
    field_n_max: int
    state_bytes: int
    """Of the parameters; the outer momentum has as many."""

    probe_hash: Digest | None = None
    masked: bool = False
    """The coordinator learns the sum of the updates only."""

    cohort: int = 0
    """Fewest updates whose sum may be revealed, where noise is sized for that; 0: any."""

    wide: str = ""
    """Why no tensor may have words of 16 bits; empty if some may."""

    trains: bool = True
    """Whether there will be rounds, for which a worker and data are needed."""


def agree(welcome: Welcome, pinned: str = "", *, plain: bool, entry: str = "") -> Terms:
    """The terms of ``welcome``, every digest recomputed here.

    ``plain``: this node sends updates that the coordinator can read one by one, if asked to.
    ``entry``: the task whose code this node runs, if it runs any.

    Raises:
        ContractViolation: not a workload of this build, a digest that is not its own, another
            workload than ``pinned``, updates in the clear where this node does not send such, or a
            task whose code this node does not run.
    """
    workload = _parse(welcome.workload)
    if workload.digest != welcome.config_hash:
        raise ContractViolation(
            f"the coordinator announces the config hash {welcome.config_hash}; its workload has "
            f"{workload.digest}"
        )
    if welcome.trains and pinned and pinned != workload.digest:
        raise ContractViolation(
            f"the coordinator trains workload {workload.name!r} with the config hash "
            f"{workload.digest}; this node takes part only in {pinned}",
            "Correct `expected_config_hash` in this node's configuration, or join another "
            "coordinator.",
        )
    if welcome.trains:
        require_consent(workload, entry)
    where = layout(workload)
    if where.digest != welcome.layout_digest:
        raise ContractViolation(
            f"the coordinator announces the layout {welcome.layout_digest}; this build lays the "
            f"workload out as {where.digest}"
        )
    if welcome.trains and welcome.aggregation == "plain" and not plain:
        raise ContractViolation(
            "this coordinator aggregates in the clear: it could read each update of this node by "
            "itself, and `share.plain` is false here",
            'Have its operator set `rounds.aggregation = "masked"`; or set `share.plain = true` in '
            "this node's configuration, if the coordinator may see its updates.",
        )
    spread = workload.privacy.of_participants and workload.privacy.placement == "distributed"
    if spread and welcome.aggregation == "plain":
        raise ContractViolation(
            'the workload has privacy.placement = "distributed", and this coordinator aggregates '
            "in the clear: each update would carry only a part of the noise",
            'Have its operator set `rounds.aggregation = "masked"`, or the placement to "local".',
        )
    return Terms(
        welcome.federation,
        workload.canonical().decode(),
        workload.digest,
        where.digest,
        workload.root_seed,
        workload.inner.steps,
        workload.field.k,
        workload.field.n_max,
        where.size * PARAMETER_BYTES,
        Digest(workload.objective.probe_hash) if workload.objective.probe_hash else None,
        welcome.aggregation == "masked",
        workload.privacy.cohort if spread else 0,
        why_wide(workload),
        welcome.trains,
    )


def require_consent(workload: Workload, entry: str) -> None:
    """Refuse a workload that is code, unless it is that of ``entry``.

    Raises:
        ContractViolation: it is other code.
    """
    task = workload.task
    if not isinstance(task, CustomTask) or task.entry == entry:
        return
    here = f"this node runs {entry!r} only" if entry else "this node runs none"
    raise ContractViolation(
        f"workload {workload.name!r} is trained by the code of {task.entry!r}, and {here}",
        f'If you have that code and trust it, set `task.entry = "{task.entry}"` in this node\'s '
        "configuration and start it again.",
    )


def objection(terms: Terms, asked: RoundOpen) -> LensembleError | None:
    """Why this node takes no part in ``asked``, or None when it is what ``terms`` say."""
    if asked.sketch_seed != sketch(terms.root_seed, asked.round):
        return GaugeError(
            f"round {asked.round} comes with the sketch seed {asked.sketch_seed}; the workload "
            f"derives {sketch(terms.root_seed, asked.round)}",
            "Have the operator of the coordinator check its build against this one.",
        )
    if asked.probe_hash != terms.probe_hash:
        return ProbeError(
            f"round {asked.round} names the probe {asked.probe_hash}; the workload pins "
            f"{terms.probe_hash}",
            "Have the operator of the coordinator check its build against this one.",
        )
    if asked.field.plan and terms.wide:
        return ContractViolation(
            f"round {asked.round} asks for words of 16 bits, and in this workload {terms.wide}"
        )
    for name, got, due in (
        ("config_hash", asked.config_hash, terms.config_hash),
        ("layout_digest", asked.layout_digest, terms.layout_digest),
        ("inner_steps", asked.inner_steps, terms.inner_steps),
        ("field.k", asked.field.k, terms.field_k),
        ("field.n_max", asked.field.n_max, terms.field_n_max),
        ("state_bytes", asked.state_bytes, terms.state_bytes * (1 + _has_momentum(asked))),
    ):
        if got != due:
            return ContractViolation(f"round {asked.round} asks for {name} {got}; agreed was {due}")
    return None


def _has_momentum(asked: RoundOpen) -> bool:
    return asked.prior_momentum is not None


def _parse(raw: bytes) -> Workload:
    try:
        return Workload.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the workload"
        raise ContractViolation(
            f"the coordinator's workload does not fit this build: {where}: {first['msg']}"
        ) from error
