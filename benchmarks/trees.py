"""What a process and everything that it started take of memory and CPU."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOOK_S, SEARCH_S = 0.2, 1.0
"""Between looks at the processes that are known, and between searches for more of them.

To search is to read about every process of the machine, which takes CPU time from what is measured.
"""
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
    return sum(map(_resident_bytes, tree(root)))


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def most_resident_bytes(pid: int) -> int:
    """The largest resident size that ``pid`` has ever had, by the kernel's own account."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) << 10 if found else 0


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
    """The most that was seen of each of several trees, looking now and then.

    It is at least what the kernel has counted for the largest process of the tree.
    """

    def __init__(self, roots: dict[str, int]) -> None:
        self._roots = roots
        self._trees: dict[str, list[int]] = {}
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
        self._search()
        looking = threading.Thread(target=self._keep_looking)
        looking.start()
        try:
            yield self
        finally:
            self._over.set()
            looking.join()
            self._search()

    def _keep_looking(self) -> None:
        searched = time.monotonic()
        while not self._over.wait(LOOK_S):
            if time.monotonic() - searched > SEARCH_S:
                self._search()
                searched = time.monotonic()
            self._look()

    def _search(self) -> None:
        """Find the processes, and take what the kernel has counted of each."""
        for name, root in self._roots.items():
            self._trees[name] = tree(root)
            most = max(map(most_resident_bytes, self._trees[name]))
            self._note(name, most, 0)

    def _look(self) -> None:
        for name, root in self._roots.items():
            try:
                spooled = spooled_bytes(root)
            except OSError:
                continue
            self._note(name, sum(map(_resident_bytes, self._trees[name])), spooled)

    def _note(self, name: str, resident: int, spooled: int) -> None:
        self.resident[name] = max(self.resident[name], resident)
        self.with_spool[name] = max(self.with_spool[name], resident + spooled)
