"""What the machine asks of whoever runs it, and what it says about members."""

from typing import TypeAlias

import msgspec

from lensemble.ids import NodeId
from lensemble.wire.membership import Message, Standing


class Send(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Send ``message`` to ``to`` if there is a way, once, and never wait for it."""

    to: NodeId
    message: Message


class Changed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A member is held for something else than before, or has restarted.

    ``before`` equals ``after`` if the member restarted and nobody had noticed it gone.
    """

    node: NodeId
    before: Standing
    after: Standing
    incarnation: int
    restarted: bool
    reason: str
    """A short sentence for people."""


Action: TypeAlias = Send | Changed


class Member(msgspec.Struct, frozen=True):
    """One member as this machine sees it; times in seconds of the caller's clock."""

    node: NodeId
    standing: Standing
    incarnation: int
    """0 of a member of which nothing was ever heard."""
    boot: str
    since: float
    """When it came to be held for ``standing``."""
    heard: float | None
    """When something last came from the member itself."""
    flaps: int
    """Times that it was suspected or dead and then alive in the same life."""
    rtt_s: float | None
    """Smoothed round trip time of the direct link."""
