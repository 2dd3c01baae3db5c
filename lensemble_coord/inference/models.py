"""Model files: a path of this host or a URL, what its header says, and digests of its tensors.

A header is read in a moment and is all that a plan needs.  Digests take a pass over the whole file,
once: they are kept, with what tells whether the file is still the same.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from lensemble import files, gguf, model_header
from lensemble.errors import ConfigError, StorageError, WeightsChanged
from lensemble.http_ranges import Patience, RangeReader, Stopped
from lensemble.ids import Digest
from lensemble.model_facts import ModelFacts, manifest_digest
from lensemble.wire.stages import TensorPart

MAX_KEPT = 64
"""Models whose digests are kept."""

MAX_DIGESTS_BYTES = 8 << 20


class FileState(msgspec.Struct, frozen=True):
    """What tells one state of a file from another."""

    nbytes: int
    mtime_ns: int
    inode: int


class Model(msgspec.Struct, frozen=True):
    """``path`` is set for a file of this host, ``url`` for any other."""

    facts: ModelFacts
    tensors: tuple[TensorPart, ...]
    """By offset; with digests once ``with_digests`` was asked."""

    metadata: Mapping[str, gguf.Value]
    path: Path | None = None
    url: str = ""
    state: FileState | None = None

    @property
    def digest(self) -> Digest:
        """The model's identity, with whatever digests of tensors are known."""
        return manifest_digest(self.facts, self.tensors)


class _Kept(msgspec.Struct, frozen=True):
    path: str
    state: FileState
    digests: dict[str, str]


def is_url(place: str) -> bool:
    """Whether ``place`` is meant as one."""
    return place.startswith(("http://", "https://"))


def read(
    place: str,
    should_stop: Callable[[], bool] = lambda: False,
    patience: Patience | None = None,
) -> Model:
    """Header and facts of the model at ``place``; blocking.

    Raises:
        ConfigError: no whole path, or no such file.
        ModelFileError, UnsupportedModel: see ``gguf.parse`` and ``model_header.facts_of``.
        WeightsError: the URL does not answer as it should, by its subclass.
        Stopped: asked to.
    """
    if is_url(place):
        reader = RangeReader(place, should_stop, patience)
        reader.read(0, len(gguf.MAGIC))
        nbytes = reader.identity.file_bytes if reader.identity else 0
        header = gguf.parse(reader.read, nbytes)
        return _model(header, url=place)
    path = Path(place)
    if not path.is_absolute():
        raise ConfigError(f"{place} is no whole path", "Name the model by its whole path.")
    if not path.is_file():
        raise ConfigError(f"{path} is no file", "Name a GGUF file of the coordinator's host.")
    state = _state(path)
    model = _model(gguf.parse_file(path), path=path, state=state)
    if _state(path) != state:
        raise WeightsChanged(f"{path} changed while its header was read")
    return model


def with_digests(
    model: Model,
    directory: Path,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Model:
    """``model`` with the BLAKE3 of every tensor, if it is a file of this host; blocking.

    Args:
        model: as ``read`` gave it.
        directory: where digests are kept; made if absent.
        progress: told bytes done and in total.
        should_stop: asked often.

    Raises:
        WeightsChanged: the file is not the one that was read.
        StorageError: the file or ``directory`` cannot be used.
        Stopped: asked to.
    """
    path, state = model.path, model.state
    if path is None or state is None:
        return model
    if _state(path) != state:
        raise WeightsChanged(f"{path} changed since its header was read")
    kept = directory / f"{blake3(os.fsencode(path)).hexdigest()}.json"
    digests = _recall(kept, path, state)
    if digests is None or any(tensor.name not in digests for tensor in model.tensors):
        digests = _compute(path, model.tensors, progress, should_stop)
        if _state(path) != state:
            raise WeightsChanged(f"{path} changed while its digests were computed")
        _keep(kept, _Kept(str(path), state, digests))
    return msgspec.structs.replace(
        model,
        tensors=tuple(
            msgspec.structs.replace(tensor, digest=Digest(digests[tensor.name]))
            for tensor in model.tensors
        ),
    )


def _model(
    header: gguf.Header, *, path: Path | None = None, url: str = "", state: FileState | None = None
) -> Model:
    facts, parts = model_header.facts_of(header), model_header.parts_of(header)
    return Model(facts, parts, header.metadata, path, url, state)


def _state(path: Path) -> FileState:
    with files.storage(path):
        found = path.stat()
    return FileState(found.st_size, found.st_mtime_ns, found.st_ino)


def _compute(
    path: Path,
    tensors: tuple[TensorPart, ...],
    progress: Callable[[int, int], None],
    should_stop: Callable[[], bool],
) -> dict[str, str]:
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    digests = {}
    with files.storage(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for tensor in tensors:
                running = blake3()
                end = tensor.offset + tensor.nbytes
                for piece in files.read_pieces(fd, tensor.offset, end):
                    if should_stop():
                        raise Stopped
                    running.update(piece)
                    done += piece.nbytes
                    progress(done, total)
                digests[tensor.name] = running.hexdigest()
        finally:
            os.close(fd)
    return digests


def _recall(kept: Path, path: Path, state: FileState) -> dict[str, str] | None:
    """Digests that were computed of this very state of the file."""
    if not kept.exists():
        return None
    try:
        found = msgspec.json.decode(files.read_limited(kept, MAX_DIGESTS_BYTES), type=_Kept)
    except (msgspec.DecodeError, StorageError):
        return None
    return found.digests if (found.path, found.state) == (str(path), state) else None


def _keep(kept: Path, what: _Kept) -> None:
    with files.storage(kept):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(kept.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
        for old in others[: max(len(others) - MAX_KEPT + 1, 0)]:
            old.unlink(missing_ok=True)
    files.write_durably(kept, msgspec.json.encode(what, order="sorted"))
