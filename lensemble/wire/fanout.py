"""One message for many sessions, encoded once.

Messages to sessions differ by the epoch of the session only, a small number near the front.  What
is before and behind it is encoded once, so that a word to everyone that names everyone costs each
of them a copy of bytes and not an encoding.
"""

import msgspec

from lensemble.wire import codec
from lensemble.wire.fence import Fenced
from lensemble.wire.messages import FromCoordinator

_EPOCH = b"\xa5epoch"
"""The key as msgpack has it; no field before it can hold it, for they are names and hex digits."""


class Fanout:
    """``message`` to any session; ``kind`` is the name of its type.

    Raises:
        FrameError: it cannot be encoded, or is too large for a control frame.
    """

    def __init__(self, message: FromCoordinator) -> None:
        self.kind = type(message).__name__
        if not isinstance(message, Fenced):
            raise TypeError(f"a {self.kind} carries no epoch")
        raw = codec.encode(message)
        epoch = msgspec.msgpack.encode(message.epoch)
        self._before, _, behind = raw.partition(_EPOCH)
        self._behind = behind[len(epoch) :]
        self._known = message.epoch
        self._payload = raw

    def payload(self, epoch: int) -> bytes:
        """The bytes of the message for a session of this epoch; the same object while it is."""
        if epoch != self._known:
            self._known = epoch
            number = msgspec.msgpack.encode(epoch)
            self._payload = b"".join((self._before, _EPOCH, number, self._behind))
        return self._payload
