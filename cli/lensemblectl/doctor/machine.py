"""The host: its clock, its limits, and what PyTorch and the stages' engine find on it."""

import ctypes
import importlib.metadata
import importlib.util
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from lensemblectl.doctor.finding import Finding, fine, note, problem

CLOCK, FILES, TORCH, STAGES = "clock", "open files", "pytorch", "stages"
NTP_ERROR = 5
"""What ``adjtimex`` returns while no service keeps the clock right (``TIME_ERROR``)."""

TIMEX_BYTES = 1024
"""More than ``struct timex`` has anywhere; all zeros asks and changes nothing."""

LEAST_DESCRIPTORS = 4096
GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
ENGINE = "tinygrad"


def look(newest_write: float, now: float) -> Iterator[Finding]:
    """``newest_write``: when the daemon last wrote its state, 0 if never; both in Unix seconds."""
    yield clock(newest_write, now, _clock_state())
    yield descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield torch(_torch_version_file(), tuple(each for each in GPU_DEVICES if each.exists()))
    yield stages()


def clock(newest_write: float, now: float, state: int) -> Finding:
    """Invites expire by it, and events are dated by it; rounds do not depend on it."""
    if newest_write > now + 60:
        return problem(
            CLOCK,
            f"it is {newest_write - now:.0f} s behind the newest file of the daemon",
            "Set the clock, and let a time service keep it: `timedatectl set-ntp true`.",
        )
    if state == NTP_ERROR:
        return note(
            CLOCK,
            "nothing keeps it right; an invite that expires may be refused too early or too late",
            "Let a time service keep it: `timedatectl set-ntp true`.",
        )
    return fine(CLOCK, "kept right by a time service")


def descriptors(most: int) -> Finding:
    """Each update in flight, link and edge is one."""
    if most != resource.RLIM_INFINITY and most < LEAST_DESCRIPTORS:
        return problem(
            FILES,
            f"a process may open {most}",
            f"Raise the limit: LimitNOFILE=65536 in the unit, or `ulimit -Hn {LEAST_DESCRIPTORS}`.",
        )
    return fine(FILES, f"a process may open {'any number' if most < 0 else most}")


def torch(version_file: str | None, devices: tuple[Path, ...]) -> Finding:
    """Whether the installed build can use the GPU that is there."""
    if version_file is None:
        return problem(
            TORCH, "it is not installed; a node cannot train", "Install it: `pip install torch`."
        )
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", version_file, re.MULTILINE)
    version = found[1] if found else "of unknown version"
    built_for = re.findall(r"^(cuda|hip)\b[^=]*= *['\"]", version_file, re.MULTILINE)
    if devices and not built_for:
        return problem(
            TORCH,
            f"{version} computes on the processor only, and there is {devices[0]}",
            "Install the build for your GPU; https://pytorch.org/get-started names it.",
        )
    return fine(TORCH, f"{version}, {' and '.join(built_for) if built_for else 'processor only'}")


def stages() -> Finding:
    """What a node needs to compute stages of models."""
    try:
        version = importlib.metadata.version(ENGINE)
    except importlib.metadata.PackageNotFoundError:
        return note(
            STAGES,
            f"{ENGINE} is not installed; this host computes no stages of models",
            "To change that: `pip install 'lensemble[cpu-inference]'`.",
        )
    packaged = Path(sys.prefix) / "bin" / "clang"
    compiler = str(packaged) if packaged.exists() else shutil.which("clang")
    if compiler is None:
        return problem(
            STAGES,
            f"{ENGINE} {version} finds no clang, which compiles its kernels",
            "Install one: `pip install 'lensemble[cpu-inference]'`, or clang of your system.",
        )
    return fine(STAGES, f"{ENGINE} {version}, {compiler}")


def _clock_state() -> int:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return 0
    return int(libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)))


def _torch_version_file() -> str | None:
    """Read, not imported: that takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    return (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
