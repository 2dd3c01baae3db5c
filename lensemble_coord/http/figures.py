"""The coordinator's figures for Prometheus; the facts are those of ``status`` and ``inspect``.

Labels are states, outcomes, directions, names of nodes that are or were here, and ids of runs that
go on: each of them is bounded by the configuration.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import trio
from prometheus_client.core import Metric

from lensemble.ctl import replies
from lensemble.histogram import Histogram
from lensemble.loop_lag import LoopLag
from lensemble.web.figures import Name, Values, counter, gauge, histogram, of_daemon, one
from lensemble_coord.http.parts import Parts
from lensemble_coord.inference import run_status, staging
from lensemble_coord.inference.model_run import ModelRun
from lensemble_coord.inference.revival import WAITING
from lensemble_coord.training.coordinator import RoundEnded
from lensemble_coord.training.outer_round import RoundState

ROUND_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
PUBLIC = {
    "std": "Spread of the latent on public data.",
    "probe_r2": "R2 of the linear probe on public data.",
    "latent_error": "One-step latent error over that of predicting no change.",
    "state_error": "Five-step state error over that of predicting no change.",
    "dimension": "Effective dimension of the latent on public data.",
    "drift_after": "How far the last state moved from the one before, in latent variances.",
    "mean_degrees": "Mean principal angle between the last state's latents and those before.",
}
RUN_STATES = (
    "planned", "provisioning", "opening", "probing", "provisioned", "running", "replacing",
    "draining", "faulted", "tearing down", WAITING,
)  # fmt: skip
MEMBER_STATES = ("alive", "suspect", "dead", "left")
Requests = Callable[[], Mapping[tuple[str, int], int]]
"""HTTP requests answered so far, by path and status."""


class Figures:
    """Collects; ``follow`` has to run beside, for what happens only once."""

    def __init__(self, parts: Parts, lag: LoopLag, requests: Requests = dict) -> None:
        self._parts = parts
        self._lag = lag
        self._requests = requests
        self._seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(ROUND_BOUNDS_S))
        self._outcomes: Counter[str] = Counter({"closed": 0, "aborted": 0, "rejected": 0})
        self._asked: dict[str, int] = {}
        """By run, the latest step when its stages were last asked."""

    async def follow(self) -> None:
        """Take in each round that ends."""
        rounds = self._parts.rounds
        seen = rounds.published
        while True:
            changed = rounds.changed
            if rounds.published != seen:
                for news in rounds.news_since(seen):
                    if isinstance(news, RoundEnded):
                        self._take(news)
                seen = rounds.published
            await changed.wait()

    def _take(self, news: RoundEnded) -> None:
        outcome = "rejected" if news.refusal else "closed" if news.closed else "aborted"
        self._outcomes[outcome] += 1
        for state, seconds in news.seconds.items():
            self._seconds[state].observe(seconds)

    async def collect(self) -> list[Metric]:
        """Everything, as of now; stages are asked how long they compute first."""
        await self._ask_stages()
        status = self._parts.observer.status()
        return [
            *of_daemon("coordinator", status.uptime_s, self._lag),
            *self._of_rounds(status),
            *_of_nodes(status),
            *_of_members(self._parts.circle.listing(status.name)),
            *_of_machine(status),
            *self._of_models(),
        ]

    async def _ask_stages(self) -> None:
        """Of every run that has computed since it was asked last, at once."""
        live = self._parts.orchestrator.runs
        self._asked = {run: step for run, step in self._asked.items() if run in live}
        async with trio.open_nursery() as nursery:
            for run in live.values():
                moved = run.ring.trips and run.ring.steps != self._asked.get(run.run)
                if moved and staging.takes_requests(run.state):
                    self._asked[run.run] = run.ring.steps
                    nursery.start_soon(run.watch.ask)

    def _of_rounds(self, status: replies.CoordinatorStatus) -> Iterator[Metric]:
        now = str(status.round.state)
        states = {(str(each),): float(str(each) == now) for each in RoundState}
        yield gauge(Name("round_state", "1 for the state of the round.", ("state",)), states)
        yield one(Name("round_index", "The round in flight, or the last."), status.round.index)
        yield one(Name("round_attempt", "Attempts of this round before."), status.round.attempt)
        yield histogram(
            Name("round_seconds", "Seconds that attempts spent in each state.", ("state",)),
            {(state,): each for state, each in self._seconds.items()},
        )
        ends = {(outcome,): float(count) for outcome, count in self._outcomes.items()}
        yield counter(Name("rounds", "Attempts that ended, by outcome.", ("outcome",)), ends)
        last = status.last_round
        yield one(
            Name("round_contributors", "Nodes whose update is in the last round."),
            None if last is None else float(len(last.contributors)),
        )
        yield from self._of_public_data()

    def _of_public_data(self) -> Iterator[Metric]:
        rounds = self._parts.rounds
        verdict = rounds.gate.verdict(rounds.state.ground.round - 1)
        for field, what in PUBLIC.items():
            value = None if verdict is None else getattr(verdict.figures, field)
            yield one(Name(f"public_{field}", what), value)

    def _of_models(self) -> Iterator[Metric]:
        runs = list(self._parts.orchestrator.runs.values())
        tally = self._parts.orchestrator.around.tally
        states = Counter(map(run_status.public_state, runs))
        states[WAITING] = len(self._parts.orchestrator.reviving)
        by_state = {(state,): float(states[state]) for state in RUN_STATES}
        yield gauge(Name("inference_runs", "Models that are here, by state.", ("state",)), by_state)
        yield gauge(
            Name("inference_sessions", "Places in the caches of ready runs.", ("use",)),
            _sessions(runs),
        )
        yield one(
            Name("inference_requests_waiting", "Requests that wait for a session."),
            float(sum(run.waiting for run in runs)),
        )
        under_way = sum(each.drawn for run in runs for each in run.requests.values())
        yield counter(
            Name("inference_tokens", "Tokens that were drawn."), {(): tally.tokens + under_way}
        )
        yield counter(
            Name("inference_prompt_tokens", "Tokens of the prompts of ended answers."),
            {(): tally.prompt_tokens},
        )
        answers = {(finish,): float(count) for finish, count in tally.answers.items()}
        yield counter(Name("inference_answers", "Answers that ended.", ("finish",)), answers)
        waited = "From a request to its first token."
        yield histogram(Name("inference_first_token_seconds", waited), {(): tally.first_token})
        round_trip = "Of one token round all stages."
        yield histogram(Name("inference_trip_seconds", round_trip), {(): tally.trips})
        yield from _hops(runs)
        answered = {(p, str(s)): float(n) for (p, s), n in self._requests().items()}
        asked = Name("http_requests", "Answered, by path and status.", ("path", "status"))
        yield counter(asked, answered)


def _sessions(runs: Iterable[ModelRun]) -> Values[tuple[str]]:
    ready = [run for run in runs if staging.takes_requests(run.state)]
    used = sum(each.slot is not None for run in ready for each in run.requests.values())
    return {("in_use",): used, ("free",): sum(run.plan.sessions for run in ready) - used}


def _hops(runs: Iterable[ModelRun]) -> Iterator[Metric]:
    hops: dict[tuple[str], float | None] = {}
    computing: dict[tuple[str, str], float | None] = {}
    for run in runs:
        status = run_status.run(run)
        hops[run.run,] = _seconds(status.hop_ms)
        for stage in status.stages:
            computing[run.run, str(stage.index)] = _seconds(stage.compute_ms)
    hop = "Median of what a hop costs beside computing, over the latest tokens."
    yield gauge(Name("inference_hop_seconds", hop, ("run",)), hops)
    median = "Median of a stage's latest one-token steps."
    yield gauge(Name("inference_compute_seconds", median, ("run", "stage")), computing)


def _of_nodes(status: replies.CoordinatorStatus) -> Iterator[Metric]:
    known = status.participants
    here = sum(each.connected for each in known)
    counted = {("connected",): float(here), ("away",): float(len(known) - here)}
    yield gauge(Name("participants", "Nodes, by whether they are here.", ("state",)), counted)
    node = ("node",)
    rtt = {(each.name,): _seconds(each.rtt_ms) for each in known}
    yield gauge(Name("link_rtt_seconds", "Round trip to a node.", node), rtt)
    loss = {(each.name,): each.loss for each in known}
    yield gauge(Name("participant_loss", "Last loss, where a node shares it.", node), loss)
    epsilon = {(each.name,): each.epsilon for each in known}
    yield gauge(Name("participant_epsilon", "What its releases have spent.", node), epsilon)
    # Two nodes may have one name: their edges count together.
    moved: Counter[tuple[str, str]] = Counter()
    for edge in status.edges:
        moved[edge.peer, edge.direction] += edge.bytes
    yield counter(
        Name("edge_bytes", "Over the edges of the sessions there are.", ("node", "direction")),
        {labels: float(count) for labels, count in moved.items()},
    )


def _of_members(listing: replies.MemberList) -> Iterator[Metric]:
    states = Counter(each.state for each in listing.members)
    counted = {(state,): float(states[state]) for state in MEMBER_STATES}
    yield gauge(Name("members", "Nodes and coordinator, by who lives.", ("state",)), counted)
    # Two members may have one name: the worse of them is told.
    alive: dict[tuple[str], float | None] = {}
    flaps: Counter[tuple[str]] = Counter()
    for each in listing.members:
        alive[each.name,] = min(alive.get((each.name,), 1.0) or 0.0, float(each.state == "alive"))
        flaps[each.name,] += each.flaps
    yield gauge(Name("member_alive", "1 for a member that is alive.", ("node",)), alive)
    again = "Times that a member was suspected or dead, and then alive in the same life."
    yield counter(
        Name("member_flaps", again, ("node",)), {node: float(n) for node, n in flaps.items()}
    )
    doubt = "How much this member doubts itself: 0 is well, 8 the most."
    yield one(Name("member_health", doubt), listing.health)


def _of_machine(status: replies.CoordinatorStatus) -> Iterator[Metric]:
    storage = status.storage
    if storage is not None:
        yield one(Name("spool_bytes", "Updates that wait to be summed."), storage.spool_bytes)
        yield one(Name("checkpoint_bytes", "Checkpoints that are kept."), storage.checkpoint_bytes)
        yield one(Name("storage_free_bytes", "Free where the state is."), storage.free_bytes)
    yield one(Name("arena_leased_bytes", "Of the arena, by all edges."), status.leased_bytes)
    yield one(Name("resident_bytes", "Memory of the daemon."), status.rss_bytes)
    refused = {(reason,): float(count) for reason, count in status.refused.items()}
    yield counter(Name("refused", "Refused input, by reason.", ("reason",)), refused)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
