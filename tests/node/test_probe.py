import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lensemble.errors import ConfigError, ProbeError
from lensemble.ids import Digest
from lensemble.workload import Objective, initial_parameters
from lensemble_node.worker.training import probe
from lensemble_node.worker.training.arguments import read_workload
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds

ANCHORED = Objective(lambda_anc=0.5, probe_hash="0" * 64)
WORKLOAD = worlds.small().model_copy(update={"objective": ANCHORED})
START = initial_parameters(WORKLOAD)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.data(tmp_path_factory.mktemp("arm"))


@pytest.fixture
def made(folder: Path) -> probe.Probe:
    return probe.build(DataSource(folder / "public.h5"), WORKLOAD, START, 20)


def test_a_probe_reads_back_and_keeps_its_hash(made: probe.Probe, tmp_path: Path) -> None:
    assert made.points.shape == (303, 6)
    assert made.targets.shape == (20, 8)
    made.write(tmp_path / "probe.safetensors")
    again = probe.read(tmp_path / "probe.safetensors")
    assert again.digest == made.digest
    again.expect(made.digest)


def test_every_array_counts_in_the_hash(made: probe.Probe) -> None:
    parts = (made.points, made.landmarks, made.targets)
    for index in range(3):
        changed = [part.copy() for part in parts]
        changed[index].flat[0] += 1
        other = probe.Probe(*changed)
        assert other.digest != made.digest
        with pytest.raises(ProbeError, match=made.digest):
            other.expect(made.digest)


def test_landmark_counts_have_limits(folder: Path) -> None:
    for count in (7, 304):
        with pytest.raises(ProbeError, match="8 to 303"):
            probe.build(DataSource(folder / "public.h5"), WORKLOAD, START, count)


def test_damaged_and_inconsistent_files_are_refused(made: probe.Probe, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(ProbeError, match="cannot be read"):
        probe.read(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(ProbeError, match="cannot be read"):
        probe.read(path)
    good = {"points": made.points, "landmarks": made.landmarks, "targets": made.targets}
    for name, value in {
        "points": np.full_like(made.points, np.nan),
        "landmarks": made.landmarks + 1000,
        "targets": made.targets[:-1],
    }.items():
        save_file(good | {name: value}, path, metadata={"algorithm": probe.ALGORITHM})
        with pytest.raises(ProbeError, match="do not belong together"):
            probe.read(path)
    save_file(good, path)
    with pytest.raises(ProbeError, match="hash algorithm 'none'"):
        probe.read(path)


def test_training_with_an_anchor_needs_the_pinned_probe(
    folder: Path, made: probe.Probe, tmp_path: Path
) -> None:
    path = tmp_path / "probe.safetensors"
    made.write(path)
    trainer = worlds.trainer(WORKLOAD, folder, tmp_path / "a")
    with pytest.raises(ProbeError, match="none is pinned"):
        trainer.train(START, **worlds.order(WORKLOAD))
    with pytest.raises(ProbeError):
        trainer.pin(path, Digest("0" * 64))
    trainer.pin(path, made.digest)
    anchored = trainer.train(START, **worlds.order(WORKLOAD))
    free = worlds.small()
    plain = worlds.trainer(free, folder, tmp_path / "b").train(START, **worlds.order(free))
    assert anchored.l2_norm != plain.l2_norm
    with pytest.raises(ConfigError):
        Trainer(worlds.noop(), None, tmp_path / "c", "n0", 1).pin(path, made.digest)


def test_command_makes_the_probe_that_a_workload_names(
    folder: Path, made: probe.Probe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terms, out = tmp_path / "w.json", tmp_path / "probe.safetensors"
    terms.write_bytes(WORKLOAD.canonical())
    common = ["--workload", str(terms), "--data", str(folder / "public.h5"), "--out", str(out)]
    assert probe.main(["build", *common, "--landmarks", "20"]) == 0
    assert json.loads(capsys.readouterr().out)["probe_hash"] == made.digest
    assert probe.read(out).digest == made.digest
    assert probe.main(["build", *common, "--landmarks", "7"]) == 1
    assert "Error: 7 landmarks" in capsys.readouterr().err


def test_a_probe_is_pinned_and_verified(
    folder: Path, made: probe.Probe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, terms, start = (tmp_path / name for name in ("probe", "w.toml", "start.f32"))
    made.write(file)
    START.tofile(start)
    free = worlds.small()
    task = "\n".join(f"{k} = {json.dumps(v)}" for k, v in free.task.model_dump().items())
    terms.write_text(f'[task]\n{task}\n[objective]\nprobe_hash = ""  # as built\nknots = 17\n')
    common = [str(file), "--workload", str(terms)]
    assert probe.main(["verify", *common]) == 0
    assert not json.loads(capsys.readouterr().out)["named_by_workload"]
    assert probe.main(["pin", *common]) == 0
    said = json.loads(capsys.readouterr().out)
    pinned = read_workload(terms)
    assert said["probe_hash"] == pinned.objective.probe_hash == made.digest
    assert said["config_hash"] == pinned.digest
    assert "# as built" in terms.read_text()
    assert probe.main(["verify", *common, "--start", str(start)]) == 0
    assert json.loads(capsys.readouterr().out)["targets_recomputed"]

    (START * 1.5).astype("<f4").tofile(start)
    assert probe.main(["verify", *common, "--start", str(start)]) == 1
    assert "latent spreads from where" in capsys.readouterr().err
    replace(made, landmarks=made.landmarks[::-1].copy()).write(file)
    assert probe.main(["verify", *common]) == 1
    assert f"the round's is {made.digest}" in capsys.readouterr().err
    terms.write_text("name = 'arm'\n")
    assert probe.main(["pin", *common]) == 1
    assert "has 0 lines `probe_hash" in capsys.readouterr().err
    assert probe.main(["verify", *common]) == 1
    assert "has (6,) and 12" in capsys.readouterr().err


def test_landmarks_that_are_one_point_hold_nothing(made: probe.Probe) -> None:
    with pytest.raises(ProbeError, match="1 distinct landmarks cannot hold a latent of 8"):
        probe.verify(replace(made, landmarks=np.zeros_like(made.landmarks)), worlds.small(), None)
