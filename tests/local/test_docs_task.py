"""Runs the commands of docs/writing-a-task.md on the files that are printed there."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "writing-a-task.md").read_text(encoding="utf-8")
FILES = {
    "clinic.py": "class Risk",
    "workload.toml": "[task.parameters]",
    "alice.toml": 'name = "alice"',
    "coord.toml": 'state_dir = "hub"',
    "sim.toml": "nodes = [",
}
NAMES = ("alice", "bob", "carol")
PROGRAMS = {"lensemblectl": [sys.executable, "-m", "lensemblectl.app"], "python": [sys.executable]}


def lay_out(place: Path) -> None:
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.DOTALL)
    for name, mark in FILES.items():
        (block,) = (each for each in blocks if mark in each)
        (place / name).write_text(block, encoding="utf-8")
    for name in NAMES[1:]:
        text = (place / "alice.toml").read_text().replace("alice", name)
        (place / f"{name}.toml").write_text(text)
    for seed, name in enumerate(NAMES):
        draw = np.random.default_rng(seed)
        seen = draw.standard_normal((200, 4))
        ill = (seen @ [2.0, -1.0, 0.5, 0.0] + seed - 1 > 0).astype(float)
        np.savetxt(place / f"{name}.csv", np.column_stack([seen, ill]), "%.6f", delimiter=",")


def run(place: Path, command: str) -> str:
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [*PROGRAMS[program], *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "cli")))},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    simulate, verify, evaluate = block.strip().splitlines()
    told = run(tmp_path, simulate)
    *rounds, last = told.splitlines()
    assert [line.split(",")[0] for line in rounds] == [
        f"round {index}: 3 contributors" for index in range(3)
    ]
    digest = last.rsplit(" ", 1)[1]
    run(tmp_path, verify)
    figures = json.loads(run(tmp_path, evaluate.replace("DIGEST", digest)))
    # A guess is ln 2 = 0.69 off.
    assert 0 < figures["heldout"] < 0.4
    kept = tmp_path / "alice" / "local" / "head.safetensors"
    assert b"bias" in kept.read_bytes()
