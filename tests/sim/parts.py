"""What a simulated life is made of: the machines, and the classes around them.

The machines are those of the daemons.  A test that asks whether the checks see anything puts a
broken part in place of a right one.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from lensemble_coord.training import outer_round
from lensemble_node import participation, provision
from tests.sim.books import Books
from tests.sim.coord_host import CoordinatorHost
from tests.sim.mask_side import SimSecrets
from tests.sim.node_host import NodeHost
from tests.sim.session import SimSession
from tests.sim.worker import SimWorker

Transition = Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]


class Parts(msgspec.Struct, frozen=True):
    round: Transition = outer_round.transition
    participation: Transition = participation.transition
    provision: Transition = provision.transition
    books: type[Books] = Books
    coordinator: type[CoordinatorHost] = CoordinatorHost
    node: type[NodeHost] = NodeHost
    session: type[SimSession] = SimSession
    worker: type[SimWorker] = SimWorker
    secrets: type[SimSecrets] = SimSecrets


RIGHT = Parts()
