"""A run that an earlier process of this coordinator left behind: over, or to be carried on."""

from collections.abc import Awaitable, Callable

import msgspec
import trio

from lensemble.ctl.replies import FaultStatus, ModelRunStatus, Replacement
from lensemble.errors import PlanInfeasible
from lensemble.ids import NodeId
from lensemble_coord.inference import survival
from lensemble_coord.inference.placement import Plan
from lensemble_coord.inference.run_rows import RunRow
from lensemble_coord.peers import Peers

RESTARTED = "coordinator_restarted"
WAITING = "waiting for nodes"


class Revival:
    """``row`` waits for its nodes, until ``scope`` is cancelled."""

    def __init__(self, row: RunRow) -> None:
        self.row = row
        self.scope = trio.CancelScope()
        self.over = trio.Event()
        """Set once it waits no longer."""

        self.stopped = ""
        self._since = trio.current_time()

    @property
    def run(self) -> str:
        return self.row.run

    @property
    def ground(self) -> survival.Ground:
        """Where the run goes on: behind every epoch that nodes may have heard of."""
        row = self.row
        rules = survival.Rules(row.wish.replaces, row.wish.most)
        return survival.Ground(rules, epoch=row.epoch, dropped=row.dropped, replaced=row.replaced)

    @property
    def before(self) -> tuple[Replacement, ...]:
        """What is told of the plans before."""
        last = Replacement(run_epoch=self.row.epoch, reason="the coordinator restarted")
        return (*self.row.status.replacements, last)

    def stop(self, reason: str) -> None:
        """Wait no longer."""
        self.stopped = reason
        self.scope.cancel()

    async def plan(
        self, peers: Peers, again: Callable[[], Awaitable[Plan]], longest_s: float
    ) -> Plan:
        """A plan, once all former nodes have said what they can hold, or after ``longest_s``.

        Raises:
            PlanInfeasible: nothing fits the nodes that are here by then.
        """
        until = trio.current_time() + longest_s
        while True:
            changed, late = peers.changed, trio.current_time() >= until
            missing = self._missing(peers)
            if late or not missing:
                try:
                    return await again()
                except PlanInfeasible:
                    if late:
                        raise
            with trio.move_on_at(until):
                await changed.wait()

    def _missing(self, peers: Peers) -> list[NodeId]:
        here = {each.node for each in peers.here.values() if each.inventory is not None}
        return [node for node in self.row.nodes if node not in here | self.row.dropped]

    def status(self, here: frozenset[NodeId]) -> ModelRunStatus:
        """What is told of it; ``here`` are the nodes that are connected."""
        names = {stage.node: stage.name for stage in self.row.status.stages}
        gone = [names.get(node, node[:8]) for node in self.row.nodes if node not in here]
        waits = f"waits for {', '.join(gone)}" if gone else "is planned again"
        return msgspec.structs.replace(
            self.row.status,
            state=WAITING,
            takes_requests=False,
            requests=(),
            since_s=trio.current_time() - self._since,
            outcome="",
            reason=f"the coordinator restarted; the run {waits}",
            fault=None,
        )


def restarted(row: RunRow, reason: str = "", code: str = RESTARTED, way_out: str = "") -> RunRow:
    """``row`` of a run whose end its coordinator did not see: it is over."""
    said = reason or "the coordinator restarted"
    fault = FaultStatus(
        code=code,
        reason=said,
        remediation=way_out or "Provision the model again; --on-fault replace outlives a restart.",
    )
    return _over(row, "faulted", said, fault)


def stopped(row: RunRow, reason: str) -> RunRow:
    """``row`` of a run that an operator ended while it waited."""
    return _over(row, "stopped", reason)


def _over(row: RunRow, outcome: str, reason: str, fault: FaultStatus | None = None) -> RunRow:
    status = msgspec.structs.replace(
        row.status,
        state="torn down",
        takes_requests=False,
        requests=(),
        outcome=outcome,
        reason=reason,
        fault=fault,
        teardown="clean",
    )
    return msgspec.structs.replace(row, over=True, status=status)
