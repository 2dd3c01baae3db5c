import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lensemble.errors import EngineMissing
from lensemble_node import engine_environment
from lensemble_node.engine_environment import (
    ENGINE_VERSION,
    Toolchain,
    available,
    engine_name,
    kernels_of,
    stage_environment,
    toolchain,
)

needs_engine = pytest.mark.skipif(bool(available()), reason=available())
ENGINE_FILE = Path("lensemble_node/worker/inference/engine.py")
NAMES = {
    "tinygrad": {"Device", "Tensor", "TinyJit", "UOp", "dtypes"},
    "tinygrad.device": {"MultiBuffer", "TinyELF"},
    "tinygrad.engine.jit": {"CapturedJit"},
    "tinygrad.engine.realize": {"get_runtime", "resolve_params"},
    "tinygrad.llm.gguf": {"ggml_data_to_tensor"},
    "tinygrad.renderer.cstyle": {"ClangRenderer"},
    "tinygrad.runtime.ops_cpu": {"CPUProgram"},
}


def test_only_the_named_things_are_taken_from_the_engine() -> None:
    """Another version has moved others: whoever needs one more looks where it is there."""
    root = Path(engine_environment.__file__).resolve().parent.parent
    taken: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse((root / ENGINE_FILE).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinygrad"):
            taken.setdefault(str(node.module), set()).update(each.name for each in node.names)
        assert not isinstance(node, ast.Import) or "tinygrad" not in ast.unparse(node)
    assert taken == NAMES


@needs_engine
def test_the_pinned_version_is_installed_and_has_the_names(tmp_path: Path) -> None:
    assert importlib.metadata.version("tinygrad") == ENGINE_VERSION == "0.14.0"
    imports = "; ".join(f"from {module} import {', '.join(NAMES[module])}" for module in NAMES)
    done = subprocess.run(
        [sys.executable, "-c", f"{imports}; print(Device.DEFAULT)"],
        env=stage_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("CPU\n", "", 0)


@needs_engine
def test_nothing_of_the_daemon_reaches_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("DEBUG", "true"), ("BEAM", "4"), ("CC", "gcc"), ("HOME", "/nowhere"),
                        ("JIT", "yes"), ("SECRET_TOKEN", "x"), ("CPU_LLVM", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    made = stage_environment(tmp_path, threads=3)
    assert "SECRET_TOKEN" not in made
    assert "CPU_LLVM" not in made
    assert (made["DEBUG"], made["BEAM"], made["JIT"], made["HOME"]) == (
        "0",
        "0",
        "1",
        str(tmp_path),
    )
    assert made["DEV"] in {"CPU", "CPU:LLVM"}
    assert Path(made["CC"]).name == "clang"
    assert made["OMP_NUM_THREADS"] == "3"
    assert Path(made["CACHEDB"]).parent == tmp_path


@needs_engine
def test_kernels_of_another_compiler_are_kept_apart(tmp_path: Path) -> None:
    fake = tmp_path / "clang"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    ours = toolchain()
    other = Toolchain("CPU", str(fake))
    assert kernels_of(ours) != kernels_of(other)
    assert kernels_of(ours) == kernels_of(ours)


def without_packaged_compiler(tmp_path: Path, path: str) -> subprocess.CompletedProcess[str]:
    """What ``available`` says where ``sys.prefix`` has no compiler."""
    program = (
        f"import sys; sys.prefix = {str(tmp_path)!r}\n"
        "from lensemble_node import engine_environment as e\n"
        "print(e.available() or e.engine_name() + ' ' + e.toolchain().clang)"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": path, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_compiler_on_the_path_will_do(tmp_path: Path) -> None:
    clang = tmp_path / "clang"
    clang.write_text("#!/bin/sh\n")
    clang.chmod(0o755)
    said = without_packaged_compiler(tmp_path / "prefix", str(tmp_path)).stdout
    assert said == f"tinygrad {ENGINE_VERSION} CPU {clang}\n"


def test_no_compiler_is_said_with_both_ways_out(tmp_path: Path) -> None:
    said = without_packaged_compiler(tmp_path / "prefix", str(tmp_path)).stdout
    assert str(tmp_path / "prefix" / "bin" / "clang") in said
    assert "`clang` on the PATH" in said


@pytest.mark.parametrize("device", ["TPU", "cpu", "CUDA:0"])
def test_an_unknown_device_is_refused_by_name(device: str) -> None:
    assert repr(device) in available(device)
    with pytest.raises(EngineMissing, match=device):
        toolchain(device)


@pytest.mark.parametrize("device", ["CUDA", "AMD"])
def test_a_gpu_without_its_driver_is_refused(device: str) -> None:
    driver = {"CUDA": "/dev/nvidiactl", "AMD": "/dev/kfd"}[device]
    if Path(driver).exists():
        pytest.skip(f"{driver} is here")
    assert driver in available(device)


@needs_engine
def test_the_name_says_engine_version_and_target() -> None:
    assert engine_name() in {
        f"tinygrad {ENGINE_VERSION} CPU",
        f"tinygrad {ENGINE_VERSION} CPU:LLVM",
    }
    assert engine_name("CPU") == engine_name()


@needs_engine
def test_a_worker_that_was_started_in_another_environment_says_so(tmp_path: Path) -> None:
    environment = stage_environment(tmp_path)
    for broken in ({"DEV": ""}, {"DEBUG": "1"}):
        made = {name: value for name, value in {**environment, **broken}.items() if value}
        done = subprocess.run(
            [sys.executable, "-m", "lensemble_node.worker.inference", "--arena-fd=0",
             "--arena-bytes=0", "--memory-bytes=0", "--niceness=0", f"--parent={os.getpid()}"],
            env=made, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stdout == ""
        assert "environment" in done.stderr
