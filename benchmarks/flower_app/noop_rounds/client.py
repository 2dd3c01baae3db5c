"""Nodes that train in no time: each answers with what it was sent and a drawn update on it."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

REACH = 1e-3

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Our no-op task draws its update from the same generator.

    Flower moves equal pieces of arrays once, so one that nothing changed would cost nothing.
    """
    (array,) = message.content["arrays"].to_numpy_ndarrays()
    generator = np.random.Generator(
        np.random.SFC64([context.node_id, int(message.metadata.created_at * 1e6)])
    )
    update = generator.random(array.shape, dtype=np.float32)
    update -= np.float32(0.5)
    update *= np.float32(2 * REACH)
    update += array
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord([update]), "metrics": metrics})
    return Message(content=content, reply_to=message)
