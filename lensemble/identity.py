"""Who a node is: one Ed25519 key, which signs its messages and names its endpoint."""

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lensemble.crash_points import reached
from lensemble.errors import StorageError
from lensemble.ids import NodeId

SEED_BYTES = 32
SIGNATURE_BYTES = 64
_PRIVATE_MODE = 0o600


class Identity:
    """A node's key pair; ``node`` is the public half in hex, ``seed`` the private half."""

    def __init__(self, seed: bytes) -> None:
        self.seed = seed
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.node = NodeId(self._private.public_key().public_bytes_raw().hex())

    def __repr__(self) -> str:
        return f"Identity({self.node})"

    def sign(self, message: bytes) -> bytes:
        """The signature of ``message``: 64 bytes, the same each time."""
        return self._private.sign(message)


def verify(node: NodeId, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` over ``message`` was made with the key of ``node``."""
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(node))
        public.verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def generate() -> Identity:
    """A fresh identity, not stored anywhere."""
    return Identity(os.urandom(SEED_BYTES))


def load(path: Path) -> Identity:
    """The identity stored at ``path``.

    Raises:
        StorageError: not a regular file of 32 bytes that only its owner can read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"cannot read the identity key {path}: {error.strerror}",
            "Restore the file from a copy, or remove it to become a new node.",
        ) from error
    try:
        facts = os.fstat(fd)
        _check_private(path, facts.st_mode)
        seed = os.read(fd, SEED_BYTES + 1)
    finally:
        os.close(fd)
    if len(seed) != SEED_BYTES or facts.st_size != SEED_BYTES:
        raise StorageError(
            f"the identity key {path} has {facts.st_size} bytes; a key has {SEED_BYTES}",
            "Restore the file from a copy, or remove it to become a new node.",
        )
    return Identity(seed)


def _check_private(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise StorageError(f"the identity key {path} is not a regular file")
    if mode & 0o077:
        raise StorageError(
            f"the identity key {path} has mode {stat.S_IMODE(mode):04o}: others can use it",
            f"Run `chmod 600 {path}`; if others may have read it, become a new node instead.",
        )


def load_or_create(path: Path) -> Identity:
    """The identity at ``path``; drawn and stored, with mode 0600, where there is none.

    Raises:
        StorageError: the file cannot be read or written, or is not a private key of 32 bytes.
    """
    if path.exists() or path.is_symlink():
        return load(path)
    fresh = generate()
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, _PRIVATE_MODE)
        with os.fdopen(fd, "wb") as file:
            file.write(fresh.seed)
            file.flush()
            reached("identity.written")
            os.fsync(fd)
        reached("identity.flushed")
        # A link, unlike a rename, keeps the key of another process that was quicker.
        try:
            os.link(part, path)
            reached("identity.named")
        finally:
            os.unlink(part)
        _sync_directory(path.parent)
        reached("identity.listed")
    except FileExistsError:
        return load(path)
    except OSError as error:
        raise StorageError(f"cannot store the identity key {path}: {error.strerror}") from error
    return fresh


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
