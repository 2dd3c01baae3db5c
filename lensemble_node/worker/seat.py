"""A process's place among several that train as one, and what the first tells the others.

Orders are JSON lines on the standard input of each follower; no tensor is in them.
"""

import os
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from lensemble.errors import WorkerFault
from lensemble_node import signals

MAX_RANKS = 64
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Begin(signals.SignalLine, frozen=True, kw_only=True, tag=True):
    """First order: open the data, then meet the others in the file ``rendezvous``."""

    configure: signals.Configure
    rendezvous: str


class Run(signals.SignalLine, frozen=True, kw_only=True, tag=True):
    """Take part in these steps; where they start comes by broadcast."""

    steps: _Count
    global_step: _Count
    sketch_seed: _Count
    stream: str


Order: TypeAlias = Begin | Run
_DECODER: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


def parse(line: bytes) -> Order:
    """One order; raises ``WorkerFault`` for anything else."""
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError as error:
        raise WorkerFault(f"not an order to a process of a group: {error}") from error


@dataclass(frozen=True)
class Seat:
    """``orders``: where the first process writes to each of the others.

    ``timeout_s``: how long one may let the others wait in the middle of a step.
    """

    rank: int
    ranks: int
    timeout_s: float
    orders: tuple[int, ...] = ()

    def order(self, order: Order) -> None:
        """Tell every follower.

        Raises:
            GroupLost: one is gone.
        """
        line = signals.line(order)
        for sink in self.orders:
            left = memoryview(line)
            try:
                while left.nbytes:
                    left = left[os.write(sink, left) :]
            except BrokenPipeError as error:
                raise GroupLost("a process of the group is gone") from error


class GroupLost(Exception):
    """A process of the group is gone or hangs: this one has nothing left to do but end."""


ALONE = Seat(0, 1, 0.0)
