"""What the coordinator tells about itself, put together from its parts when it is asked."""

import resource
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import msgspec
import trio

from lensemble.ctl import replies
from lensemble.ids import NodeId
from lensemble.secagg.plan import FieldPlan
from lensemble.secagg.scale import why_wide
from lensemble.transport.driver import Driver
from lensemble.version import VERSION
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training import budget, outer_round, patience, round_figures
from lensemble_coord.training.coordinator import RoundEnded, Rounds, RunEnded
from lensemble_coord.training.reception import Reception
from lensemble_coord.training.record import ContributionRecord
from lensemble_coord.training.rows import Attempt
from lensemble_coord.training.session import Session
from lensemble_coord.training.store import Store

PLAIN = "plain: the coordinator sees each update"
MASKED = "masked: the coordinator learns the sum and who contributed, no single update"
ACTIVITIES = {
    "fetching": "receiving state",
    "releasing": "preparing update",
    "sending": "sending update",
    "sent": "update sent",
}
NO_ROUNDS = "this federation trains nothing"
TESTING = "testing the new state on public data before it is adopted"
MAX_DESCRIBED = 3
"""Nodes of which a status says how far they are; the rest are named only."""

_TIMERS = {
    outer_round.RoundState.OPEN: (
        outer_round.Timer.GRACE,
        outer_round.Timer.OPEN,
        outer_round.Timer.SHARE,
    ),
    outer_round.RoundState.COLLECTING: (
        outer_round.Timer.COLLECT,
        outer_round.Timer.COLLECT_END,
    ),
    outer_round.RoundState.AGGREGATING: (outer_round.Timer.UNMASK,),
    outer_round.RoundState.COMMITTING: (outer_round.Timer.RETRY,),
    outer_round.RoundState.ABORTED: (outer_round.Timer.RETRY,),
}


def described(plan: FieldPlan, reason: str) -> str:
    """The widths of ``plan`` in words; ``reason`` is why they are always 32 bits, if they are."""
    if reason:
        return f"32 bits a parameter: {reason}"
    each = f"{plan.nbytes / plan.layout.size:.2f} bytes a parameter"
    tensors = len(plan.layout.tensors)
    return f"{each}; 16 bits in {len(plan.narrow)} of {tensors} tensors"


class Observer:
    """Answers "how do things stand?" from the parts of the daemon."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        driver: Driver,
        rounds: Rounds,
        reception: Reception,
    ) -> None:
        self._config = config
        self._store = store
        self._driver = driver
        self._rounds = rounds
        self._reception = reception
        self._since = trio.current_time()
        self.refused_by_socket: Mapping[str, int] = {}
        self.surfaces: Mapping[str, str] = {}
        self.drain_word: Callable[[NodeId], str] = _in_use

    def status(self) -> replies.CoordinatorStatus:
        """The whole status, from memory only, so that it answers while a round is busy."""
        rounds, store = self._rounds, self._store
        return replies.CoordinatorStatus(
            name=self._config.name,
            node=self._driver.node,
            version=VERSION,
            addresses=self._driver.addresses(),
            uptime_s=trio.current_time() - self._since,
            federation=store.federation,
            workload=store.workload.name,
            config_hash=store.workload.digest,
            digest=rounds.state.ground.digest,
            aggregation=MASKED if self._config.rounds.masked else PLAIN,
            field=described(store.plan, why_wide(store.workload)),
            round=self._round(),
            run=self._run(),
            last_round=self._last_round(),
            participants=self._participants(),
            edges=self._edges(),
            refused=self._refused(),
            storage=replies.StorageStatus(
                state_dir=str(store.directory.root),
                records=rounds.state.ground.round + 1,
                checkpoints=store.checkpoints_kept,
                checkpoint_bytes=store.checkpoints_kept * store.layout.nbytes,
                spool_bytes=store.spool.memory_bytes + store.spool.disk_bytes,
                free_bytes=store.free_bytes(),
            ),
            leased_bytes=self._reception.leased_bytes,
            surfaces=dict(self.surfaces),
            rss_bytes=rss_bytes(),
            alerts=(*warnings(store), *rounds.gate.alerts) if self._config.trains else (),
        )

    def _round(self) -> replies.RoundStatus:
        state, ground = self._rounds.state, self._rounds.state.ground
        public = outer_round.public_state(state)
        waiting = outer_round.waiting(state)
        now = trio.current_time()
        bound, arrived = _counts(state)
        return replies.RoundStatus(
            index=max(0, ground.round - 1)
            if isinstance(state, outer_round.Closed)
            else ground.round,
            attempt=ground.attempt,
            state=str(public),
            reason=self._reason(waiting, now) if self._config.trains else NO_ROUNDS,
            since_s=now - self._rounds.since,
            deadline_in_s=self._due(now),
            waiting_on=tuple(sorted(self._rounds.name(node) for node in waiting.on)),
            quorum=ground.rules.quorum,
            bound=bound,
            arrived=arrived,
        )

    def _due(self, now: float) -> float | None:
        """Seconds until the round moves by itself, at the latest unless somebody makes progress."""
        state, deadlines = self._rounds.state, self._rounds.deadlines
        timers = _TIMERS.get(outer_round.public_state(state), ())
        due = {timer: deadlines[timer] - now for timer in timers if timer in deadlines}
        if isinstance(state, outer_round.Collecting) and outer_round.Timer.COLLECT in due:
            timeout_s, next_look_s = self._patience(now)
            due[outer_round.Timer.COLLECT] = min(
                patience.left_s(each, timeout_s, next_look_s) for each in outer_round.awaited(state)
            )
        return max(0.0, min(due.values())) if due else None

    def _patience(self, now: float) -> tuple[float, float]:
        """The collect timeout, and the seconds until it is looked again who has come further."""
        next_look = self._rounds.deadlines.get(outer_round.Timer.COLLECT, now)
        return self._rounds.state.ground.rules.collect_timeout_s, next_look - now

    def _reason(self, waiting: outer_round.Waiting, now: float) -> str:
        """Why the round waits; while it collects, how far those are that it waits for."""
        state = self._rounds.state
        if self._rounds.gate.weighing:
            return TESTING
        if not isinstance(state, outer_round.Collecting):
            return waiting.reason
        slowest = sorted(outer_round.awaited(state), key=lambda each: -each.still)[:MAX_DESCRIBED]
        outlooks = "; ".join(
            f"{self._rounds.name(each.node)}: {patience.outlook(each, *self._patience(now))}"
            for each in slowest
        )
        return f"{waiting.reason}; {outlooks}" if outlooks else waiting.reason

    def _run(self) -> replies.RunStatus | None:
        run = self._store.run
        if run is None:
            return None
        return replies.RunStatus(
            run=run.run,
            rounds=run.requested,
            closed=run.done,
            remaining=run.requested - run.done,
            attempts_aborted=self._rounds.aborted_in_run,
            elapsed_s=trio.current_time() - self._rounds.run_since,
        )

    def _last_round(self) -> replies.RoundSummary | None:
        for _, news in reversed(self._rounds.news):
            if isinstance(news, RoundEnded) and news.closed:
                return self.closed(news)
        return None

    def closed(self, news: RoundEnded) -> replies.RoundSummary:
        """A round that closed while this daemon runs."""
        return replies.RoundSummary(
            index=news.round,
            attempt=news.attempt,
            contributors=tuple(self._rounds.name(node) for node in news.contributors),
            digest=news.digest,
            seconds=sum(news.seconds.values()),
            by_sum=news.by_sum,
            bytes_saved=news.bytes_saved,
            alerts=self._alerts(news.round, news.refusal),
        )

    def _alerts(self, round_index: int, refusal: str) -> tuple[str, ...]:
        """What is to be said of a closed round beside its figures."""
        if refusal:
            return (f"REJECTED, the state is the one before: {refusal}",)
        verdict = self._rounds.gate.verdict(round_index)
        return () if verdict is None else verdict.alarms

    def ended(self, news: RunEnded) -> replies.RunEnded:
        return replies.RunEnded(
            run=news.run,
            rounds=news.rounds,
            closed=news.closed,
            completed=news.completed,
            digest=news.digest,
            seconds=news.seconds,
            code=news.code,
            reason=news.reason,
            remediation=_REMEDIES.get(news.code, "") if not news.completed else "",
        )

    def aborted(self, news: RoundEnded) -> replies.RoundAborted:
        return replies.RoundAborted(
            index=news.round,
            attempt=news.attempt,
            code=news.code,
            reason=news.reason,
            next="another attempt follows" if news.retries else "the run ends",
        )

    def _participants(self) -> tuple[replies.ParticipantStatus, ...]:
        now = trio.current_time()
        here = [self._present(each, now) for each in self._rounds.sessions.values()]
        gone = [
            replies.ParticipantStatus(
                name=self._rounds.name(node),
                node=node,
                connected=False,
                activity="away",
                last_seen_s=now - departure.at,
                last_reason=departure.reason,
                epsilon=departure.epsilon,
                drain=self.drain_word(node),
            )
            for node, departure in self._reception.departed.items()
        ]
        return tuple(sorted((*here, *gone), key=lambda each: (each.name, each.node)))

    def _present(self, session: Session, now: float) -> replies.ParticipantStatus:
        doing, link = session.activity, session.link.facts()
        steps = doing.phase == "training"
        return replies.ParticipantStatus(
            name=session.name,
            node=session.node,
            connected=True,
            activity=ACTIVITIES.get(doing.phase, doing.phase),
            step=doing.done if steps else 0,
            steps=doing.total if steps else 0,
            bytes=0 if steps else doing.done,
            total_bytes=0 if steps else doing.total,
            loss=doing.loss,
            epsilon=doing.epsilon,
            state_by=doing.state_by,
            state_bytes=session.moved["state"],
            last_seen_s=min(now - doing.seen, link.heard_s),
            rtt_ms=link.rtt_ms,
            path=f"{link.path} {link.remote}",
            epoch=session.epoch,
            contributions=doing.contributions,
            refused=dict(session.refused),
            last_reason=doing.last_reason,
            drain=self.drain_word(session.node),
        )

    def _edges(self) -> tuple[replies.EdgeStatus, ...]:
        return tuple(
            replies.EdgeStatus(
                id=edge,
                peer=session.name,
                direction="tx" if kind == "state" else "rx",
                state="ready" if session.ready else "provisioning",
                bytes=session.moved[kind],
            )
            for session in self._rounds.sessions.values()
            for edge, kind in session.edges.items()
        )

    def _refused(self) -> dict[str, int]:
        counts = {**self._reception.refused, **self.refused_by_socket}
        for reason, count in self._driver.refused().items():
            counts[f"transport:{reason}"] = count
        if self._rounds.journal.dropped:
            counts["journal:full"] = self._rounds.journal.dropped
        return counts

    # ---- history, from the ledger: call these in a thread ----

    def rounds(self, limit: int) -> replies.RoundList:
        """The latest committed rounds, newest last."""
        with self._store.reading:
            ledger = self._store.ledger
            newest = ledger.tail().round
            start = max(0, newest - limit + 1)
            attempts = {(a.round, a.attempt): a for a in ledger.attempts(start)}
            figures = round_figures.of(ledger)
            return replies.RoundList(
                rounds=tuple(
                    msgspec.structs.replace(
                        self._summary(
                            each.record,
                            each.committed_at,
                            attempts.get((each.record.round, each.record.attempt)),
                        ),
                        **figures.get(each.record.round, {}),
                    )
                    for each in ledger.committed(start)
                )
            )

    def round(self, index: int) -> replies.RoundDetail | None:
        """One committed round in full; None if there is none of that index."""
        with self._store.reading:
            ledger = self._store.ledger
            found = next(ledger.committed(index, index + 1), None)
            attempts = ledger.attempts(index, index + 1)
        if found is None:
            return None
        record = found.record
        attempt = next((a for a in attempts if a.attempt == record.attempt), None)
        news = self._remembered(index)
        return replies.RoundDetail(
            round=self._summary(record, found.committed_at, attempt),
            prior_digest=record.prior_digest or "",
            momentum_digest=record.momentum_digest or "",
            field_sum_digest=record.field_sum_digest or "",
            config_hash=record.config_hash,
            record_hash=found.record_hash,
            previous_record_hash=record.prev_record_hash or "",
            contributors=tuple(
                replies.Contributor(
                    name=self._rounds.name(each.node),
                    node=each.node,
                    dataset_root=each.dataset_root,
                    update_digest=each.update_digest,
                )
                for each in record.contributors
            ),
            dropped={self._rounds.name(d.node): d.reason for d in news.dropped} if news else {},
            seconds_by_state=news.seconds if news else {},
            public=self._public(index),
        )

    def _public(self, index: int) -> replies.PublicFigures | None:
        """What the state that the round came to is worth on public data, if it was tested."""
        verdict = self._rounds.gate.verdict(index)
        if verdict is None:
            return None
        return msgspec.convert(verdict.figures, replies.PublicFigures, from_attributes=True)

    def _remembered(self, index: int) -> RoundEnded | None:
        for _, news in self._rounds.news:
            if isinstance(news, RoundEnded) and news.closed and news.round == index:
                return news
        return None

    def _summary(
        self, record: ContributionRecord, committed_at: str, attempt: Attempt | None
    ) -> replies.RoundSummary:
        closed = datetime.fromisoformat(committed_at).timestamp()
        seconds = None
        if attempt is not None and attempt.opened_at:
            seconds = closed - datetime.fromisoformat(attempt.opened_at).timestamp()
        return replies.RoundSummary(
            index=record.round,
            attempt=record.attempt,
            contributors=tuple(self._rounds.name(each.node) for each in record.contributors),
            digest=record.next_digest,
            seconds=seconds,
            closed_unix_s=closed,
            alerts=self._alerts(record.round, record.refusal),
        )

    def checkpoints(self) -> replies.CheckpointList:
        """The checkpoints that are kept, oldest first."""
        with self._store.reading:
            weights = self._store.ledger.present("weights")
            sums = self._store.ledger.present("sum")
        return replies.CheckpointList(
            checkpoints=tuple(
                replies.CheckpointEntry(
                    round=index,
                    digest=digest,
                    bytes=self._store.layout.nbytes,
                    path=str(self._store.directory.checkpoint(digest).absolute()),
                    verifiable=index in sums,
                )
                for index, digest in sorted(weights.items())
            )
        )


_REMEDIES = {
    "fault_tolerance_exceeded": "Start more nodes or look at them with `lensemblectl status`, "
    "then run again.",
    "stopped": "Start a new run with `lensemblectl run --rounds N`.",
    "commitment_mismatch": "Find out why that node's dataset changed during the round.",
    "dp_budget_exceeded": "Begin another federation with a larger budget, more noise or fewer "
    "rounds: `lensemblectl privacy plan`.  What is spent cannot be taken back.",
    "agg_nondeterministic": "Suspect memory or disk of this host; test them before going on.",
}


def _in_use(_: NodeId) -> str:
    return ""


def _counts(state: outer_round.State) -> tuple[int, int]:
    match state:
        case outer_round.Open() | outer_round.Sharing():
            return len(state.bound), 0
        case outer_round.Collecting():
            return len(state.expected), len(state.verified)
        case outer_round.Unmasking():
            return len(state.contributors), len(state.contributors)
        case outer_round.Aggregating() | outer_round.Aligning() | outer_round.Committing():
            return len(state.contributors), len(state.contributors)
        case _:
            return 0, 0


def warnings(store: Store) -> tuple[str, ...]:
    """What is worth a word about the terms of the federation."""
    return tuple(filter(None, (outer_step_alert(store), budget.alert(store.workload))))


def outer_step_alert(store: Store) -> str:
    """A sentence if the outer step overshoots by its terms; empty otherwise."""
    outer = store.workload.outer
    gain = outer.lr / (1.0 - outer.momentum)
    if gain <= 2.0:
        return ""
    return (
        f"outer.lr {outer.lr:g} with momentum {outer.momentum:g} moves {gain:.1f} times the mean "
        "update in the long run; at tens of rounds 0.7 with momentum 0.5 learns better"
    )


def rss_bytes() -> int:
    """Resident memory of this process in bytes; 0 while there is no descriptor to ask with."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()
