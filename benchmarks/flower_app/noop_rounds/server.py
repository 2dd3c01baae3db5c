"""FedAvg over a no-op model, with a stamp at the end of each round."""

from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from noop_rounds.stamps import stamp

app = ServerApp()


class Stamped(FedAvg):
    out = ""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        here = list(replies)
        averaged = super().aggregate_train(server_round, here)
        stamp(self.out, server_round, sum(not each.has_error() for each in here))
        return averaged


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    # The quorum is one less, so that a round can close without a node that dies.
    strategy = Stamped(
        fraction_evaluate=0.0, min_train_nodes=max(1, nodes - 1), min_available_nodes=nodes - 1
    )
    strategy.out = str(config["out"])
    zeros = np.zeros(int(config["parameters"]), dtype=np.float32)
    strategy.start(grid=grid, initial_arrays=ArrayRecord([zeros]), num_rounds=int(config["rounds"]))
