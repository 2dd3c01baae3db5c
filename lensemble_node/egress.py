"""The last look at a control message before it leaves: nothing that could be payload passes.

The types are closed and their decoder is strict, but a decoder guards the other side.  Here every
value is held against what its message may carry, so that a mistake in this process fails closed.

Free text leaves in one place only: ``StageFault`` has the last lines of a stage's worker.  That one
computes a model which the coordinator named, is started in an environment of its own and is told
nothing of this node's data; the worker that sees them is another, and its lines stay here.
"""

import msgspec

from lensemble.errors import LensembleError, ResidencyViolation
from lensemble.wire import circle, codec, letters, membership, messages, stages
from lensemble.wire.messages import FromNode

MAX_BYTES = 64
"""The longest value of bytes where ``LONGER`` says nothing else: a signature, an invite."""

MAX_TEXT = 500
MAX_INTEGERS = messages.MAX_EDGES_PER_NODE
MAX_PIECES = 128
"""Sealed shares in one message: as many as a node has neighbours."""

MAX_PAYLOAD_BYTES = 1 << 15
"""No message of a node needs more, encoded, but those of ``LARGER``."""

LARGER = {stages.StageFault: 1 << 18, stages.StageWants: 1 << 17}

LINES = {
    "Inventory.addresses": (stages.MAX_ADDRESSES, 64),
    "Inventory.linked": (stages.MAX_LINKED, 64),
    "Join.addresses": (circle.MAX_ADDRESSES, 64),
    "StageFault.stderr": (stages.STDERR_LINES, MAX_TEXT),
}
"""The only lists of text: how many, and of how many characters each."""

PAIRS = {"StageSeen.recent": stages.MAX_TIMES, "StageWants.ranges": stages.MAX_RANGES}
"""The only lists of pairs of integers, and how many they may be."""

ROWS = {"StageSeen.timeline": (stages.MAX_TIMELINE, 6)}
"""The only lists of rows of integers: how many, and of how many each."""

LONGER = {
    "MemberNote.note": letters.MAX_LETTER_BYTES,
    "Shares.commitments": 1 << 13,
    "Shares.sealed": 92,
    "UnmaskAnswer.shares": 1 << 13,
}
"""Notes of members, which are read first; public points and shares of masks, in bytes; of
``sealed`` each."""

MEASURED = frozenset({"StageReady.seconds", "Update.epsilon", "Update.l2_norm", "Update.loss"})
"""The only fields that may hold a real number."""

_ALLOWED = (
    messages.Join,
    messages.Leave,
    messages.Provisioned,
    messages.TornDown,
    messages.EdgeLost,
    messages.Commitment,
    messages.Shares,
    messages.Progress,
    messages.Update,
    messages.UnmaskAnswer,
    messages.Fault,
    stages.Inventory,
    stages.StageWants,
    stages.StageProgress,
    stages.StageReady,
    stages.StageOpened,
    stages.StageSeen,
    stages.StageRefused,
    stages.StageFault,
    stages.StageTornDown,
    stages.BurstReady,
    stages.BurstTaken,
    stages.BurstRefused,
    circle.MemberNote,
)


def permit(message: FromNode) -> bytes:
    """The payload of ``message``.

    Raises:
        ResidencyViolation: a type that no node sends, or a value that no message of a node holds.
    """
    if type(message) not in _ALLOWED:
        raise ResidencyViolation(f"a node does not send {type(message).__name__}")
    _check_fields(message)
    if isinstance(message, circle.MemberNote):
        _check_note(message.note)
    payload = codec.encode(message)
    most = LARGER.get(type(message), MAX_PAYLOAD_BYTES)
    if len(payload) > most:
        name = type(message).__name__
        raise ResidencyViolation(f"{name} takes {len(payload)} bytes, over {most}")
    return payload


def permit_gossip(message: membership.Message) -> bytes:
    """The datagram of ``message``, which holds nothing but who is held for what.

    Raises:
        ResidencyViolation: its receiver would not take it for one.
    """
    datagram = membership.encode(message)
    _check_gossip(datagram)
    return datagram


def _check_note(note: bytes) -> None:
    try:
        message = letters.unseal(note).message
    except LensembleError as error:
        raise ResidencyViolation(f"MemberNote.note holds no note: {error.message}") from error
    _check_gossip(message)


def _check_gossip(datagram: bytes) -> None:
    try:
        membership.decode(datagram)
    except LensembleError as error:
        raise ResidencyViolation(f"gossip that is none: {error.message}") from error


def _check_fields(message: msgspec.Struct) -> None:
    kind = type(message)
    for field in kind.__struct_fields__:
        where, value = f"{kind.__name__}.{field}", getattr(message, field)
        if type(value) is messages.MaskKeys:
            _check_fields(value)
        elif not (_fits_all(where, value) if isinstance(value, tuple) else _fits(where, value)):
            raise ResidencyViolation(f"{where} may not hold a {type(value).__name__} like this one")


def _fits_all(where: str, parts: tuple[object, ...]) -> bool:
    if where in LINES:
        count, characters = LINES[where]
        texts = all(type(part) is str and len(part) <= characters for part in parts)
        return texts and len(parts) <= count
    if where in PAIRS:
        return len(parts) <= PAIRS[where] and all(_is_row(where, part, 2) for part in parts)
    if where in ROWS:
        count, width = ROWS[where]
        return len(parts) <= count and all(_is_row(where, part, width) for part in parts)
    if all(type(part) is int for part in parts):
        return len(parts) <= MAX_INTEGERS and all(_fits(where, part) for part in parts)
    # Bytes only where pieces of them are due, so that nothing is cut up to get out.
    pieces = where in LONGER and all(type(part) is bytes for part in parts)
    return pieces and len(parts) <= MAX_PIECES and all(_fits(where, part) for part in parts)


def _is_row(where: str, part: object, width: int) -> bool:
    return (
        type(part) is tuple
        and len(part) == width
        and all(type(each) is int and _fits(where, each) for each in part)
    )


def _fits(where: str, value: object) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return -1 <= value < 1 << 63
        case str():
            return len(value) <= MAX_TEXT
        case bytes():
            return len(value) <= LONGER.get(where, MAX_BYTES)
        case float():
            return where in MEASURED
        case _:
            return False
