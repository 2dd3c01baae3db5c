import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lensemble.errors import (
    ArtifactError,
    ConfigError,
    DatasetError,
    EvaluationError,
    StorageError,
)
from lensemble.params import parameter_digest
from lensemble.workload import Inner, Workload, initial_parameters, layout
from lensemble_node.worker.training import baseline, evaluate
from lensemble_node.worker.training.arguments import read_parameters, read_workload
from lensemble_node.worker.training.evaluate import Decoder, Domain, Evaluator, Scores
from tests.node import worlds

torch.set_num_threads(1)
WORKLOAD = Workload(inner=Inner(steps=20, lr=4e-3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worlds.data(tmp_path_factory.mktemp("arm"), nodes=2, episodes=6)


@pytest.fixture(scope="module")
def domains(folder: Path) -> list[Domain]:
    names = [(folder / f"node{i}.h5", folder / f"heldout-{i}.h5") for i in range(2)]
    return [Domain.read(*pair, WORKLOAD) for pair in names]


@pytest.fixture(scope="module")
def warm(folder: Path) -> np.ndarray:
    return baseline.warm_start(WORKLOAD, folder / "public.h5", 120)


def test_training_improves_the_scores_of_held_out_data(
    domains: list[Domain], warm: np.ndarray
) -> None:
    evaluator = Evaluator(WORKLOAD, domains)
    fresh = Scores.mean(evaluator.score(initial_parameters(WORKLOAD)))
    trained = Scores.mean(evaluator.score(warm))
    assert trained.state5 < 0.8 * fresh.state5
    assert trained.std > 0.3
    assert trained.linear_r2 > 0.8


def test_scores_are_reproducible_and_do_not_depend_on_what_was_scored_before(
    domains: list[Domain], warm: np.ndarray
) -> None:
    evaluator = Evaluator(WORKLOAD, domains)
    first = evaluator.score(warm)
    evaluator.score(initial_parameters(WORKLOAD))
    assert evaluator.score(warm) == first == Evaluator(WORKLOAD, domains).score(warm)


def test_a_collapsed_latent_shows_in_std_and_r2_and_not_as_success(
    domains: list[Domain], warm: np.ndarray
) -> None:
    flat = warm.copy()
    views = layout(WORKLOAD).views(flat)
    views["encoder.output.weight"][...] *= 1e-3
    healthy, scores = (
        Scores.mean(Evaluator(WORKLOAD, domains).score(each)) for each in (warm, flat)
    )
    assert healthy.std > 0.3
    assert healthy.linear_r2 > 0.7
    assert scores.std < 0.1
    assert scores.linear_r2 < 0.5
    assert scores.state5 > healthy.state5
    assert (healthy.collapsed, scores.collapsed) == (False, True)
    # A rank is no alarm: only the scale has changed.
    assert scores.dimension == pytest.approx(healthy.dimension, rel=1e-3)


def test_an_alarm_needs_both_and_takes_what_is_no_number_for_collapse() -> None:
    def alarm(std: float, r2: float) -> bool:
        return Scores(1.0, 1.0, r2, std, 1.0, (1.0,)).collapsed

    assert [alarm(0.01, 0.9), alarm(1.0, 0.1), alarm(0.01, 0.1)] == [False, False, True]
    assert alarm(math.nan, math.nan)


def test_the_error_over_the_horizon_goes_as_far_as_asked(folder: Path, warm: np.ndarray) -> None:
    pair = (folder / "node0.h5", folder / "heldout-0.h5")
    (scores,) = Evaluator(WORKLOAD, [Domain.read(*pair, WORKLOAD, 9)]).score(warm)
    assert len(scores.horizon) == 9
    assert scores.state5 == scores.horizon[4]
    assert np.isfinite(scores.horizon).all()
    mean = Scores.mean([scores, replace(scores, std=0.0, horizon=(0.0,) * 9)])
    assert mean.std == pytest.approx(scores.std / 2)
    assert mean.horizon == pytest.approx(tuple(each / 2 for each in scores.horizon))


def test_one_data_set_in_one_place_is_that_node_alone(folder: Path, warm: np.ndarray) -> None:
    alone = baseline.local_only(WORKLOAD, folder / "node0.h5", warm, 25, "n0")
    central = baseline.centralised(WORKLOAD, [folder / "node0.h5"], warm, 25, ["n0"])
    assert np.array_equal(central, alone)


def test_one_place_learns_from_all_data(
    folder: Path, domains: list[Domain], warm: np.ndarray
) -> None:
    data = [folder / f"node{i}.h5" for i in range(2)]
    few = [
        baseline.centralised(WORKLOAD, data[::way], warm, 3, ["n0", "n1"][::way]) for way in (1, -1)
    ]
    assert np.allclose(*few, atol=1e-5)
    both = baseline.centralised(WORKLOAD, data, warm, 200, ["n0", "n1"])
    evaluator = Evaluator(WORKLOAD, domains)
    before, after = (Scores.mean(evaluator.score(flat)) for flat in (warm, both))
    assert after.latent < before.latent


def test_parameters_that_are_not_finite_are_refused(domains: list[Domain]) -> None:
    flat = initial_parameters(WORKLOAD)
    flat[3] = np.nan
    with pytest.raises(EvaluationError, match="not finite"):
        Evaluator(WORKLOAD, domains).score(flat)


def test_decoders_recover_linear_and_bent_states() -> None:
    draw = np.random.Generator(np.random.Philox(0))
    states = draw.uniform(-2, 2, (3000, 3)).astype(np.float32)
    straight = states @ draw.normal(size=(3, 5)).astype(np.float32) + 3
    bent = np.concatenate([np.tanh(states), states**3 * 0.1], axis=1)
    linear = Decoder(straight[:2000], states[:2000], 0, 1)
    assert np.abs(linear(straight[2000:]) - states[2000:]).max() < 0.05
    shrunk = straight * np.float32(1e-3)
    nothing = Decoder(shrunk[:2000], states[:2000], 0, 1)(shrunk[2000:])
    assert np.square(nothing - states[2000:]).mean() > 0.5 * states.var()
    curved = Decoder(bent[:2000], states[:2000], 256, 1)
    errors = np.square(curved(bent[2000:]) - states[2000:]).mean()
    assert errors < 0.01 * states.var()


def test_a_decoder_reads_latents_beside_those_it_knows_without_blowing_them_up() -> None:
    draw = np.random.Generator(np.random.Philox(0))
    states = draw.uniform(-2, 2, (4000, 3)).astype(np.float32)
    lift = 0.6 * draw.normal(size=(3, 12)).astype(np.float32)
    latents = np.tanh(states @ lift + draw.uniform(-1, 1, 12).astype(np.float32))
    decode = Decoder(latents[:3000], states[:3000], evaluate.FEATURES, 1)
    known, truth = latents[3000:], states[3000:]
    beside = known + (0.1 * known.std() * draw.normal(size=known.shape)).astype(np.float32)
    errors = [np.square(decode(each) - truth).mean() / truth.var() for each in (known, beside)]
    # A hundredth of the variance was added; a ridge of 1e-4 makes an eighth of it.
    assert errors[0] < 0.01
    assert errors[1] < 0.06


# ---- the commands ----


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("workload") / "w.toml"
    path.write_text("name = 'arm'\n[inner]\nsteps = 20\nlr = 4e-3\n")
    return path


def test_commands_warm_start_train_alone_and_score(
    folder: Path, toml: Path, tmp_path: Path, warm: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    start = tmp_path / "warm.safetensors"
    common = ["--workload", str(toml)]
    public = str(folder / "public.h5")
    baseline.main(["warmstart", *common, "--data", public, "--out", str(start), "--steps", "120"])
    said = json.loads(capsys.readouterr().out)
    assert said["digest"] == parameter_digest(layout(WORKLOAD), warm)
    alone = tmp_path / "alone.f32"
    data = str(folder / "node0.h5")
    arguments = ["--data", data, "--out", str(alone), "--start", str(start), "--steps", "30"]
    baseline.main(["local", *common, *arguments, "--node", "n0"])
    capsys.readouterr()
    expected = baseline.local_only(WORKLOAD, folder / "node0.h5", warm, 30, "n0")
    assert np.array_equal(read_parameters(alone, WORKLOAD), expected)
    central = tmp_path / "central.f32"
    arguments = ["--data", data, data, "--out", str(central), "--start", str(start)]
    assert baseline.main(["central", *common, *arguments, "--steps", "3"]) == 0
    capsys.readouterr()

    pairs = []
    for index in range(2):
        pairs += ["--train", str(folder / f"node{index}.h5")]
        pairs += ["--heldout", str(folder / f"heldout-{index}.h5")]
    evaluate.main([*common, *pairs, "--parameters", str(start), str(alone), "--json"])
    answers = json.loads(capsys.readouterr().out)
    assert [a["parameters"] for a in answers] == [str(start), str(alone)]
    assert set(answers[0]["mix"]) == {
        *("latent", "state5", "linear_r2", "std", "dimension", "horizon", "collapsed")
    }
    assert set(answers[0]["domains"]) == {str(folder / f"heldout-{i}.h5") for i in range(2)}
    evaluate.main([*common, *pairs, "--parameters", str(start)])
    assert "state5" in capsys.readouterr().out


def test_commands_end_with_a_reason(
    folder: Path, toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--workload", str(toml)]
    pair = ["--train", str(folder / "node0.h5"), "--heldout", str(folder / "heldout-0.h5")]
    missing = str(tmp_path / "none.f32")
    assert evaluate.main([*common, *pair, "--parameters", missing]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"Error: {missing}: No such file")
    assert "\nTry: " in said
    out = ["--out", str(tmp_path / "o.f32")]
    assert baseline.main(["warmstart", *common, "--data", missing, *out]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_local_training_follows_the_rounds_of_a_federation() -> None:
    segments = list(baseline.rounds(WORKLOAD, 50))
    assert [(s.steps, s.global_step) for s in segments] == [(20, 0), (20, 20), (10, 40)]
    assert len({s.sketch_seed for s in segments}) == 3


def test_workloads_and_parameters_are_read_strictly(toml: Path, tmp_path: Path) -> None:
    assert read_workload(toml) == WORKLOAD
    canonical = tmp_path / "w.json"
    canonical.write_bytes(WORKLOAD.canonical())
    assert read_workload(canonical).digest == WORKLOAD.digest
    for text in ("name = 'arm'\nspeed = 3", "[inner]\nsteps = 'ten'", "[inner"):
        bad = tmp_path / "bad.toml"
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.toml"):
            read_workload(bad)
    with pytest.raises(ConfigError):
        read_workload(tmp_path / "none.toml")
    with pytest.raises(StorageError, match=r"weights\.safetensors"):
        read_parameters(tmp_path, WORKLOAD)
    for name in ("none.f32", "none.safetensors"):
        with pytest.raises(StorageError, match=name):
            read_parameters(tmp_path / name, WORKLOAD)
    short = tmp_path / "short.f32"
    short.write_bytes(b"\0" * 40)
    with pytest.raises(ArtifactError, match="has 40 bytes; the workload's model has 109920"):
        read_parameters(short, WORKLOAD)


def test_domains_that_do_not_fit_are_refused(folder: Path) -> None:
    wide = Workload(task=worlds.SMALL.model_copy(update={"observation_dim": 7}))
    with pytest.raises(DatasetError, match="6 observation columns"):
        Domain.read(folder / "node0.h5", folder / "heldout-0.h5", wide)
    with pytest.raises(ConfigError, match="no world model"):
        Domain.read(folder / "node0.h5", folder / "heldout-0.h5", worlds.noop())
