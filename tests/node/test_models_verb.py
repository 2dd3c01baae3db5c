"""``models ls``, ``verify`` and ``prune`` on a cache that stages filled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lensemble_node.worker.inference import fetch, models
from lensemble_node.worker.inference.cache import TENSORS
from tests.node.range_server import serving
from tests.node.stage_weights import QUICK, content, order, parts
from tests.node.test_weights import in_place
from tests.tiny_gguf import write_tiny


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = models.main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_models_are_listed_verified_and_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = content()
    every = parts(whole)
    here = ("--state-dir", str(tmp_path))
    assert say(capsys, "ls", *here)[1]["models"] == []
    with serving(whole) as origin:
        wanted = order(tmp_path / "models", whole, every[:7], origin.url, of_all=every)
        weights = fetch.fetch(wanted, QUICK)
        (row,) = say(capsys, "ls", *here)[1]["models"]
        assert (row["tensors"], row["tensor_bytes"], row["in_use"]) == (7, 70_000, True)
        assert "secret" not in row["source"]
        assert row["disk_bytes"] < len(whole), "what was not fetched takes no room"
        assert say(capsys, "prune", *here)[1] == {
            "removed": [], "in_use": [row["identity"]], "freed_bytes": 0,
        }  # fmt: skip
        weights.close()

        assert say(capsys, "verify", *here) == (0, {"models": 1, "tensors": 7, "problems": []})
        there = tmp_path / "models" / row["identity"] / TENSORS
        with there.open("r+b") as file:
            file.seek(every[2].offset + 5)
            file.write(bytes([whole[every[2].offset + 5] ^ 1]))
        status, said = say(capsys, "verify", "toy", *here)
        assert status == models.EXIT_DAMAGED
        assert said["problems"][0].startswith("blk.2.attn_q.weight of toy")
        again = fetch.fetch(wanted, QUICK)
        assert again.fetched_bytes == every[2].nbytes, "only what was damaged comes again"
        again.close()
        assert say(capsys, "verify", *here)[0] == 0

        freed = say(capsys, "prune", row["identity"][:12], *here)[1]
        assert (freed["removed"], freed["freed_bytes"] > 70_000) == ([row["identity"]], True)
        assert not list((tmp_path / "models").iterdir())


def test_a_file_in_place_is_listed_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path / "m.gguf")
    wanted = in_place(path, tmp_path / "models")
    fetch.fetch(wanted).close()
    here = ("--state-dir", str(tmp_path))
    (row,) = say(capsys, "ls", *here)[1]["models"]
    assert (row["in_place"], row["source"], row["tensors"]) == (
        True,
        str(path),
        len(wanted.tensors),
    )
    at = wanted.tensors[-1].offset
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes(50) + whole[at + 50 :])
    assert say(capsys, "verify", *here)[0] == models.EXIT_DAMAGED
    path.unlink()
    assert "No such file" in say(capsys, "verify", *here)[1]["problems"][0]
    say(capsys, "prune", *here)
    assert not say(capsys, "ls", *here)[1]["models"]


def test_a_wrong_place_or_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["ls", "--state-dir", str(tmp_path / "none")], "not a directory"),
        (["ls", "--config", str(tmp_path / "none.toml")], "no file"),
        (["ls", "ghost", "--state-dir", str(tmp_path)], "no model 'ghost'"),
    ):
        assert models.main(words) == models.EXIT_REFUSED
        shown = capsys.readouterr().err
        assert said in shown
        assert "Try:" in shown


def test_the_verb_runs_beside_a_configuration(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "node.toml").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "lensemblectl.app", "models", "ls"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "cli")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "No models in" in done.stdout
