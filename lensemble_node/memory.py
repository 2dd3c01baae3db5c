"""How much memory this host has to spare."""

from pathlib import Path

RESERVE_BYTES = 256 << 20
"""Left to everything else on this host, beside a tenth of what is free."""

_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GROUP_USE = Path("/sys/fs/cgroup/memory.current")


def to_spare() -> int:
    """Bytes that are free, here and in the control group of this process, less a reserve."""
    free = _available()
    limit, use = _number(_GROUP_LIMIT), _number(_GROUP_USE)
    if limit is not None and use is not None:
        free = min(free, limit - use)
    return max(0, free - free // 10 - RESERVE_BYTES)


def _available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    sizes = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return sum(int(parts[1]) << 10 for parts in sizes)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
