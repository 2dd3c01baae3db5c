"""What is told over HTTP comes from these parts of the daemon."""

import msgspec

from lensemble_coord.inference.orchestrator import Orchestrator
from lensemble_coord.members import Members
from lensemble_coord.training.coordinator import Rounds
from lensemble_coord.training.status import Observer


class Parts(msgspec.Struct, frozen=True):
    """Those that answer, and those that figures are of."""

    observer: Observer
    rounds: Rounds
    orchestrator: Orchestrator
    circle: Members
