"""What is held of one member, and which of two claims about it counts."""

import math

from lensemble.ids import NodeId
from lensemble.membership.outcomes import Member
from lensemble.membership.profiles import CONFIRMATIONS, CONFIRMED_SHARE, Profile
from lensemble.wire.membership import Standing, Update

RANK = {Standing.ALIVE: 0, Standing.SUSPECT: 1, Standing.DEAD: 2, Standing.LEFT: 3}
"""Of two claims of one incarnation that of the higher rank counts."""

_RTT_GAIN = 1 / 8


class Record:
    """One member as it is known here; ``accusers`` and ``began`` are those of a suspicion."""

    __slots__ = (
        "accusers",
        "asked",
        "began",
        "boot",
        "doubt",
        "due",
        "flaps",
        "heard",
        "incarnation",
        "node",
        "rtt_s",
        "since",
        "standing",
        "unaware",
    )

    def __init__(self, node: NodeId, now: float) -> None:
        self.node = node
        self.standing = Standing.ALIVE
        self.incarnation = 0
        self.boot = ""
        self.since = now
        self.heard: float | None = None
        self.flaps = 0
        self.rtt_s: float | None = None
        self.accusers: set[NodeId] = set()
        self.began = 0.0
        self.doubt = 0
        """The worst health of oneself during the suspicion."""
        self.asked = 0
        """How often it was asked itself whether the suspicion is true."""
        self.due = 0.0
        """When the timer of the suspicion is armed for."""
        self.unaware = False
        """Whether its last message showed that it does not know what is held of it."""

    @property
    def present(self) -> bool:
        """Whether it takes part, as far as is known."""
        return self.standing is Standing.ALIVE or self.standing is Standing.SUSPECT

    def outranked_by(self, standing: Standing, incarnation: int) -> bool:
        """Whether that claim counts for more than what is held."""
        if incarnation != self.incarnation:
            return incarnation > self.incarnation
        return RANK[standing] > RANK[self.standing]

    def is_doubted(self) -> bool:
        """Whether it should hear that it is thought of badly."""
        return self.standing is Standing.SUSPECT or self.standing is Standing.DEAD

    def must_be_told(self) -> bool:
        """Whether whoever speaks to it is to tell it first what is held of it."""
        return self.unaware or (self.standing is not Standing.ALIVE and self.is_doubted())

    def stand(self, standing: Standing, now: float, restarted: bool) -> None:
        """Hold it for another ``standing`` as of ``now``."""
        back = standing is Standing.ALIVE and self.standing is not Standing.LEFT
        if back and not restarted and self.heard is not None:
            self.flaps += 1
        self.standing, self.since = standing, now
        self.accusers = set()

    def suspect(self, by: NodeId, here: float) -> None:
        """A suspicion begins."""
        self.accusers = {by}
        self.began, self.due = here, 0.0
        self.doubt = self.asked = 0

    def claim(self) -> Update:
        """What is held, to be told to others."""
        by = min(self.accusers) if self.accusers else None
        return Update(self.node, self.standing, self.incarnation, self.boot, by)

    def measured(self, seconds: float) -> None:
        if self.rtt_s is None:
            self.rtt_s = seconds
        else:
            self.rtt_s += _RTT_GAIN * (seconds - self.rtt_s)

    def wanted(self, others: int) -> int:
        """How many of ``others`` need to confirm before a suspicion is as short as it gets."""
        return max(0, min(CONFIRMATIONS, others))

    def lasts(self, profile: Profile, health: int, others: int) -> float:
        """Seconds from where the suspicion ``began`` to a death.

        Lifeguard's LHA-Suspicion: from the profile's figure down to ``CONFIRMED_SHARE`` of it, by
        the logarithm of how many confirm it.

        Args:
            profile: of all members.
            health: of this member at this moment; the worst during the suspicion counts.
            others: how many members could confirm it.
        """
        self.doubt = max(self.doubt, health)
        wanted = self.wanted(others)
        shorter = 0.0
        if wanted > 0:
            confirmed = min(len(self.accusers) - 1, wanted)
            shorter = math.log(confirmed + 1) / math.log(wanted + 1)
        factor = 1.0 - (1.0 - CONFIRMED_SHARE) * shorter
        return profile.suspicion_s * (self.doubt + 1) * factor

    def shown(self) -> Member:
        return Member(
            node=self.node,
            standing=self.standing,
            incarnation=self.incarnation,
            boot=self.boot,
            since=self.since,
            heard=self.heard,
            flaps=self.flaps,
            rtt_s=self.rtt_s,
        )
