"""What a follower of a group does with the orders of rank 0."""

import sys
from pathlib import Path
from typing import NoReturn

from lensemble.errors import DatasetError, TaskError, WorkerFault
from lensemble.ids import Digest
from lensemble.workload import Workload
from lensemble_node.worker.port import Port
from lensemble_node.worker.seat import Begin, Order, Run, Seat
from lensemble_node.worker.training.kinds import work_for
from lensemble_node.worker.training.source import source_of
from lensemble_node.worker.training.stops import Diverged, Stopped


class Follower:
    """One process's part of the training of ``begin``; raises as ``Trainer`` does."""

    def __init__(self, seat: Seat, begin: Begin) -> None:
        configure = begin.configure
        workload = Workload.model_validate_json(configure.workload)
        source = source_of(configure, workload)
        work = work_for(workload, source, configure.node, configure.threads)
        self._team = work.join(seat, begin.rendezvous, configure.device)
        if workload.objective.probe_hash:
            work.pin(Path(configure.probe), Digest(workload.objective.probe_hash))
        self._team.crew.ready()

    def obey(self, port: Port[Order]) -> NoReturn:
        """Take part until rank 0 is gone.

        Raises:
            DaemonGone: it is.
            GroupLost: a process is gone or hangs in the middle of a step.
        """
        while True:
            match port.wait():
                case Run() as run:
                    self._run(run)
                case order:
                    raise WorkerFault(f"{type(order).__name__} came twice")

    def _run(self, run: Run) -> None:
        try:
            self._team.follow(run)
        except (Stopped, Diverged, TaskError, DatasetError) as error:
            # All have agreed to end here, and rank 0 says why.  Anything else ends the group.
            print(f"{type(error).__name__}: {error.message}", file=sys.stderr)  # noqa: T201
