"""A daemon's configuration and state in one file: written while it runs, restored elsewhere.

``python -m lensemble.backup ARCHIVE DIRECTORY`` restores; the daemons' own modules write.

A tar archive, uncompressed, of ``about.json`` first, then ``config/...`` and ``state/...``, and
``sums.json`` last, which holds the SHA-256 of every member before it.  It contains the identity
key: whoever has the archive can be this daemon.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Literal

import msgspec
from msgspec import Meta

from lensemble import files, identity, state_dir
from lensemble.errors import LensembleError, OperatorError, SchemaVersionMismatch, StorageError
from lensemble.version import VERSION

EXIT_FAILED = 1
SCHEMA = 1
ABOUT, SUMS = "about.json", "sums.json"
CONFIG, STATE = "config", "state"
MODE = 0o600
ATTEMPTS = 5
MAX_ABOUT_BYTES = 1 << 16
MAX_SUMS_BYTES = 1 << 26
MAX_MEMBERS = 1 << 18
MAX_FILE_BYTES = 1 << 40
PIECE_BYTES = 1 << 20
UNKEPT = (state_dir.LOCK_NAME, *state_dir.STRAYS)
DATABASE = ".sqlite"
DATABASE_LOGS = (f"{DATABASE}-wal", f"{DATABASE}-shm")


class About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an archive is of; ``made`` is in ISO 8601, ``config`` the name of its main file.

    ``charged``: it holds a node's privacy charges, which a later release would have added to.
    """

    schema: Annotated[int, Meta(ge=1)]
    part: Literal["coord", "node"]
    version: Annotated[str, Meta(max_length=64)]
    node: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    made: Annotated[str, Meta(max_length=64)]
    config: Annotated[str, Meta(pattern=r"\A[^/]{1,255}\Z")]
    charged: bool = False


def about(
    part: Literal["coord", "node"], state: Path, config: Path, *, charged: bool = False
) -> About:
    """What a backup made now of the daemon of ``state``, configured by ``config``, is of.

    Raises:
        StorageError: it has no identity yet.
    """
    return About(
        schema=SCHEMA,
        part=part,
        version=VERSION,
        node=identity.load(state / state_dir.IDENTITY_NAME).node,
        made=datetime.now(tz=UTC).isoformat(timespec="seconds"),
        config=config.name,
        charged=charged,
    )


class Member(msgspec.Struct, frozen=True):
    """A file that goes into the archive as ``name``."""

    name: str
    path: Path


class Changing(Exception):
    """What a copied database names went away before it was read; try again."""


class Damaged(StorageError):
    """An archive that is not one, is cut short, or holds other bytes than it says."""

    code = "backup_damaged"
    default_remediation = "Restore another copy of it, or an earlier backup."


def state_members(state: Path, leave: Iterable[str], databases: Path) -> Iterator[Member]:
    """Every file below ``state`` but sockets, locks, half-written files and what ``leave`` names.

    A database is copied into the directory ``databases`` as it is at one moment, and goes first:
    what it names was written before it.

    Raises:
        StorageError: unreadable.
    """
    left = {*UNKEPT, *leave}
    for path in _kept(state, left):
        if path.name.endswith(DATABASE):
            yield Member(_inside(state, path), _copied(path, databases / path.name))
    # Only now is it looked at what else there is: all that the copy names was there by then.
    for path in _kept(state, left):
        if path.is_file() and not path.is_symlink() and not path.name.endswith(DATABASE):
            yield Member(_inside(state, path), path)


def _kept(state: Path, left: set[str]) -> list[Path]:
    with files.storage(state):
        found = sorted(Path(place) / name for place, _, names in os.walk(state) for name in names)
    return [
        path
        for path in found
        if path.relative_to(state).parts[0] not in left
        and not path.name.startswith(state_dir.STRAYS)
        and not path.name.endswith(DATABASE_LOGS)
    ]


def keep(to: Path, about: About, gather: Callable[[Path], list[Member]]) -> int:
    """Write the archive ``to`` of what ``gather(room)`` names, again while that changes.

    ``room`` is a private directory for copies.  Returns the size in bytes.

    Raises:
        StorageError: ``to`` exists, the file system refuses, or the daemon never rests.
    """
    if to.exists():
        raise StorageError(f"{to} exists already", "Name a file that does not exist yet.")
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="lensemble-backup-") as room:
            try:
                return _write(to, about, gather(Path(room)))
            except (Changing, FileNotFoundError):
                continue
    raise StorageError(
        f"the state changed under each of {ATTEMPTS} copies", "Try again between two rounds."
    )


def _write(to: Path, about: About, members: Iterable[Member]) -> int:
    """As one step, mode 0600."""
    sums: dict[str, str] = {}
    with files.storage(to):
        fd, part = tempfile.mkstemp(prefix=files.PART_PREFIX, dir=to.absolute().parent)
    try:
        with os.fdopen(fd, "wb") as raw, tarfile.open(fileobj=raw, mode="w") as archive:
            _put(archive, ABOUT, msgspec.json.encode(about), sums)
            for member in members:
                _add(archive, member, sums)
            _put(archive, SUMS, json.dumps(sums, sort_keys=True).encode(), {})
            archive.close()
            raw.flush()
            os.fsync(raw.fileno())
        size = Path(part).stat().st_size
        Path(part).replace(to)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    files.flush_directory(to.absolute().parent)
    return size


def restore(archive: Path, directory: Path, *, none_since: bool = False) -> tuple[About, Path]:
    """Lay the configuration of ``archive`` into ``directory``, and its state where that says.

    Nothing that exists is replaced, and nothing is left in place unless every byte is right.
    ``none_since`` is somebody's word that the node has released nothing since it was made.

    Returns:
        What it is of, and the state directory.

    Raises:
        Damaged: cut short, changed, or not a backup.
        OperatorError: it holds privacy charges, and ``none_since`` is not given.
        SchemaVersionMismatch: made by a release that writes them otherwise.
        StorageError: files are in the way, or the file system refuses.
    """
    with files.storage(directory):
        directory.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=files.PART_PREFIX, dir=directory))
    try:
        about = _unpacked(archive, aside)
        if about.charged and not none_since:
            raise OperatorError(
                f"{archive} counts a privacy budget as it was at {about.made}; what the node has "
                "released since is not in it, and would be spent a second time",
                "Restore the newest backup; if the node has released nothing since, say so with "
                "--none-since. Otherwise lower `privacy.epsilon` by what may have been spent.",
            )
        config = tomllib.loads((aside / CONFIG / about.config).read_text(encoding="utf-8"))
        state = directory / str(config.get("state_dir", "state"))
        _place(aside, directory, state)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return about, state


def _inside(state: Path, path: Path) -> str:
    return f"{STATE}/{path.relative_to(state).as_posix()}"


def _copied(path: Path, to: Path) -> Path:
    """A database as it is between two transactions, however busy it is."""
    with (
        files.storage(path),
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(to)) as copy,
    ):
        try:
            source.backup(copy)
        except sqlite3.Error as error:
            raise StorageError(f"{path} cannot be copied: {error}") from error
    return to


def _header(name: str, size: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.size, header.mode = size, MODE
    return header


def _put(archive: tarfile.TarFile, name: str, content: bytes, sums: dict[str, str]) -> None:
    archive.addfile(_header(name, len(content)), io.BytesIO(content))
    sums[name] = hashlib.sha256(content).hexdigest()


def _add(archive: tarfile.TarFile, member: Member, sums: dict[str, str]) -> None:
    with member.path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        read = _Hashed(file)
        archive.addfile(_header(member.name, size), read)  # type: ignore[arg-type]  # it only reads
        sums[member.name] = read.sum.hexdigest()


class _Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def read(self, size: int) -> bytes:
        piece = self._file.read(size)
        self.sum.update(piece)
        return piece


def _unpacked(archive: Path, aside: Path) -> About:
    found: dict[str, str] = {}
    said: dict[str, str] = {}
    found_about: About | None = None
    with files.storage(archive), archive.open("rb") as raw:
        try:
            with tarfile.open(fileobj=raw, mode="r|") as members:
                for number, member in enumerate(members):
                    source = _checked(archive, member, number, members)
                    if member.name == SUMS:
                        said = msgspec.json.decode(source.read(), type=dict[str, str])
                        break
                    target = aside / member.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    found[member.name] = _written(source, target)
                    if number == 0:
                        found_about = _about(archive, member.name, target)
        except (tarfile.TarError, msgspec.DecodeError, UnicodeDecodeError, EOFError) as error:
            raise Damaged(f"{archive} is not a backup, or is cut short: {error}") from error
    if found_about is None or not said:
        raise Damaged(f"{archive} is cut short: it does not end with its sums")
    wrong = sorted(name for name in {*said, *found} if said.get(name) != found.get(name))
    if wrong:
        raise Damaged(f"{wrong[0]} in {archive} is not what was written")
    return found_about


def _checked(
    archive: Path, member: tarfile.TarInfo, number: int, members: tarfile.TarFile
) -> IO[bytes]:
    """The content of a member that may be unpacked.

    Archives come from disks and from people; nothing in one may name a place outside it.
    """
    path = PurePosixPath(member.name)
    whole = member.name in {ABOUT, SUMS}
    inside = path.parts[:1] in {(CONFIG,), (STATE,)} and ".." not in path.parts
    most = MAX_SUMS_BYTES if member.name == SUMS else MAX_ABOUT_BYTES if whole else MAX_FILE_BYTES
    source = members.extractfile(member) if member.isreg() else None
    if source is None or not (whole or inside) or member.size > most or number >= MAX_MEMBERS:
        raise Damaged(f"{archive} holds {member.name!r}, which no backup does")
    return source


def _written(source: IO[bytes], target: Path) -> str:
    running = hashlib.sha256()
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE)
    with os.fdopen(fd, "wb") as file:
        while piece := source.read(PIECE_BYTES):
            running.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return running.hexdigest()


def _about(archive: Path, name: str, path: Path) -> About:
    if name != ABOUT:
        raise Damaged(f"{archive} begins with {name!r}, not with {ABOUT}")
    content = path.read_bytes()
    schema = msgspec.json.decode(content).get("schema")
    if schema != SCHEMA:
        raise SchemaVersionMismatch(
            f"{archive} has schema {schema!r}; this release ({VERSION}) reads {SCHEMA}",
            "Restore it with the release that made it, then upgrade.",
        )
    return msgspec.json.decode(content, type=About)


def _place(aside: Path, directory: Path, state: Path) -> None:
    configs = sorted((aside / CONFIG).iterdir())
    taken = [directory / each.name for each in configs if (directory / each.name).exists()]
    if state.exists() and any(state.iterdir()):
        taken.append(state)
    if taken:
        raise StorageError(
            f"{taken[0]} exists already",
            "Restore into a directory without a daemon, or move what is there away first.",
        )
    with files.storage(state):
        state.parent.mkdir(parents=True, exist_ok=True)
        if state.exists():
            state.rmdir()
        # The state directory may lie on another disk, where a rename does not reach.
        shutil.move(aside / STATE, state)
        state.chmod(0o750)
        for each in configs:
            each.rename(directory / each.name)
        files.flush_directory(directory)
        files.flush_directory(state.parent)


def written(keep: Callable[[Path, Path], tuple[About, int]], arguments: list[str] | None) -> int:
    """The program that a daemon's part is: configuration and archive; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("archive", type=Path)
    options = parser.parse_args(arguments)
    try:
        about, size = keep(options.config, options.archive)
    except LensembleError as error:
        return _refused(error)
    _tell(about, archive=str(options.archive), bytes=size)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Restore; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--none-since", action="store_true")
    options = parser.parse_args(arguments)
    try:
        about, state = restore(options.archive, options.directory, none_since=options.none_since)
    except LensembleError as error:
        return _refused(error)
    _tell(about, config=str(options.directory / about.config), state_dir=str(state))
    return 0


def _tell(about: About, **more: object) -> None:
    sys.stdout.write(json.dumps({**msgspec.to_builtins(about), **more}) + "\n")


def _refused(error: LensembleError) -> int:
    sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
