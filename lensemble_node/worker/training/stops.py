"""How local training ends without a release."""

import time
from collections.abc import Callable

from lensemble.errors import LensembleError

LONGEST_NAP_S = 0.02
"""Between two looks at whether to stop."""


class Stopped(LensembleError):
    """Training was told to stop; nothing of it is kept."""

    code = "training_stopped"
    default_remediation = "Nothing to do: the round went on without this node, or was aborted."


class Diverged(LensembleError):
    """The loss is not finite."""

    code = "training_diverged"
    default_remediation = "Lower `inner.lr`, or look at the data of the last batches."


def pause(seconds: float, should_stop: Callable[[], bool]) -> None:
    """Let ``seconds`` pass.

    Raises:
        Stopped: ``should_stop``, asked before and meanwhile, answered yes.
    """
    until = time.monotonic() + seconds
    while not should_stop():
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, LONGEST_NAP_S))
    raise Stopped("told to stop during a pause")
