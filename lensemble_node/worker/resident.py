"""Parameters and outer momentum in this worker's memory, where a step is taken in place.

A state of some hundred megabytes that is written and read again in every round costs a node more
than the step itself.  So a worker that follows from state to state keeps the one that it has come
to in memory, and puts it down when it has nothing else to do.  Very large states do not fit, small
ones are not worth it: both stay in files.
"""

import mmap
import resource

import numpy as np

from lensemble.params import FlatParameters, ParamLayout

FROM_BYTES = 16 << 20
"""Parameters of fewer bytes are stepped from file to file."""
TO_BYTES = 1 << 30
"""So much of parameters and momentum together is kept in memory, and no more."""
_PART_OF_LIMIT = 8
"""Where the address space of this process is limited, no larger part of it is taken."""


def is_worth_it(layout: ParamLayout) -> bool:
    """Whether a state of ``layout``, with its momentum, is to be kept in memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    most = TO_BYTES if limit == resource.RLIM_INFINITY else min(TO_BYTES, limit // _PART_OF_LIMIT)
    return layout.nbytes >= FROM_BYTES and 2 * layout.nbytes <= most


class Resident:
    """Room for one state: ``parameters`` and ``velocity``, float32, shape ``(layout.size,)``.

    Raises:
        OSError: there is no memory for it.
    """

    def __init__(self, layout: ParamLayout) -> None:
        self.parameters = _room(layout)
        self.velocity = _room(layout)


def _room(layout: ParamLayout) -> FlatParameters:
    room = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # 4 KiB at a time, filling and walking it costs several times as many faults and misses.
    room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, dtype="<f4")
