"""What a node's training keeps on disk: its own state, the candidate in flight, the release.

``local/`` holds head, optimiser and cursor of the last round that counted, and what rounding left
of its vector.  Training leaves a candidate in ``local/pending-<t>/`` and the released vector in
``release/round-<t>.u32`` with a JSON sidecar, written last: with it, the round is trained.
Adopting renames the candidate to ``local/adopt-<t>/``, the one step that decides, and then moves
its files; a crash between the two is finished at the next start.

Vector and residual are large.  They are flushed where a release is charged to a budget, so that no
loss of power makes a node pay twice for one round.  Elsewhere such a loss costs the training of the
round in flight, or what rounding left of one update; the sidecar, which is always flushed, still
says that there was a release, so that it can be spent.
"""

import hashlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import ArtifactError, CheckpointIntegrityError
from lensemble.ids import Digest
from lensemble.params import ParamLayout
from lensemble.secagg.field import FieldVector
from lensemble_node.worker.training.gauge import Drift
from lensemble_node.worker.training.storage import PART, replacing, write_atomically
from lensemble_node.worker.training.tag import Running, Tag
from lensemble_node.worker.training.words import RESIDUAL, Residual, Words

HEAD, OPTIMIZER, CURSOR = "head.safetensors", "optimizer.safetensors", "cursor.json"
_FILES = (HEAD, OPTIMIZER, CURSOR, RESIDUAL)
_HASH_BYTES = 1 << 20

Arrays: TypeAlias = dict[str, NDArray[np.float32]]


class Cursor(msgspec.Struct, frozen=True):
    """Batches drawn so far, the round that ended there, and the workload it belongs to."""

    batches: int = 0
    round_index: int = -1
    config_hash: str = ""


class Sidecar(msgspec.Struct, frozen=True):
    """What a released vector was made of, and its digest, by which it is known on this node."""

    round_index: int
    attempt: int
    prior: Digest
    config_hash: Digest
    dataset_root: Digest
    sketch_seed: int
    vector: Digest
    l2_norm: float
    max_abs: float
    loss_first: float
    loss_last: float
    clip_factor: float | None = None
    drift: Drift | None = None
    plan: bytes = b""
    """Of the field, as ``FieldPlan`` takes it."""


class Spent(msgspec.Struct, frozen=True):
    """The released vector that must not be sent again, by its digest; None if none was there."""

    vector: Digest | None


class LocalStore:
    """The files under one state directory; ``charged`` says whether releases cost a budget.

    Raises:
        StorageError: from here and every method that writes: the file system refuses.
    """

    def __init__(self, state_dir: Path, *, charged: bool = False) -> None:
        self._charged = charged
        self._local = state_dir / "local"
        self._releases = state_dir / "release"
        with files.storage(state_dir):
            for place in (self._local, self._releases):
                files.make_directory(place)
            for path in (*self._local.iterdir(), *self._releases.iterdir()):
                if path.name.endswith(PART):
                    _remove(path)
                elif path.name.startswith("adopt-"):
                    self._move_in(path)

    # ---- this node's own state ----

    def read(self) -> tuple[Arrays, Arrays, Cursor]:
        """Head, optimiser (float32 arrays by name) and cursor; empty before the first round.

        Raises:
            CheckpointIntegrityError: a file is damaged or missing beside the others.
        """
        if not (self._local / CURSOR).exists():
            return {}, {}, Cursor()
        try:
            cursor = msgspec.json.decode((self._local / CURSOR).read_bytes(), type=Cursor)
            return _load(self._local / HEAD), _load(self._local / OPTIMIZER), cursor
        except (OSError, SafetensorError, msgspec.DecodeError) as error:
            raise CheckpointIntegrityError(
                f"the local training state in {self._local} is damaged: {error}",
                "Remove that directory: the node then starts with a fresh action head.",
            ) from error

    def write_pending(self, head: Arrays, optimizer: Arrays, cursor: Cursor) -> None:
        """Put down the candidate of the cursor's round, whole or not at all."""
        place = self._pending(cursor.round_index)
        part = place.with_name(place.name + PART)
        with files.storage(place):
            for old in (part, place):
                _remove(old)
            part.mkdir(mode=0o700)
            write_atomically(part / HEAD, save(head))
            write_atomically(part / OPTIMIZER, save(optimizer))
            write_atomically(part / CURSOR, msgspec.json.encode(cursor))
            reached("pending.written")
            part.rename(place)
            reached("pending.named")
            files.flush_directory(self._local)
            reached("pending.listed")

    def residual(self, layout: ParamLayout) -> Residual | None:
        """What rounding left of the vector that counted last; None if nothing is known of that.

        One that is damaged is as good as none: its loss is a loss of precision, once.
        """
        path = self._local / RESIDUAL
        try:
            with files.storage(path):
                return Residual(path, layout) if path.exists() else None
        except CheckpointIntegrityError as error:
            print(f"without what rounding left: {error.message}", file=sys.stderr)  # noqa: T201  # its log is stderr
            return None

    @property
    def keeps_residual(self) -> bool:
        """Whether there is one, which that of the next vector that counts has to replace."""
        return (self._local / RESIDUAL).exists()

    @contextmanager
    def residual_of(self, round_index: int) -> Iterator[BinaryIO]:
        """Where to write what rounding leaves of the vector of ``round_index``, into its candidate.

        To be written before the sidecar, with which both count.
        """
        with replacing(self._pending(round_index) / RESIDUAL, flush=self._charged) as file:
            yield file

    def adopt(self, round_index: int) -> bool:
        """Make the candidate of ``round_index`` this node's state; repeating it changes nothing.

        False when there is neither the candidate nor a state that it became.
        """
        place = self._pending(round_index)
        with files.storage(self._local):
            if place.is_dir():
                decided = self._local / f"adopt-{round_index}"
                place.rename(decided)
                reached("adopt.decided")
                files.flush_directory(self._local)
                self._move_in(decided)
            self._clear_through(round_index)
            reached("adopt.cleared")
            return self._adopted().round_index == round_index

    def _clear_through(self, round_index: int) -> None:
        """Remove what this round and older ones left; a later one may be in flight already."""
        for path in (*self._local.glob("pending-*"), *self._releases.glob("round-*")):
            number = path.name.removeprefix("pending-").removeprefix("round-").split(".")[0]
            if not number.isdecimal() or int(number) <= round_index:
                _remove(path)

    @property
    def adopted_by(self) -> str:
        """Config hash of the workload whose round counted last; empty if none did."""
        return self._adopted().config_hash

    def _adopted(self) -> Cursor:
        try:
            return msgspec.json.decode((self._local / CURSOR).read_bytes(), type=Cursor)
        except (FileNotFoundError, msgspec.DecodeError):
            return Cursor()

    def discard(self, round_index: int) -> None:
        """Remove candidate and released vector of ``round_index``."""
        with files.storage(self._local):
            self._sidecar_path(round_index).unlink(missing_ok=True)
            _remove(self.vector_path(round_index))
            _remove(self._pending(round_index))

    def clear(self, round_index: int) -> None:
        """Remove every candidate and released vector, and what rounds but this one have spent."""
        keep = self._spent_path(round_index)
        with files.storage(self._local):
            for path in self._local.glob("pending-*"):
                _remove(path)
            for path in self._releases.iterdir():
                if path != keep:
                    _remove(path)

    def _pending(self, round_index: int) -> Path:
        return self._local / f"pending-{round_index}"

    def _move_in(self, decided: Path) -> None:
        for name in _FILES:
            if (decided / name).exists():
                (decided / name).replace(self._local / name)
                reached("adopt.moved", name)
        files.flush_directory(self._local)
        reached("adopt.listed")
        _remove(decided)

    # ---- the released vector ----

    def vector_path(self, round_index: int) -> Path:
        return self._releases / f"round-{round_index}.u32"

    def write_vector(self, round_index: int, pieces: Iterable[Words]) -> Digest:
        """Write the vector and answer its digest; without its sidecar it does not count yet."""
        running = self._running()

        def hashed() -> Iterable[memoryview]:
            for piece in pieces:
                raw = np.ascontiguousarray(piece).data.cast("B")
                running.update(raw)
                yield raw

        self._sidecar_path(round_index).unlink(missing_ok=True)
        write_atomically(self.vector_path(round_index), hashed(), flush=self._charged)
        return Digest(running.hexdigest())

    def _running(self) -> "Running":
        """SHA-256 where it is what a budget was charged for, else what is enough to tell damage."""
        return hashlib.sha256() if self._charged else Tag()

    def write_sidecar(self, sidecar: Sidecar) -> None:
        """Declare the vector and the candidate of this round complete."""
        write_atomically(self._sidecar_path(sidecar.round_index), msgspec.json.encode(sidecar))

    def trained(self, round_index: int) -> Sidecar | None:
        """The sidecar of ``round_index``, if its vector and candidate are there and whole."""
        path = self.vector_path(round_index)
        if not self._pending(round_index).is_dir() or not path.is_file():
            return None
        sidecar = self._sidecar(round_index)
        whole = sidecar is not None and self._digest(path) == sidecar.vector
        return sidecar if whole else None

    def _digest(self, path: Path) -> Digest:
        running = self._running()
        with path.open("rb") as file:
            while piece := file.read(_HASH_BYTES):
                running.update(piece)
        return Digest(running.hexdigest())

    def released(self, round_index: int) -> Sidecar | None:
        """The sidecar of ``round_index``, whatever became of what it tells of."""
        return self._sidecar(round_index)

    def _sidecar(self, round_index: int) -> Sidecar | None:
        try:
            raw = self._sidecar_path(round_index).read_bytes()
            return msgspec.json.decode(raw, type=Sidecar)
        except (OSError, msgspec.DecodeError):
            return None

    def vector(self, round_index: int) -> FieldVector:
        """The released blob of words, mapped read-only as uint32.

        Raises:
            ArtifactError: it is not there.
        """
        path = self.vector_path(round_index)
        if not path.is_file():
            raise ArtifactError(f"no released vector of round {round_index} in {path.parent}")
        return np.memmap(path, dtype="<u4", mode="r")

    def spend(self, round_index: int) -> None:
        """Record, durably, that the released vector of ``round_index`` must not be sent again.

        The record outlives the vector until the round is over.
        """
        sidecar = self._sidecar(round_index)
        vector = None if sidecar is None else sidecar.vector
        write_atomically(self._spent_path(round_index), msgspec.json.encode(Spent(vector)))

    def spent(self, round_index: int) -> Spent | None:
        """What of ``round_index`` is spent.

        Raises:
            CheckpointIntegrityError: the record is damaged, so nothing may be sent again.
        """
        path = self._spent_path(round_index)
        with files.storage(path):
            try:
                raw = path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return msgspec.json.decode(raw, type=Spent)
        except msgspec.DecodeError as error:
            raise CheckpointIntegrityError(
                f"{path} is damaged: {error}", "Leave this round out; the next one needs it not."
            ) from error

    def _spent_path(self, round_index: int) -> Path:
        return self._releases / f"round-{round_index}.spent"

    def _sidecar_path(self, round_index: int) -> Path:
        return self._releases / f"round-{round_index}.json"


def _load(path: Path) -> Arrays:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
