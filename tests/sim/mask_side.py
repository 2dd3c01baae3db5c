"""What a scripted node does about masks, what it may never do, and the checker of both.

No key agrees with anything here.  A released vector is an id; a node draws a new one for each
round, and within a round as soon as it has answered for a sum that the old one is part of.
"""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from lensemble.ids import Digest, NodeId
from lensemble.wire import messages

At = tuple[int, int]


def digest_of(*parts: object) -> Digest:
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


class Request(msgspec.Struct, frozen=True):
    """One sum that a coordinator asked to unmask, and with whose answers it could."""

    round: int
    attempt: int
    survivors: tuple[NodeId, ...]
    dropouts: tuple[NodeId, ...]


class MaskSide:
    """The mask secrets of one life of a node, and the releases that outlive it."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.renews = True
        self.releases: dict[At, Digest] = {}
        """Durable: the id of the vector that was sent in each attempt."""
        self.answered: dict[At, tuple[NodeId, ...]] = {}
        """Durable before the answer leaves: for which survivors."""
        self.secrets: At | None = None

    def die(self) -> None:
        """Secrets of an attempt are kept in memory alone."""
        self.secrets = None

    def keys(self, at: At) -> messages.MaskKeys:
        self.secrets = at
        key = bytes.fromhex(digest_of(self.node, "keys", at))
        return messages.MaskKeys(mask_key=key, share_key=key, self_commitment=key)

    def release(self, at: At) -> Digest:
        """The vector to send: that of an earlier attempt of the round, unless it is spent."""
        earlier = max((each for each in self.releases if each[0] == at[0]), default=None)
        spent = self.renews and earlier in self.answered
        reused = earlier is not None and not spent
        release = self.releases[earlier] if reused and earlier else digest_of(self.node, at)
        self.releases[at] = release
        return release

    def may_answer(self, at: At, survivors: tuple[NodeId, ...]) -> bool:
        """Once for an attempt, with the secrets of this life, for a sum it is part of."""
        if at in self.answered or self.secrets != at or self.node not in survivors:
            return False
        self.answered[at] = survivors
        return True


def check_masks(requests: Sequence[Request], sides: Iterable[MaskSide]) -> None:
    """Nobody answered for two sets in one attempt, or sent a vector again after it answered."""
    assert len({(each.round, each.attempt) for each in requests}) == len(requests)
    by_attempt = {(each.round, each.attempt): each for each in requests}
    for request in requests:
        assert not set(request.survivors) & set(request.dropouts)
    for side in sides:
        for at, survivors in side.answered.items():
            assert by_attempt[at].survivors == survivors
            later = {release for when, release in side.releases.items() if when > at}
            assert side.releases[at] not in later, "a vector was sent again after an answer"
