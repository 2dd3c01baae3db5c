"""How often and how patiently members look at each other: three sets of figures."""

import msgspec

CONFIRMATIONS = 3
"""Other accusers after which a suspicion is as short as it gets (Lifeguard's K)."""

CONFIRMED_SHARE = 0.8
"""Of the time of a suspicion that nobody confirms: what one lasts that enough others confirm."""

MAX_HEALTH = 8
"""The worst local health (Lifeguard's S)."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds; of a member in good health, whose multiplier is 1."""

    name: str
    interval_s: float
    """Between two probes of one member."""
    probe_s: float
    """Least time that a probe waits for its answer, and again for that of helpers."""
    probe_rtts: float
    """The same in smoothed round trip times of the link, where that is more."""
    helpers: int
    suspicion_s: float
    """From suspect to dead if nobody confirms; ``CONFIRMED_SHARE`` of that if enough others do."""
    revive_intervals: int = 4
    """A dead member is probed each so many intervals, in case it is only our link that was cut."""

    def probe_timeout(self, rtt_s: float | None, health: int = 0) -> float:
        """Seconds that a probe over a link of this smoothed round trip time waits."""
        patience = max(self.probe_s, self.probe_rtts * (rtt_s or 0.0))
        return patience * (health + 1)


LAN = Profile(name="lan", interval_s=1.0, probe_s=0.5, probe_rtts=0.0, helpers=2, suspicion_s=4.0)
WAN = Profile(name="wan", interval_s=2.0, probe_s=1.5, probe_rtts=4.0, helpers=2, suspicion_s=12.5)
RELAY = Profile(
    name="relay", interval_s=5.0, probe_s=5.0, probe_rtts=8.0, helpers=2, suspicion_s=30.0
)
PROFILES = {profile.name: profile for profile in (LAN, WAN, RELAY)}
