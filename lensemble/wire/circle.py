"""Who belongs to the federation, as its coordinator tells each node, and notes on the control way.

The coordinator says ``Circle`` when a node joins, as many pages as it takes, and what changes of
it afterwards.  Whether those members live is not in it: they find that out among themselves, see
``lensemble.membership``.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta

from lensemble.wire.fence import Fenced, Label, Message, NodeKey
from lensemble.wire.letters import MAX_LETTER_BYTES

MAX_ADDRESSES = 8
MAX_MEMBERS_PER_PAGE = 256

Reached = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_ADDRESSES)]
"""Where a member takes calls of others; empty: it takes none."""

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Acquaintance(Message, frozen=True, kw_only=True):
    """One node of the federation."""

    node: NodeKey
    name: Label
    addresses: Reached = ()


class Figures(Message, frozen=True, kw_only=True):
    """How often and how patiently members look at each other; see ``membership.profiles``."""

    name: Label
    interval_s: Seconds
    probe_s: Seconds
    probe_rtts: Annotated[float, Meta(ge=0, le=1000)]
    helpers: Annotated[int, Meta(ge=0, le=16)]
    suspicion_s: Seconds
    revive_intervals: Annotated[int, Meta(ge=1, le=1000)]


class Circle(Fenced, frozen=True, kw_only=True, tag=True):
    """Some of the members, or what has changed of them.

    ``fresh`` begins a whole list, which ends with a page that has no ``more``; who is not on it is
    no member.  Other pages add and correct members, and name those that are ``gone``.
    """

    figures: Figures
    fresh: bool = False
    more: bool = False
    members: Annotated[tuple[Acquaintance, ...], Meta(max_length=MAX_MEMBERS_PER_PAGE)] = ()
    gone: Annotated[tuple[NodeKey, ...], Meta(max_length=MAX_MEMBERS_PER_PAGE)] = ()


class MemberNote(Fenced, frozen=True, kw_only=True, tag=True):
    """A note of a member that no datagram could carry; see ``wire.letters``."""

    note: Annotated[bytes, Meta(max_length=MAX_LETTER_BYTES)]


CircleOrder: TypeAlias = Circle | MemberNote
"""What the coordinator says of and among members."""
