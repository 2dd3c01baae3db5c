"""How local training ends without a release."""

from lensemble.errors import LensembleError


class Stopped(LensembleError):
    """Training was told to stop; nothing of it is kept."""

    code = "training_stopped"
    default_remediation = "Nothing to do: the round went on without this node, or was aborted."


class Diverged(LensembleError):
    """The loss is not finite."""

    code = "training_diverged"
    default_remediation = "Lower `inner.lr`, or look at the data of the last batches."
