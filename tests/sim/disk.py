"""A disk that forgets what was not flushed when the power goes, and that can be full.

Every entry is one value under one key.  ``write`` is visible at once and durable after ``flush``;
``put`` is both at once, as a file that is written beside, flushed, renamed and flushed again is.
What takes long has two steps in the world: a crash before the first finds nothing done, one after
it finds everything.
"""

import random
from collections.abc import Hashable
from typing import Any

from lensemble.errors import StorageError


class Torn:
    """What a power loss leaves of something that was being written."""

    def __init__(self, was: Any) -> None:
        self.was = was

    def __repr__(self) -> str:
        return f"Torn({self.was})"


class Disk:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._seen: dict[Hashable, Any] = {}
        self._safe: dict[Hashable, Any] = {}
        self.full = False
        self.refused = 0
        self.slow = 1.0
        """Every write takes this many times as long."""

    def read(self, key: Hashable, default: Any = None) -> Any:
        return self._seen.get(key, default)

    def keys(self, kind: str) -> list[Any]:
        """Of the entries whose key is a tuple that begins with ``kind``."""
        return [key for key in self._seen if isinstance(key, tuple) and key[0] == kind]

    def put(self, key: Hashable, value: Any) -> None:
        """Durable on return.

        Raises:
            StorageError: the disk is full.
        """
        self.write(key, value)
        self.flush(key)

    def write(self, key: Hashable, value: Any) -> None:
        """Visible on return, durable at the next flush or by good luck.

        Raises:
            StorageError: the disk is full.
        """
        if self.full:
            self.refused += 1
            raise StorageError(f"no space is left for {key}")
        self._seen[key] = value

    def flush(self, key: Hashable) -> None:
        if key in self._seen:
            self._safe[key] = self._seen[key]
        else:
            self._safe.pop(key, None)

    def remove(self, key: Hashable) -> None:
        """Works on a full disk too; may be undone by a power loss unless flushed."""
        self._seen.pop(key, None)

    def lose_power(self) -> None:
        """Of what was not flushed some is there, some is not, some is torn."""
        for key in {*self._seen, *self._safe}:
            seen, safe = self._seen.get(key), self._safe.get(key)
            if seen is safe:
                continue
            luck = self._chance.random()
            if luck < 0.4:
                self._revert(key)
            elif luck < 0.6 and seen is not None:
                self._seen[key] = Torn(seen)
        self._safe = dict(self._seen)

    def _revert(self, key: Hashable) -> None:
        if key in self._safe:
            self._seen[key] = self._safe[key]
        else:
            self._seen.pop(key, None)
