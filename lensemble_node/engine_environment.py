"""The environment of a stage's worker: its device, its compiler, and nothing of the daemon's own.

The engine reads its environment once, when it is imported, and a stray variable there can break it
or have it print into the protocol.  So a worker gets what is named here and nothing else.  Nothing
here imports the engine; the daemon may.
"""

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

import msgspec
from blake3 import blake3

from lensemble.errors import EngineMissing

ENGINE = "tinygrad"
ENGINE_VERSION = "0.14.0"
"""The one whose names and kernels the stage worker was written against."""

DEVICES = ("CPU", "CUDA", "NV", "AMD")
_DRIVERS = {"CUDA": "/dev/nvidiactl", "NV": "/dev/nvidiactl", "AMD": "/dev/kfd"}
"""What is there where the driver of a GPU is."""

_KEPT = ("LANG", "LC_ALL", "PATH", "TMPDIR", "TZ")
_KEPT_ON_A_GPU = (
    "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVRTC_PATH",
    "ROCM_PATH", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
_SETTINGS = {
    "BEAM": "0",
    "DEBUG": "0",
    "HCQ2": "0",
    "JIT": "1",
    "JITBEAM": "0",
    "PARALLEL": "0",
}
"""No search for faster kernels, no word on the streams, no processes of its own."""

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SOURCE = Path(__file__).resolve().parent.parent


class Toolchain(msgspec.Struct, frozen=True):
    """What turns a kernel into machine code: ``target`` is what the engine calls ``DEV``."""

    target: str
    clang: str
    llvm: str = ""
    """The LLVM library, where kernels are made with it; else they are made with ``clang``."""


def toolchain(device: str = "") -> Toolchain:
    """Of ``device``, one of ``DEVICES``; empty: the CPU.

    Raises:
        EngineMissing: another device, no engine of this version, or no compiler.
    """
    device = device or DEVICES[0]
    if device not in DEVICES:
        raise EngineMissing(
            f"the engine has no device {device!r}",
            f"Set `inference.device` to one of {', '.join(DEVICES)}.",
        )
    driver = _DRIVERS.get(device)
    if driver is not None and not Path(driver).exists():
        raise EngineMissing(
            f"`inference.device` is {device} and {driver} is not there",
            "Install the driver of the GPU, or set `inference.device` to CPU.",
        )
    _check_version()
    packaged = Path(sys.prefix) / "bin" / "clang", Path(sys.prefix) / "lib" / "libLLVM.so"
    if all(path.exists() for path in packaged):
        clang, llvm = map(str, packaged)
        return Toolchain("CPU:LLVM" if device == "CPU" else device, clang, llvm)
    # A host side is needed on every device, and it is compiled when that is opened.
    found = shutil.which("clang")
    if found is None:
        raise EngineMissing(
            f"no C compiler: neither {packaged[0]} nor `clang` on the PATH",
            "Install one: `pip install 'lensemble[cpu-inference]'`, or the package `clang` of the "
            "operating system.",
        )
    return Toolchain(device, found)


def available(device: str = "") -> str:
    """Why no stage can be computed here on ``device``; empty if one can."""
    try:
        toolchain(device)
    except EngineMissing as error:
        return error.message
    return ""


def engine_name(device: str = "") -> str:
    """Engine, version and target, as all stages of a run must have them.

    Raises:
        EngineMissing: see ``toolchain``.
    """
    return f"{ENGINE} {ENGINE_VERSION} {toolchain(device).target}"


def stage_environment(cache_dir: Path, device: str = "", threads: int = 1) -> dict[str, str]:
    """The whole environment of a worker that keeps its kernels below ``cache_dir``.

    Raises:
        EngineMissing: see ``toolchain``.
    """
    tools = toolchain(device)
    on_cpu = tools.target.startswith("CPU")
    kept = _KEPT if on_cpu else _KEPT + _KEPT_ON_A_GPU
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    path = os.pathsep.join(p for p in (str(_SOURCE), os.environ.get("PYTHONPATH", "")) if p)
    return {
        **environment,
        **_SETTINGS,
        **dict.fromkeys(_THREADS, str(threads)),
        "CACHEDB": str(cache_dir / kernels_of(tools)),
        "CC": tools.clang,
        "DEV": tools.target,
        "HOME": str(cache_dir),
        "PYTHONPATH": path,
        **({"LLVM_PATH": tools.llvm} if tools.llvm else {}),
    }


def _check_version() -> None:
    try:
        installed = importlib.metadata.version(ENGINE)
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    if installed != ENGINE_VERSION:
        raise EngineMissing(
            f"{ENGINE} {installed or 'is not'} installed; stages need {ENGINE_VERSION}",
            "Install it: `pip install 'lensemble[inference]'`.",
        )


def kernels_of(tools: Toolchain) -> str:
    """The file that keeps kernels made with ``tools`` on this processor, and no others.

    The engine's own key says "native" whatever the processor is.
    """
    compiler = Path(tools.llvm or tools.clang).resolve()
    facts = compiler.stat()
    parts = (ENGINE_VERSION, tools.target, *_processor(), str(compiler), str(facts.st_size),
             str(facts.st_mtime_ns))  # fmt: skip
    return f"kernels-{blake3(chr(0).join(parts).encode()).hexdigest(8)}.db"


def _processor() -> tuple[str, ...]:
    """Machine, model and instruction sets of the first core."""
    about = [platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        wanted = ("model name", "flags", "Features", "CPU part")
        about += [line for line in first.splitlines() if line.startswith(wanted)]
    return tuple(about)
