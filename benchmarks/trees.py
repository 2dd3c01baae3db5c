"""What a process and everything that it started take of memory and CPU."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOOK_S = 0.05
BLOCK_BYTES = 512
SPOOL = "/memfd:lensemble-"
ARENA = "/memfd:lensemble-arena"


def _stat(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(") ")[2].split()


def tree(root: int) -> list[int]:
    """``root`` and its living descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                children[int(_stat(int(name))[1])].append(int(name))
            except OSError:
                continue
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children[pid]
    return found


def cpu_s(*roots: int) -> float:
    """CPU seconds of the trees since they began, of ended children that were waited for too."""
    ticks = 0
    for pid in (pid for root in roots for pid in tree(root)):
        try:
            ticks += sum(map(int, _stat(pid)[11:15]))
        except OSError:
            continue
    return ticks / TICKS_PER_S


def resident_bytes(root: int) -> int:
    """Resident sizes of the tree, added; memory that two processes map counts in each."""
    pages = 0
    for pid in tree(root):
        try:
            pages += int(_stat(pid)[21])
        except OSError:
            continue
    return pages * PAGE_BYTES


def spooled_bytes(pid: int) -> int:
    """Memory in files of ``pid`` that have no name and are mapped by nobody."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(each)
            if target.startswith(SPOOL) and not target.startswith(ARENA):
                found += each.stat().st_blocks * BLOCK_BYTES
        except OSError:
            continue
    return found


class Peaks:
    """The most that was seen of each of several trees."""

    def __init__(self, roots: dict[str, int]) -> None:
        self._roots = roots
        self.resident = dict.fromkeys(roots, 0)
        self.with_spool = dict.fromkeys(roots, 0)
        self._over = threading.Event()

    def mib(self, name: str) -> float:
        return round(self.resident[name] / (1 << 20), 1)

    def mib_with_spool(self, name: str) -> float:
        return round(self.with_spool[name] / (1 << 20), 1)

    @contextmanager
    def watched(self) -> Iterator["Peaks"]:
        """Look all along, in a thread."""
        looking = threading.Thread(target=self._look)
        looking.start()
        try:
            yield self
        finally:
            self._over.set()
            looking.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            for name, root in self._roots.items():
                try:
                    now, spooled = resident_bytes(root), spooled_bytes(root)
                except OSError:
                    continue
                self.resident[name] = max(self.resident[name], now)
                self.with_spool[name] = max(self.with_spool[name], now + spooled)
