"""The last look at a control message before it leaves: nothing that could be payload passes.

The types are closed and their decoder is strict, but a decoder guards the other side.  Here every
value is held against what its message may carry, so that a mistake in this process fails closed.
"""

import msgspec

from lensemble.errors import ResidencyViolation
from lensemble.wire import codec, messages
from lensemble.wire.messages import FromNode

MAX_BYTES = 64
"""The longest value of bytes: a signature, an invite."""

MAX_TEXT = 500
MAX_INTEGERS = messages.MAX_EDGES_PER_NODE
MAX_PAYLOAD_BYTES = 8192
"""No message of a node needs more, encoded."""

MEASURED = frozenset({"l2_norm", "loss"})
"""The only fields that may hold a real number."""

_ALLOWED = (
    messages.Join,
    messages.Leave,
    messages.Provisioned,
    messages.TornDown,
    messages.EdgeLost,
    messages.Commitment,
    messages.Progress,
    messages.Update,
    messages.Fault,
)


def permit(message: FromNode) -> bytes:
    """The payload of ``message``.

    Raises:
        ResidencyViolation: a type that no node sends, or a value that no message of a node holds.
    """
    kind = type(message)
    if kind not in _ALLOWED:
        raise ResidencyViolation(f"a node does not send {kind.__name__}")
    for field in msgspec.structs.fields(kind):
        _check(f"{kind.__name__}.{field.name}", field.name, getattr(message, field.name))
    payload = codec.encode(message)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ResidencyViolation(f"{kind.__name__} takes {len(payload)} bytes; {MAX_PAYLOAD_BYTES}")
    return payload


def _check(where: str, name: str, value: object) -> None:
    match value:
        case None | bool():
            return
        case int():
            fits = -1 <= value < 1 << 63
        case str():
            fits = len(value) <= MAX_TEXT
        case bytes():
            fits = len(value) <= MAX_BYTES
        case float():
            fits = name in MEASURED
        case tuple():
            whole = all(type(part) is int and 0 <= part < 1 << 64 for part in value)
            fits = whole and len(value) <= MAX_INTEGERS
        case _:
            fits = False
    if not fits:
        raise ResidencyViolation(f"{where} may not hold a {type(value).__name__} like this one")
