import os
from pathlib import Path

import pytest

from lensemble import identity
from lensemble.errors import StorageError
from lensemble.ids import NodeId


def test_a_key_is_drawn_once_and_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == first.seed
    assert identity.load_or_create(path).node == first.node
    assert identity.generate().node != first.node
    assert os.listdir(tmp_path) == ["identity.key"]
    assert first.seed.hex() not in repr(first)


def test_a_signature_binds_signer_and_message() -> None:
    one, other = identity.generate(), identity.generate()
    signature = one.sign(b"message")
    assert len(signature) == identity.SIGNATURE_BYTES
    assert identity.verify(one.node, signature, b"message")
    assert not identity.verify(other.node, signature, b"message")
    assert not identity.verify(one.node, signature, b"massage")
    assert not identity.verify(one.node, signature[:-1], b"message")
    assert not identity.verify(NodeId("no hex"), signature, b"message")
    assert not identity.verify(NodeId("00"), signature, b"message")


def test_the_node_id_of_a_known_seed() -> None:
    """RFC 8032, test 1: other programs derive the same name from the same key."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert identity.Identity(seed).node == public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "identity.key"
    identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(StorageError, match=f"{path} has mode {mode:04o}"):
        identity.load_or_create(path)


@pytest.mark.parametrize("size", [0, 31, 33, 5000])
def test_a_key_of_wrong_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(StorageError, match=f"{path} has {size} bytes"):
        identity.load_or_create(path)


def test_only_a_plain_file_is_a_key(tmp_path: Path) -> None:
    real, link = tmp_path / "real.key", tmp_path / "identity.key"
    identity.load_or_create(real)
    link.symlink_to(real)
    with pytest.raises(StorageError, match=str(link)):
        identity.load_or_create(link)
    with pytest.raises(StorageError, match=str(tmp_path)):
        identity.load(tmp_path)
    with pytest.raises(StorageError, match="No such file"):
        identity.load(tmp_path / "missing.key")


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        identity.load_or_create(tmp_path / "nowhere" / "identity.key")
