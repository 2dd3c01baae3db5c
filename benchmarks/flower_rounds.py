"""Rounds of Flower's deployment engine for ``rounds.py``: real processes on this machine.

A SuperLink, SuperNodes, and the ServerApp and ClientApps that they start, with telemetry off.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from our_rounds import Setting
from trees import Peaks, cpu_s

from lensemble_local.processes import spawn

VERSION = "1.42.0"
APP = Path(__file__).parent / "flower_app"
PORT = 8000
START_S, ROUND_S = 60.0, 400.0
MASKED_NODES = 4
"""SecAgg+ wants more than two shares."""

ROUNDS_AFTER_KILL = 50
LOOK_S = 0.05


def interpreter(given: Path | None) -> Path:
    """``given``, or that of an environment with Flower, made once in the temporary directory."""
    if given is not None:
        return given
    place = Path(tempfile.gettempdir()) / f"lensemble-bench-flwr-{VERSION}"
    python = place / "bin" / "python"
    if not (place / ".complete").exists():
        print(f"installing flwr {VERSION} into {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", f"flwr=={VERSION}", "numpy"]
        subprocess.run(command, check=True)
        (place / ".complete").touch()
    return python


def version(python: Path) -> str:
    command = [str(python), "-c", "import importlib.metadata as m; print(m.version('flwr'))"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Flower:
    """A running SuperLink with its SuperNodes."""

    def __init__(self, place: Path, server: int, nodes: list["subprocess.Popen[bytes]"]) -> None:
        self._place = place
        self.server = server
        self.nodes = nodes

    @property
    def pids(self) -> list[int]:
        return [self.server, *(each.pid for each in self.nodes)]

    def stamps(self) -> list[dict[str, Any]]:
        """The rounds that have closed so far."""
        path = self._place / "stamps.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]

    def until(self, count: int) -> list[dict[str, Any]]:
        """Wait for ``count`` rounds.

        Raises:
            RuntimeError: the next one takes too long; quotes the server's log.
        """
        seen, since = 0, time.monotonic()
        while len(now := self.stamps()) < count:
            if len(now) > seen:
                seen, since = len(now), time.monotonic()
            if time.monotonic() - since > ROUND_S:
                log = (self._place / "superlink.log").read_text(errors="replace")
                raise RuntimeError(f"{len(now)} of {count} rounds closed:\n{log[-2000:]}")
            time.sleep(LOOK_S)
        return now


@contextmanager
def running(
    place: Path, python: Path, setting: Setting, rounds: int, *, masked: bool = False
) -> Iterator[Flower]:
    """Flower with ``rounds`` rounds on their way."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_HOME"] = str(place / "home")
    tools = python.parent
    os.environ["PATH"] = os.pathsep.join([str(tools), os.environ["PATH"]])
    (place / "home").mkdir()
    (place / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{PORT}"\n'
        "insecure = true\n"
    )
    with ExitStack() as ended:
        link = [
            str(tools / "flower-superlink"),
            "--insecure",
            "--port",
            str(PORT),
            "--disable-runtime-dependency-installation",
        ]
        server = started(ended, link, place / "superlink.log")
        wait_for(place / "superlink.log", "Uvicorn running")
        nodes = []
        for index in range(setting.nodes):
            node = [
                str(tools / "flower-supernode"),
                "--insecure",
                "--superlink",
                f"127.0.0.1:{PORT}",
                "--port",
                str(PORT + 1 + index),
            ]
            nodes.append(started(ended, node, place / f"supernode-{index}.log"))
        wait_for(place / "superlink.log", "Activated node_id", setting.nodes)
        submit(place, tools, setting, rounds, masked)
        yield Flower(place, server.pid, nodes)


def started(ended: ExitStack, command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        process = spawn(command, file)
    ended.callback(stop, process)
    return process


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(log: Path, text: str, times: int = 1) -> None:
    end = time.monotonic() + START_S
    while log.read_text(errors="replace").count(text) < times:
        if time.monotonic() > end:
            raise RuntimeError(f"no {text!r} in {log}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)


def submit(place: Path, tools: Path, setting: Setting, rounds: int, masked: bool) -> None:
    app = place / "app"
    shutil.copytree(APP, app)
    if masked:
        config = app / "pyproject.toml"
        text = config.read_text().replace("noop_rounds.server:", "noop_rounds.masked_server:")
        config.write_text(text.replace("noop_rounds.client:", "noop_rounds.masked_client:"))
    terms = (
        f"parameters={setting.parameters} nodes={setting.nodes} rounds={rounds} "
        f'out="{place / "stamps.jsonl"}"'
    )
    command = [str(tools / "flwr"), "run", str(app), "local", "--run-config", terms]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)


def measure(python: Path, setting: Setting, place: Path, *, masked: bool = False) -> dict[str, Any]:
    """Figures of whole rounds; the first one warms up and is not counted."""
    with running(place, python, setting, setting.rounds + 1, masked=masked) as here:
        here.until(1)
        names = ["server", *(f"node-{n}" for n in range(setting.nodes))]
        peaks = Peaks(dict(zip(names, here.pids, strict=True)))
        before = cpu_s(*here.pids)
        with peaks.watched():
            closed = here.until(setting.rounds + 1)
        spent = cpu_s(*here.pids) - before
    took = [after["at"] - each["at"] for each, after in pairwise(closed)]
    return {
        "seconds": round(statistics.median(took), 3),
        "server_mib": peaks.mib("server"),
        "node_mib": max(peaks.mib(name) for name in names[1:]),
        "cpu_s": round(spent / setting.rounds, 3),
    }


def seconds_without_killed(python: Path, setting: Setting, into_round: float, place: Path) -> float:
    """From SIGKILL of a SuperNode, ``into_round`` of a round after its begin, to the next close.

    Raises:
        RuntimeError: no round closes without it.
    """
    with running(place, python, setting, ROUNDS_AFTER_KILL) as here:
        first, second = here.until(2)
        time.sleep(into_round * (second["at"] - first["at"]))
        done = len(here.stamps())
        killed = time.monotonic()
        here.nodes[-1].kill()
        while True:
            done += 1
            newest = here.until(done)[-1]
            if newest["contributors"] < setting.nodes:
                return float(newest["at"] - killed)
