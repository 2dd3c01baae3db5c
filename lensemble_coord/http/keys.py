"""The keys that clients show, from files that only the daemon's user and group can read."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from lensemble.errors import ConfigError

MIN_KEY_CHARS = 16
MAX_KEYS = 1024
MAX_FILE_BYTES = 1 << 18


class Keys:
    """Those that are let in; without any, everybody is.

    Only their digests stay in memory.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(each) for each in keys]

    @property
    def asked(self) -> bool:
        """Whether a client has to show one."""
        return bool(self._digests)

    def admit(self, authorization: str) -> bool:
        """Whether the header ``Authorization: Bearer KEY`` opens."""
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip())
        known = [hmac.compare_digest(shown, each) for each in self._digests]
        return not known or (scheme.lower() == "bearer" and any(known))


def read(paths: Iterable[Path]) -> Keys:
    """One key a line; empty lines and those that begin with ``#`` are passed over.

    Raises:
        ConfigError: a file cannot be read, is open to everybody, or has a key that is too short.
    """
    keys: list[str] = []
    for path in paths:
        found = [line.strip() for line in _text(path).splitlines()]
        mine = [line for line in found if line and not line.startswith("#")]
        if not mine or min(map(len, mine)) < MIN_KEY_CHARS:
            raise ConfigError(
                f"http.api_keys: {path} has no key, or one under {MIN_KEY_CHARS} characters",
                f"Write one with `umask 077; openssl rand -hex 24 > {path}`.",
            )
        keys += mine
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"http.api_keys: {len(keys)} keys; {MAX_KEYS} are the most")
    return Keys(keys)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES)
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"http.api_keys: {path} cannot be read: {error.strerror}",
            "Name a file that the daemon's user may read.",
        ) from error
    if mode & 0o007:
        raise ConfigError(
            f"http.api_keys: everybody on this host may read or change {path}",
            f"chmod o= {path}",
        )
    return raw.decode(errors="replace")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
