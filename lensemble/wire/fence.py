"""What every message carries: its limits, and the fence that tells whose and of when it is.

All messages are tagged, frozen and closed: an unknown field, a wrong type or a value over its limit
is refused when it is decoded.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from lensemble.ids import Digest, FederationId, NodeId

MAX_PARTICIPANTS = 4096
MAX_SENTENCE_CHARS = 500
MAX_STAGES = 64

Hex64 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
NodeKey: TypeAlias = Annotated[NodeId, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Hash: TypeAlias = Annotated[Digest, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Federation: TypeAlias = Annotated[FederationId, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Label = Annotated[str, Meta(max_length=64)]
RunId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Sentence = Annotated[str, Meta(max_length=MAX_SENTENCE_CHARS)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
SealedShares = Annotated[bytes, Meta(min_length=92, max_length=92)]
Nodes = Annotated[tuple[NodeKey, ...], Meta(max_length=MAX_PARTICIPANTS)]


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Fenced(Message, frozen=True, kw_only=True, tag=True):
    federation: Federation
    epoch: Count
    """Counts the sessions of one node identity; given in ``Welcome``."""


class OfRound(Fenced, frozen=True, kw_only=True, tag=True):
    round: Count
    attempt: Count


class OfRun(Fenced, frozen=True, kw_only=True, tag=True):
    """Of one run of a model over several nodes."""

    run: RunId
    run_epoch: Count
    """Counts the plans of a run; a stage of an older plan is fenced off."""

    stage: Annotated[int, Meta(ge=0, lt=MAX_STAGES)]


def sentence(text: str) -> str:
    """``text`` as a ``Sentence`` may carry it: shortened, and without what UTF-8 cannot hold."""
    whole = text.encode(errors="replace").decode()
    if len(whole) <= MAX_SENTENCE_CHARS:
        return whole
    return whole[: MAX_SENTENCE_CHARS - 3] + "..."
