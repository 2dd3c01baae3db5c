"""``Coordinator``: the daemon's rounds as a blocking object, for experiments and scripts.

It runs the very machine, sessions and ledger of the daemon over the driver it is given.
"""

import trio

from lensemble import seeds
from lensemble.errors import FaultToleranceExceeded
from lensemble.global_state import GlobalState
from lensemble.transport.driver import Driver
from lensemble_coord import daemon
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.coordinator import RunEnded
from lensemble_coord.training.outer_round import RoundState, public_state
from lensemble_coord.training.store import Store


class Coordinator:
    """Orchestrates rounds and holds the canonical global state.

    Args:
        config: the daemon's configuration.
        transport: the driver to serve on; nodes reach it by ``transport.addresses()``.
    """

    def __init__(self, config: CoordinatorConfig, *, transport: Driver) -> None:
        self._config = config
        self._transport = transport
        self._state = RoundState.CLOSED

    def run(self, num_rounds: int) -> None:
        """Serve until ``num_rounds`` more rounds are committed.

        Raises:
            FaultToleranceExceeded: the run ended before; says why.
        """
        ended = trio.run(self._run, num_rounds)
        if not ended.completed:
            raise FaultToleranceExceeded(f"{ended.closed} of {num_rounds} rounds: {ended.reason}")

    async def _run(self, num_rounds: int) -> RunEnded:
        async with trio.open_nursery() as nursery:
            serving = await nursery.start(daemon.serve, self._config, self._transport)
            try:
                ended: RunEnded = await serving.run_rounds(num_rounds)
            finally:
                self._state = public_state(serving.rounds.state)
            nursery.cancel_scope.cancel()
        return ended

    def round_state(self) -> RoundState:
        """Where the last run left the round."""
        return self._state

    def global_state(self) -> GlobalState:
        """What the next round starts from, read from the ledger; call it between runs."""
        terms = daemon.workload_of(self._config)
        store = Store(self._config, terms)
        try:
            position = store.position
            return GlobalState(
                digest=position.digest,
                round_index=position.round,
                sketch_seed=seeds.sketch(terms.root_seed, position.round),
                config_hash=terms.digest,
                layout_digest=store.layout.digest,
            )
        finally:
            store.close()
