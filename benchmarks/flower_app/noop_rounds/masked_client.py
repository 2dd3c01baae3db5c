"""Nodes that train in no time, under the SecAgg+ protocol."""

from flwr.app import Context
from flwr.client import Client, ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import NDArrays


class Idle(NumPyClient):
    def fit(self, parameters: NDArrays, _: object) -> tuple[NDArrays, int, dict[str, float]]:
        return parameters, 1, {}


def client_fn(_: Context) -> Client:
    return Idle().to_client()


app = ClientApp(client_fn=client_fn, mods=[secaggplus_mod])
