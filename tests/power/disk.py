"""What a power loss at any moment could leave of a directory, by what was flushed until then.

``recording`` runs code on a real directory and notes, before each call that changes or flushes it,
what is there and what of it is durable: of a file what its last fsync saw, of a directory the
entries that its last fsync saw.  Nothing else is: not the entry of a file that was flushed, not the
bytes of a file whose entry was.  That is what POSIX promises; file systems mostly keep more.

SQLite's files are taken to be what SQLite makes of them at any time, since it flushes by itself.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

FLUSHES = ("fsync", "fdatasync")
CHANGES = ("rename", "replace", "unlink", "remove", "link", "mkdir", "rmdir", "ftruncate")
DATABASE = "ledger.sqlite"
ITS_LOG = ("-wal", "-shm")

Entries = dict[str, int]
Place = tuple[int, str]
"""A directory's inode and a name in it."""
Image = dict[str, bytes | None]
"""Relative path to content; None for a directory."""


class Tree(NamedTuple):
    """Directories by inode to their entries, files by inode to their bytes."""

    root: int
    directories: dict[int, Entries]
    files: dict[int, bytes]

    def image(self) -> Image:
        found: Image = {}
        self._into(found, self.root, "")
        return found

    def _into(self, found: Image, inode: int, prefix: str) -> None:
        for name, inner in self.directories.get(inode, {}).items():
            if inner in self.directories:
                found[prefix + name] = None
                self._into(found, inner, f"{prefix}{name}/")
            else:
                found[prefix + name] = self.files.get(inner, b"")


class Moment(NamedTuple):
    """Before ``call``: what is there, what of it is durable, and what was promised until then."""

    call: str
    there: Tree
    durable: Tree
    promised: tuple[str, ...]

    def images(self) -> Iterator[tuple[str, Image]]:
        """What could be left: nothing unflushed, all but one change, no change but one."""
        yield "only what was flushed", self.durable.image()
        for inode, content in self.there.files.items():
            if self.durable.files.get(inode, b"") != content:
                files = {**self.there.files, inode: self.durable.files.get(inode, b"")}
                image = Tree(self.there.root, self.there.directories, files).image()
                yield f"all but the bytes of {self._name(inode)}", image
        for group in self._changed():
            names = ", ".join(sorted({name for _, name in group}))
            yield f"all but the entry {names}", self._without(group)
            yield f"only the entry {names}", self._alone(group)
        yield "all", self.there.image()

    def _changed(self) -> Iterator[list[Place]]:
        """Entries that are not as they were flushed; what was renamed is one change."""
        groups: list[list[Place]] = []
        by_inode: dict[int, list[Place]] = {}
        for inode, entries in self.there.directories.items():
            kept = self.durable.directories.get(inode, {})
            for name in sorted({*entries, *kept}):
                old, new = kept.get(name), entries.get(name)
                if old == new:
                    continue
                moved = [by_inode[each] for each in (old, new) if each in by_inode]
                group = moved[0] if moved else []
                if not moved:
                    groups.append(group)
                group.append((inode, name))
                by_inode.update({each: group for each in (old, new) if each is not None})
        yield from groups

    def _without(self, group: list[Place]) -> Image:
        """All that is there, but ``group`` as it was flushed."""
        files = {**self.durable.files, **self.there.files}
        directories = {**self.durable.directories, **self.there.directories}
        _turn(directories, group, self.durable)
        return Tree(self.there.root, directories, files).image()

    def _alone(self, group: list[Place]) -> Image:
        """What was flushed, and ``group`` as it is there."""
        directories = dict(self.durable.directories)
        _turn(directories, group, self.there)
        for inode in self.there.directories:
            directories.setdefault(inode, {})
        return Tree(self.there.root, directories, self.durable.files).image()

    def _name(self, inode: int) -> str:
        names = [n for e in self.there.directories.values() for n, i in e.items() if i == inode]
        return names[0] if names else str(inode)


def _turn(directories: dict[int, Entries], group: list[Place], source: Tree) -> None:
    """Give every entry of ``group`` the inode that it has in ``source``."""
    for inode, name in group:
        entries = dict(directories.get(inode, {}))
        entries.pop(name, None)
        if (wanted := source.directories.get(inode, {}).get(name)) is not None:
            entries[name] = wanted
        directories[inode] = entries


class Recording:
    """``moments`` of what happens under ``root``, whose file system uses no inode again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moments: list[Moment] = []
        self._promised: list[str] = []
        self._lock = RLock()
        now = self._look()
        self._entries = {inode: dict(each) for inode, each in now.directories.items()}
        self._bytes = dict(now.files)

    def promise(self, what: str) -> None:
        """From here on somebody relies on ``what``."""
        with self._lock:
            self._promised.append(what)

    def note(self, call: str) -> Tree:
        """Note the moment before ``call``."""
        there = self._look()
        durable = Tree(
            there.root, {k: dict(v) for k, v in self._entries.items()}, dict(self._bytes)
        )
        for inode in there.directories:
            durable.directories.setdefault(inode, {})
        self._trust_database(there, durable)
        self.moments.append(Moment(call, there, durable, tuple(self._promised)))
        return there

    def around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real``, noted before it happens."""

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                there = self.note(f"{name}{args!r}")
                if name in FLUSHES:
                    self._flush(there, os.fstat(args[0]).st_ino)
                return real(*args, **options)

        return call

    def _flush(self, there: Tree, inode: int) -> None:
        if inode in there.directories:
            self._entries[inode] = dict(there.directories[inode])
        elif inode in there.files:
            self._bytes[inode] = there.files[inode]

    def _trust_database(self, there: Tree, durable: Tree) -> None:
        for inode, entries in there.directories.items():
            for name, inner in entries.items():
                if DATABASE in name:
                    durable.files[inner] = there.files.get(inner, b"")
                    if name.endswith(ITS_LOG):
                        durable.directories.setdefault(inode, {})[name] = inner
            for name in list(durable.directories.get(inode, {})):
                if name.endswith(ITS_LOG) and name not in entries:
                    del durable.directories[inode][name]

    def _look(self) -> Tree:
        directories: dict[int, Entries] = {}
        files: dict[int, bytes] = {}
        todo = [(self.root, self.root.stat().st_ino)]
        while todo:
            place, inode = todo.pop()
            entries = directories[inode] = {}
            with os.scandir(place) as found:
                for entry in found:
                    entries[entry.name] = entry.inode()
                    if entry.is_dir(follow_symlinks=False):
                        todo.append((Path(entry.path), entry.inode()))
                    elif entry.is_file(follow_symlinks=False):
                        files[entry.inode()] = _content(entry.path)
        return Tree(self.root.stat().st_ino, directories, files)


def _content(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def recording(root: Path) -> Iterator[Recording]:
    """Record what this process does under ``root`` until the end of the block."""
    made = Recording(root)
    real = {name: getattr(os, name) for name in (*FLUSHES, *CHANGES)}
    try:
        for name, function in real.items():
            setattr(os, name, made.around(name, function))
        yield made
    finally:
        for name, function in real.items():
            setattr(os, name, function)
    made.note("the end")


def build(image: Image, root: Path) -> None:
    """Lay ``image`` out under ``root``, which must not exist."""
    root.mkdir(mode=0o700)
    for name, content in image.items():
        path = root / name
        if content is None:
            path.mkdir(mode=0o700)
        else:
            path.write_bytes(content)
            path.chmod(0o600)


def distinct(moments: list[Moment], *, every: bool) -> Iterator[tuple[Moment, str, Image]]:
    """The images of all moments, each once for each promise; without ``every`` the first kind."""
    seen = set()
    for moment in moments:
        for what, image in moment.images():
            key = (moment.promised, tuple(sorted(image.items(), key=lambda item: item[0])))
            if key not in seen:
                seen.add(key)
                yield moment, what, image
            if not every:
                break
