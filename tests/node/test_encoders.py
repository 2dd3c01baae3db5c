import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lensemble.errors import DatasetError
from lensemble.workload import Gauge, Inner, Objective, Workload, WorldModelTask, layout
from lensemble.workload import initial_parameters as initial
from lensemble_local import arm
from lensemble_node.worker.training import baseline, gauge, probe
from lensemble_node.worker.training.encoders import encoder_of
from lensemble_node.worker.training.evaluate import Domain, Evaluator, Scores
from lensemble_node.worker.training.model import ActionHead, WorldModel
from lensemble_node.worker.training.source import DataSource
from tests.node import worlds

torch.set_num_threads(1)
SIDE = 16
SEEING = {
    "image_height": SIDE,
    "image_width": SIDE,
    "image_channels": 3,
    "hidden": 32,
    "latent_dim": 8,
    "conv_width": 4,
    "patch": 4,
    "heads": 2,
}
KINDS = ("conv", "vit")


def task(kind: str, **more: object) -> WorldModelTask:
    return WorldModelTask.model_validate({"encoder": kind} | SEEING | more)


def pictures(*shape: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.Generator(np.random.Philox(seed))
    return torch.from_numpy(draw.integers(0, 256, (*shape, SIDE, SIDE, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["state", *KINDS])
def test_layout_and_module_name_the_same_tensors(kind: str) -> None:
    workload = Workload(task=task(kind))
    model = WorldModel(task(kind))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {t.name: t.shape for t in layout(workload).tensors}
    assert not list(model.buffers())
    model.load(initial(workload))
    for name, value in model.named().items():
        assert value.std() > 0 or ".norm" in name, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(8, 8), (12, 20), (16, 8)])
def test_any_size_of_picture_has_its_layout(kind: str, size: tuple[int, int]) -> None:
    seen = task(kind, image_height=size[0], image_width=size[1])
    encoder = encoder_of(seen)
    out = encoder(torch.zeros(3, 2, *size, 3, dtype=torch.uint8))
    assert out.shape == (3, 2, 8)
    shapes = {f"encoder.{name}": tuple(p.shape) for name, p in encoder.named_parameters()}
    assert shapes.items() <= {t.name: t.shape for t in layout(Workload(task=seen)).tensors}.items()


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_encoded_by_itself(kind: str) -> None:
    """No statistics of a batch: who else is in it makes no difference."""
    model = WorldModel(task(kind))
    model.load(initial(Workload(task=task(kind))))
    some = pictures(6, 3)
    together = model.latents(some)
    assert together.shape == (6, 3, 8)
    assert np.allclose(model.latents(some[2:3])[0], together[2], atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_turned_weights_of_a_picture_model_predict_the_same(kind: str) -> None:
    one, other = WorldModel(task(kind)), WorldModel(task(kind))
    flat = initial(Workload(task=task(kind)))
    turn = np.linalg.qr(np.random.Generator(np.random.Philox(3)).normal(size=(8, 8)))[0]
    one.load(flat)
    moved = flat.copy()
    gauge.turn_weights(one.layout.views(moved), turn, 3)
    other.load(moved)
    some, rotation = pictures(5, 3), torch.from_numpy(turn.astype(np.float32))
    actions = ActionHead(task(kind), 2, 0)(torch.ones(5, 3, 2))
    with torch.no_grad():
        assert (one.encode(some) @ rotation - other.encode(some)).abs().max() < 1e-5
        ahead = one.predict(one.encode(some), actions) @ rotation
        assert (ahead - other.predict(other.encode(some), actions)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"patch": 5}, "patch is 5; it must divide image_height"),
        ({"heads": 3}, "heads is 3; it must divide hidden"),
        ({"image_height": 1024, "image_width": 1024, "patch": 2}, "4096 is the most"),
    ],
)
def test_a_vit_that_cannot_be_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        task("vit", **more)
    task("conv", **more)


# ---- on data ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    arm.make(place, arm.Order(nodes=1, episodes=3, engine="numpy", pictures=SIDE))
    return place


def workload(kind: str, **objective: object) -> Workload:
    return Workload(
        task=task(kind),
        inner=Inner(steps=20, batch=32, lr=2e-3),
        objective=Objective.model_validate({"sketch_dim": 16} | objective),
    )


def test_pictures_of_another_shape_are_refused(folder: Path) -> None:
    seen = workload("conv")
    wide = seen.model_copy(update={"task": task("conv", image_width=24)})
    with pytest.raises(DatasetError, match=r"pictures of \(16, 16, 3\).*takes \(16, 24, 3\)"):
        baseline.warm_start(wide, folder / "public.h5", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_train_in_a_round_and_drift_on_a_probe(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    plain = workload(kind)
    start = initial(plain)
    public = probe.build(DataSource(folder / "public.h5"), plain, start, 20)
    assert public.points.dtype == np.uint8
    public.write(tmp_path / "probe")
    again = probe.read(tmp_path / "probe")
    assert again.digest == public.digest
    probe.verify(again, plain, start)
    anchored = workload(kind, lambda_anc=0.1, probe_hash=public.digest)
    turning = anchored.model_copy(update={"gauge": Gauge(align=True, threshold_degrees=0.0)})
    trainer = worlds.trainer(turning, folder, tmp_path / "state")
    trainer.pin(tmp_path / "probe", public.digest)
    done = trainer.train(start, **worlds.order(turning))
    assert done.drift is not None
    assert done.drift.aligned
    assert done.l2_norm > 0
    assert math.isfinite(done.loss_last)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_learnt_and_collapse_is_noticed(kind: str, folder: Path) -> None:
    """A smoke test of latent error and alarm; so little training reads no state from pixels."""

    def scores(lambda_sig: float) -> Scores:
        terms = workload(kind, lambda_sig=lambda_sig)
        pair = folder / "node0.h5", folder / "heldout-0.h5"
        judge = Evaluator(terms, [Domain.read(*pair, terms)])
        return judge.score(baseline.warm_start(terms, folder / "node0.h5", 150))[0]

    healthy, collapsed = scores(2.56), scores(0.0)
    assert healthy.latent < 0.95 < collapsed.latent
    assert not healthy.collapsed
    assert collapsed.std < 0.1 < healthy.std
    assert collapsed.collapsed
