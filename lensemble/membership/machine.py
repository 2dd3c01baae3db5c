"""The membership machine of one member."""

from lensemble.ids import NodeId
from lensemble.membership.outcomes import Action, Member
from lensemble.membership.profiles import Profile
from lensemble.wire.fence import MAX_PARTICIPANTS
from lensemble.wire.membership import Message

MAX_MEMBERS = MAX_PARTICIPANTS + 1
"""The nodes of a roster and the coordinator."""


class Membership:
    """What one member knows of the others, and its part in keeping that true.

    It does no IO and reads no clock: ``now`` is in seconds of any clock that never goes back.
    Actions are to be performed in order.  After every call, ``next_due`` says when ``tick`` is to
    be called next.

    Args:
        self_id: whose machine this is.
        boot: 16 lower-case hex digits drawn at process start.
        profile: the figures; the same for all members.
        seed: of the order of probes and the choice of helpers; equal seeds and equal calls give
            equal actions.
    """

    def __init__(self, self_id: NodeId, boot: str, profile: Profile, seed: int) -> None:
        raise NotImplementedError

    @property
    def health(self) -> int:
        """0 if all is well here, up to ``MAX_HEALTH`` if this member had better doubt itself."""
        raise NotImplementedError

    @property
    def incarnation(self) -> int:
        """One's own."""
        raise NotImplementedError

    def learn(self, node: NodeId, now: float) -> tuple[Action, ...]:
        """``node`` belongs to the federation; nothing happens if that is known, or is oneself.

        Raises:
            InvariantError: there are ``MAX_MEMBERS`` already.
        """
        raise NotImplementedError

    def forget(self, node: NodeId) -> None:
        """``node`` is not of the federation; nothing of it is kept, and nothing is said."""
        raise NotImplementedError

    def heard(self, message: Message, sender: NodeId, now: float) -> tuple[Action, ...]:
        """``message`` has come on a connection that belongs to ``sender``.

        A message of an unknown sender, and an update about an unknown member, is ignored.
        """
        raise NotImplementedError

    def rtt(self, node: NodeId, seconds: float) -> None:
        """The link to ``node`` was measured; answers to probes are measured without this."""
        raise NotImplementedError

    def tick(self, now: float) -> tuple[Action, ...]:
        """Do what is due at ``now``; calling early or late does no harm."""
        raise NotImplementedError

    def leave(self, now: float) -> tuple[Action, ...]:
        """Say goodbye; from here on the machine only repeats that to whoever probes it."""
        raise NotImplementedError

    def next_due(self) -> float | None:
        """When ``tick`` is due; None if there is nobody to look after."""
        raise NotImplementedError

    def members(self) -> tuple[Member, ...]:
        """All others that are known, in order of their ids; oneself is not among them."""
        raise NotImplementedError

    def member(self, node: NodeId) -> Member | None:
        """The same of one; None if it is not known."""
        raise NotImplementedError
