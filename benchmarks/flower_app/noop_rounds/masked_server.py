"""FedAvg over a no-op model under SecAgg+, with a stamp at the end of each round."""

from typing import Any

import numpy as np
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import Grid, LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from noop_rounds.stamps import stamp

app = ServerApp()


class Stamped(FedAvg):
    out = ""

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> Any:  # noqa: ANN401  # Flower's own types
        averaged = super().aggregate_fit(server_round, results, failures)
        stamp(self.out, server_round, len(results))
        return averaged


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    zeros = np.zeros(int(config["parameters"]), dtype=np.float32)
    strategy = Stamped(
        fraction_evaluate=0.0,
        min_fit_clients=nodes,
        min_available_clients=nodes,
        initial_parameters=ndarrays_to_parameters([zeros]),
    )
    strategy.out = str(config["out"])
    legacy = LegacyContext(
        context=context,
        config=ServerConfig(num_rounds=int(config["rounds"])),
        strategy=strategy,
    )
    masked = SecAggPlusWorkflow(num_shares=nodes, reconstruction_threshold=nodes // 2 + 1)
    DefaultWorkflow(fit_workflow=masked)(grid, legacy)
