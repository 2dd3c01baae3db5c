"""Which node computes which layers.

Pure and deterministic: the same nodes and links, in whatever order, give the same plan.  Splitting
never makes one answer faster, so the fewest nodes that fit are taken; among those the chain with
the least time on links per token; among those the nodes with the most memory.  Cuts level how full
the nodes become.
"""

import itertools
from collections.abc import Sequence

import msgspec

from lensemble.errors import PlanInfeasible
from lensemble.ids import NodeId
from lensemble.wire.stages import MAX_CTX, MAX_ROWS, MAX_SESSIONS
from lensemble_coord.inference.chain import (
    COORDINATOR,
    NEUTRAL,
    Found,
    How,
    Links,
    Offer,
    PlannedStage,
    Search,
    Task,
    able,
    candidates,
    chunk_bytes,
    furthest,
    hop_ns,
    link_of,
)

_NAMED = 8
"""Nodes that a message goes into."""


class Unused(msgspec.Struct, frozen=True):
    node: NodeId
    name: str
    reason: str


class Hop(msgspec.Struct, frozen=True):
    """From one stage to the next, or from and to the coordinator, whose name is empty."""

    before: str
    after: str
    rtt_ns: int | None
    """None if nobody measured it, and it was planned with that of ``chain.NEUTRAL``."""

    bytes_per_s: int = NEUTRAL.bytes_per_s
    how: How = "assumed"


class Plan(msgspec.Struct, frozen=True):
    """Stages in order of layers.

    ``link_ns`` is the time on links of one token's trip, ``chunk_ns`` that of ``rows`` tokens of a
    prompt.
    """

    model: str
    engine: str
    ctx: int
    sessions: int
    rows: int
    stages: tuple[PlannedStage, ...]
    unused: tuple[Unused, ...]
    link_ns: int
    exhaustive: bool
    """The search saw everything; otherwise there may be a shorter chain."""

    hops: tuple[Hop, ...] = ()
    """One more than stages."""

    chunk_ns: int = 0

    def canonical(self) -> bytes:
        """Sorted compact JSON."""
        return msgspec.json.encode(self, order="sorted")


def plan(task: Task, offers: Sequence[Offer], links: Links) -> Plan:
    """Place ``task`` on ``offers``; ``links`` are looked up in both directions.

    Raises:
        PlanInfeasible: nothing fits; the message and ``detail`` say need and have of each node and
            the largest ctx that would fit.
    """
    _check(task)
    offers = sorted(offers, key=lambda offer: offer.node)
    best: tuple[tuple[int, int, str], Search, Found] | None = None
    exhaustive = True
    for engine in sorted({each.inventory.engine for each in offers if each.inventory}):
        search = Search(task, able(offers, engine), links)
        found = search.fewest()
        exhaustive = exhaustive and search.exhaustive
        if found is not None:
            rank = (len(found.order), found.link_ns, engine)
            if best is None or rank < best[0]:
                best = (rank, search, found)
    if best is None:
        raise _infeasible(task, offers, links, exhaustive=exhaustive)
    (_, _, engine), search, found = best
    stages = search.stages(found)
    return Plan(
        task.facts.name,
        engine,
        task.wanted.ctx,
        task.wanted.sessions,
        task.wanted.rows,
        stages,
        _unused(task, offers, stages, engine),
        found.link_ns,
        exhaustive,
        _hops(stages, links),
        _chunk_ns(task, stages, links),
    )


def _hops(stages: Sequence[PlannedStage], links: Links) -> tuple[Hop, ...]:
    ends = [(COORDINATOR, ""), *((stage.node, stage.name) for stage in stages), (COORDINATOR, "")]
    hops = []
    for (a, before), (b, after) in itertools.pairwise(ends):
        link = link_of(links, a, b)
        rtt_ns = link.rtt_ns if link.timed else None
        hops.append(Hop(before, after, rtt_ns, link.bytes_per_s, link.how))
    return tuple(hops)


def _chunk_ns(task: Task, stages: Sequence[PlannedStage], links: Links) -> int:
    narrow, wide = chunk_bytes(task.facts, task.wanted.rows)
    result, _ = chunk_bytes(task.facts, 1)
    nodes = [stage.node for stage in stages]
    between = sum(hop_ns(links, a, b, wide) for a, b in itertools.pairwise(nodes))
    out = hop_ns(links, nodes[-1], COORDINATOR, result)
    return hop_ns(links, COORDINATOR, nodes[0], narrow) + between + out


def _check(task: Task) -> None:
    wanted, most = task.wanted, min(MAX_CTX, task.facts.trained_ctx)
    if wanted.ctx > most:
        raise PlanInfeasible(
            f"ctx {wanted.ctx} is more than the {most} that {task.facts.name} was trained for",
            f"Give --ctx {most} or less.",
            {"largest_ctx": most},
        )
    for key, value, limit in (
        ("ctx", wanted.ctx, MAX_CTX),
        ("sessions", wanted.sessions, MAX_SESSIONS),
        ("rows", wanted.rows, MAX_ROWS),
    ):
        if not 1 <= value <= limit:
            raise PlanInfeasible(f"{key} is {value}, not 1 to {limit}", f"Correct {key}.")


def _unused(
    task: Task, offers: Sequence[Offer], stages: tuple[PlannedStage, ...], engine: str
) -> tuple[Unused, ...]:
    used = {stage.node for stage in stages}
    return tuple(
        Unused(offer.node, offer.name, _why_unused(task, offer, len(stages), engine))
        for offer in offers
        if offer.node not in used
    )


def _why_unused(task: Task, offer: Offer, stages: int, engine: str) -> str:
    inventory = offer.inventory
    if offer.barred or inventory is None:
        return offer.barred or "it has not said what it can hold"
    if inventory.memory_bytes == 0:
        return inventory.reason or "it hosts no stages"
    if inventory.engine != engine:
        return f"its engine is {inventory.engine}, the plan's {engine}"
    if task.split:
        return "the split by hand leaves it out"
    count = "1 node is" if stages == 1 else f"{stages} nodes are"
    return f"{count} enough, and others are nearer or have more memory"


# ---- why nothing fits ----


def _infeasible(
    task: Task, offers: Sequence[Offer], links: Links, *, exhaustive: bool
) -> PlanInfeasible:
    rows = [_row(task, offer) for offer in offers]
    largest = _largest_ctx(task, offers, links)
    wanted, facts = task.wanted, task.facts
    what = f"{facts.name}, {facts.layers} layers, ctx {wanted.ctx}, {_sessions(wanted.sessions)}"
    where = _split_says(task, offers) or "; ".join(str(row["says"]) for row in rows[:_NAMED])
    if not rows:
        where = "no node is here"
    elif not task.split and len(rows) > _NAMED:
        where += f"; and {len(rows) - _NAMED} more"
    fits = f"the largest ctx that fits is {largest}" if largest else "no ctx fits"
    return PlanInfeasible(
        f"{what} {'does not fit' if exhaustive else 'was not made to fit'}: {where}; {fits}",
        f"Give --ctx {largest}, free memory on a node, or add a node." if largest else "",
        {
            "nodes": rows,
            "largest_ctx": largest,
            "ctx": wanted.ctx,
            "sessions": wanted.sessions,
            "exhaustive": exhaustive,
        },
    )


def _sessions(count: int) -> str:
    return f"{count} session" + ("" if count == 1 else "s")


def _row(task: Task, offer: Offer) -> dict[str, object]:
    inventory = offer.inventory
    facts: dict[str, object] = {"node": offer.node, "name": offer.name}
    title = offer.name or offer.node[:8]
    if inventory is None or offer.barred or inventory.memory_bytes == 0:
        reason = _why_unused(task, offer, 0, "")
        return {**facts, "says": f"{title}: {reason}", "reason": reason}
    node = candidates(task, [offer])[0]
    need = node.footprint.need(0, task.facts.layers)
    least = node.footprint.need(0, 1)
    holds = furthest(node, 0, node.have, task.facts.layers)
    says = (
        f"{title} needs {megabytes(need.required)} for all layers or "
        f"{megabytes(least.required)} for the first, has {megabytes(node.have)}"
    )
    return {
        **facts,
        "need_bytes": need.required,
        "least_bytes": least.required,
        "have_bytes": node.have,
        "layers": holds,
        "engine": inventory.engine,
        "says": says,
    }


def _split_says(task: Task, offers: Sequence[Offer]) -> str:
    """Which segment of a split by hand is too large, if one alone is."""
    for segment in task.split:
        nodes = [
            each
            for each in candidates(task, able(offers))
            if segment.node in {None, each.offer.node}
        ]
        needs = [node.footprint.need(segment.first, segment.last).required for node in nodes]
        if all(need > node.have for need, node in zip(needs, nodes, strict=True)):
            told = "; ".join(
                f"{node.offer.name or node.offer.node[:8]} needs {megabytes(need)}, "
                f"has {megabytes(node.have)}"
                for need, node in list(zip(needs, nodes, strict=True))[:_NAMED]
            )
            return f"layers {segment.first}:{segment.last} fit no node they may be on: {told}"
    if not task.split:
        return ""
    count, here = len(task.split), len(able(offers))
    if here < count:
        rows = "; ".join(str(_row(task, offer)["says"]) for offer in offers[:_NAMED])
        return f"{count} stages by hand are for {count} nodes, {here} can hold one: {rows}"
    return "no two segments may share a node"


def _largest_ctx(task: Task, offers: Sequence[Offer], links: Links) -> int:
    low, high = 0, task.wanted.ctx - 1
    while low < high:
        middle = (low + high + 1) // 2
        smaller = msgspec.structs.replace(
            task, wanted=msgspec.structs.replace(task.wanted, ctx=middle)
        )
        if _fits(smaller, offers, links):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(task: Task, offers: Sequence[Offer], links: Links) -> bool:
    engines = sorted({each.inventory.engine for each in offers if each.inventory})
    return any(Search(task, able(offers, engine), links).fewest() is not None for engine in engines)


def megabytes(nbytes: int) -> str:
    """``nbytes`` for people, rounded up so that a need never looks smaller than it is."""
    return f"{-(-nbytes // 100_000) / 10:.1f} MB"
