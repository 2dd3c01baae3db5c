"""A node's status, in the words that ``lensemblectl status`` prints."""

from collections.abc import Mapping

import msgspec
import trio

from lensemble.ctl import replies
from lensemble.transport.ends import RxEnd, TxEnd
from lensemble.version import VERSION
from lensemble_node import attempt, participation, stage
from lensemble_node.participant import Member
from lensemble_node.stage_host import StageHost

_PAGE_BYTES = 4096


def of(member: Member, began: float, refused_by_socket: Mapping[str, int]) -> replies.NodeStatus:
    """The status of ``member`` in a daemon that began at ``began`` on its clock."""
    config, state = member.config, member.state
    joined = state.membership
    session = joined.session if isinstance(joined, participation.Joined) else None
    terms = participation.worker_terms(state.worker)
    refused = {**member.driver.refused(), **refused_by_socket, **member.refused}
    return replies.NodeStatus(
        name=config.name,
        node=member.who.node,
        version=VERSION,
        addresses=member.driver.addresses(),
        uptime_s=trio.current_time() - began,
        state_dir=str(config.state_dir),
        link=_link(member),
        round=_round(member),
        worker=_worker(member),
        dataset=_dataset(member) if session is None or session.terms.trains else None,
        config_hash="" if terms is None else terms.config_hash,
        digest="" if session is None else session.last.digest,
        state_by=member.state_by,
        contributions=member.contributions,
        last_contribution=member.last_contribution,
        shares_norms=config.share.norms and member.budget is None,
        privacy=_privacy(member),
        edges=tuple(_edge(end, moved) for end, moved in member.provisioner.ends()),
        leased_bytes=member.provisioner.leased_bytes,
        hosting=_hosting(member),
        stages=tuple(_stage(member.stages, run) for run in sorted(member.stages.hosted)),
        refused=refused,
        field_use=member.field_use,
        drift=_drift(member),
        rss_bytes=rss_bytes("self"),
        alerts=_alerts(member),
    )


def _drift(member: Member) -> replies.DriftStatus | None:
    if member.drift is None:
        return None
    return msgspec.convert(member.drift, replies.DriftStatus, from_attributes=True)


def _privacy(member: Member) -> replies.PrivacyStatus | None:
    budget = member.budget
    if budget is None:
        return None
    return replies.PrivacyStatus(
        unit=budget.unit,
        spent=budget.spent,
        epsilon=budget.epsilon,
        delta=budget.delta,
        releases=budget.releases,
        rounds_left=budget.rounds_left,
        clip_factor=member.clip_factor,
        clip_fraction=member.clipped / member.releases if member.releases else None,
    )


def rss_bytes(process: str) -> int:
    """Resident bytes of a process, 0 when it is gone."""
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _since(member: Member, part: str) -> float:
    return trio.current_time() - member.since.get(part, trio.current_time())


def _link(member: Member) -> replies.LinkStatus:
    membership = member.state.membership
    state, reason, attempt_number, epoch, name, federation = "", "", 0, 0, "", ""
    match membership:
        case participation.Unassigned():
            return replies.LinkStatus(
                state="unconfigured",
                reason="no coordinator is known: `lensemblectl join TICKET` says which",
            )
        case participation.Left():
            return replies.LinkStatus(state="unconfigured", reason="this node shuts down")
        case participation.Dialing(failures=failures):
            state, attempt_number = "dialing", failures + 1
            reason = "waiting for the coordinator to answer"
        case participation.Joining(failures=failures):
            state, attempt_number = "dialing", failures + 1
            reason = "connected; waiting to be admitted"
        case participation.Resting(failures=failures, cause=cause, refused=refused):
            state, reason, attempt_number = "refused" if refused else "waiting", cause, failures
        case participation.Joined(session=session):
            state, name, epoch = "joined", session.coordinator, session.epoch
            federation = session.federation
    target = membership.target
    facts = member.link_facts()
    due = member.redial_at
    return replies.LinkStatus(
        state=state,
        reason=reason,
        coordinator=target.node,
        name=name,
        addresses=target.addresses,
        federation=federation or target.federation or "",
        attempt=attempt_number,
        next_attempt_in_s=None if due is None else max(0.0, due - trio.current_time()),
        last_seen_s=None if facts is None else facts.heard_s,
        rtt_ms=None if facts is None else facts.rtt_ms,
        path="" if facts is None else facts.remote,
        epoch=epoch,
    )


def _round(member: Member) -> replies.NodeRoundStatus | None:
    joined = member.state.membership
    if not isinstance(joined, participation.Joined) or isinstance(joined.attempt, attempt.Idle):
        return None
    now, progress = joined.attempt, member.progress
    activity, reason = describe(now)
    done, total = (0, 0) if progress is None else (progress.done, progress.total)
    steps = isinstance(now, attempt.Training)
    return replies.NodeRoundStatus(
        index=now.open.round,
        attempt=now.open.attempt,
        activity=activity,
        reason=reason,
        since_s=_since(member, "attempt"),
        step=done if steps else 0,
        steps=total if steps else 0,
        bytes=0 if steps else done,
        total_bytes=0 if steps else total,
    )


_DOING: dict[type, tuple[str, str]] = {
    attempt.Offered: ("starting", "waiting for the worker to open the dataset"),
    attempt.Binding: ("binding", "waiting for the worker to look up the state it holds"),
    attempt.Fetching: ("receiving state", "waiting for the state from the coordinator"),
    attempt.Waiting: ("waiting", "waiting for the coordinator to have its participants"),
    attempt.Training: ("training", "waiting for the worker to finish its local steps"),
    attempt.Masking: ("masking", "waiting for the worker to mask its update"),
    attempt.Sending: ("sending update", "waiting for the coordinator to take the update"),
    attempt.Sent: ("sent", "waiting for the coordinator to close the round"),
    attempt.Asked: ("unmasking", "checking whose updates the coordinator wants the sum of"),
    attempt.Agreed: ("unmasking", "waiting for the worker to be there and mark the release spent"),
    attempt.Spending: ("unmasking", "waiting for the worker to mark the release as spent"),
    attempt.Answered: ("unmasking", "answered; waiting for the coordinator to close the round"),
}
_SHARING: dict[attempt.Go, str] = {
    attempt.Go.ROSTER: "waiting for the coordinator to say who takes part, with their mask keys",
    attempt.Go.DEALING: "dealing mask shares to the other participants",
    attempt.Go.COLLECT: "waiting for the mask shares of the other participants",
    attempt.Go.OPENING: "opening the mask shares of the other participants",
}


def describe(state: attempt.Active) -> tuple[str, str]:
    """What the node does for the round, in a word or two, and what it waits for."""
    match state:
        case attempt.Withdrawn(reason=reason):
            return "not taking part", reason
        case attempt.Waiting(masked=True, go=go) if go in _SHARING:
            return "sharing", _SHARING[go]
        case attempt.Sent(masked=True):
            return "sent", "waiting for the coordinator to ask for the unmasking of the sum"
        case _:
            return _DOING[type(state)]


def _worker(member: Member) -> replies.WorkerStatus:
    facts, worker = member.supervisor.facts(), member.state.worker
    state, reason = facts.state, facts.last_fault if facts.state == "waiting" else ""
    match worker:
        case participation.NoWorker():
            state, reason = "stopped", _why_idle(member)
        case participation.Starting() if facts.state == "running":
            state, reason = "starting", "opening the dataset"
        case participation.Able() if facts.state == "running":
            state = "busy" if _busy(member) else "ready"
        case participation.Unable(reason=why):
            reason = why
    return replies.WorkerStatus(
        state=state,
        pid=facts.pid or None,
        reason=reason,
        generation=facts.generation,
        restarts=facts.restarts,
        rss_bytes=rss_bytes(str(facts.pid)) if facts.pid else 0,
    )


def _why_idle(member: Member) -> str:
    joined = member.state.membership
    if isinstance(joined, participation.Joined) and not joined.session.terms.trains:
        return "this federation trains nothing"
    return "no workload yet: it comes with the coordinator's welcome"


def _busy(member: Member) -> bool:
    joined = member.state.membership
    return isinstance(joined, participation.Joined) and isinstance(
        joined.attempt, attempt.Training | attempt.Masking | attempt.Sending
    )


def _dataset(member: Member) -> replies.DatasetStatus:
    data, worker = member.config.data, member.state.worker
    root, episodes, steps = "", 0, 0
    if isinstance(worker, participation.Able):
        facts = worker.facts
        root, episodes, steps = facts.dataset_root, facts.episodes, facts.steps
    return replies.DatasetStatus(
        path=str(data.path),
        root=root,
        episodes=episodes,
        steps=steps,
        embodiment=data.embodiment,
    )


def _edge(end: RxEnd | TxEnd, moved: int) -> replies.EdgeStatus:
    inward = isinstance(end, RxEnd)
    return replies.EdgeStatus(
        id=end.spec.edge,
        peer=end.spec.producer if inward else end.spec.consumer,
        direction="rx" if inward else "tx",
        state="faulted" if end.fault else "ended" if end.over.is_set() else "live",
        bytes=moved,
        fault=end.fault or "",
    )


def _hosting(member: Member) -> replies.HostingStatus:
    host, links = member.stages, member.links.links()
    joined = isinstance(member.state.membership, participation.Joined)
    return replies.HostingStatus(
        memory_bytes=host.memory_bytes,
        taken_bytes=host.taken_bytes(),
        engine=host.engine.name,
        device=member.config.inference.device,
        reason=host.engine.reason or ("" if joined else "this node has joined no coordinator"),
        links=tuple(link.peer for link in links),
    )


_PHASES: dict[type[stage.State], str] = {
    stage.Leasing: "waiting for room",
    stage.Hosting: "starting",
    stage.ReadyToOpen: "ready",
    stage.Opening: "opening",
    stage.Live: "live",
    stage.Draining: "ending",
}


def _stage(host: StageHost, run: str) -> replies.StageStatus:
    held, state = host.hosted[run], host.state(run)
    order, progress = held.order, held.progress
    hosting = isinstance(state, stage.Hosting) and progress is not None
    pid = 0 if held.process is None else held.process.pid
    return replies.StageStatus(
        run=run,
        run_epoch=order.run_epoch,
        stage=order.stage,
        stages=order.stages,
        model=held.facts.name,
        first=order.first,
        last=order.last,
        phase=progress.phase if hosting and progress else _PHASES[type(state)],
        since_s=trio.current_time() - held.since,
        done=progress.done if hosting and progress else 0,
        total=progress.total if hosting and progress else 0,
        pid=pid or None,
        bytes=held.taken_bytes,
        rss_bytes=rss_bytes(str(pid)) if pid else 0,
        ctx=order.ctx,
        sessions=order.sessions,
        computed=held.computed,
        held=held.waiting,
        refused=held.refused,
        last_step_ms=held.recent[-1][1] / 1000 if held.recent else None,
    )


def _alerts(member: Member) -> tuple[str, ...]:
    alerts: list[str] = []
    worker, joined = member.state.worker, member.state.membership
    if isinstance(worker, participation.Unable):
        alerts.append(f"the worker cannot take part: {worker.reason} {worker.remediation}".strip())
    terms = joined.session.terms if isinstance(joined, participation.Joined) else None
    if terms is not None and terms.trains and not terms.masked:
        alerts.append("the coordinator can read each update of this node: aggregation is plain")
    return tuple(alerts)
