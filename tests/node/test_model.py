import numpy as np
import pytest
import torch

from lensemble.workload import (
    Workload,
    WorldModelTask,
    initial_parameters,
    layout,
    parameter_shapes,
)
from lensemble_node.worker.training.model import ActionHead, WorldModel, bind, values

torch.set_num_threads(1)
TASKS = [
    WorldModelTask(),
    WorldModelTask(observation_dim=3, latent_dim=5, hidden=7, history=1, action_embedding=2),
]


@pytest.mark.parametrize("task", TASKS)
def test_names_and_shapes_are_the_layouts(task: WorldModelTask) -> None:
    model = WorldModel(task)
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == parameter_shapes(task)
    assert not list(model.buffers())
    assert model.flat.shape == (model.layout.size,)


def test_default_size_is_stated() -> None:
    assert WorldModel(WorldModelTask()).layout.size == 27_480


@pytest.mark.parametrize("task", TASKS)
def test_load_and_named_are_views_of_one_vector_in_layout_order(task: WorldModelTask) -> None:
    workload = Workload(task=task)
    flat = initial_parameters(workload)
    model = WorldModel(task)
    model.load(flat)
    assert np.array_equal(values(model.flat), flat)
    for name, view in layout(workload).views(flat).items():
        assert np.array_equal(model.named()[name], view)
    model.encoder.input.weight.data.fill_(7.0)
    where = {t.name: t for t in model.layout.tensors}["encoder.input.weight"]
    part = values(model.flat)[where.offset : where.offset + where.size]
    assert np.all(part == 7.0)


def test_gradients_of_the_parts_are_the_gradient_of_the_whole() -> None:
    model = WorldModel(TASKS[1])
    model.load(initial_parameters(Workload(task=TASKS[1])))
    model.encode(torch.ones(4, 3)).square().sum().backward()
    assert model.flat.grad is not None
    parts = {n: p.grad for n, p in model.named_parameters()}
    joined = torch.cat([parts[t.name].flatten() for t in model.layout.tensors])
    assert torch.equal(model.flat.grad, joined)
    assert float(joined.abs().max()) > 0


def test_encoder_and_predictor_compute_what_is_documented() -> None:
    task = TASKS[1]
    model = WorldModel(task)
    model.load(initial_parameters(Workload(task=task)))
    named = {n: v.astype(np.float64) for n, v in model.named().items()}

    def perceptron(group: str, x: np.ndarray) -> np.ndarray:
        for part in ("input", "middle", "output"):
            x = x @ named[f"{group}.{part}.weight"].T + named[f"{group}.{part}.bias"]
            x = x / (1 + np.exp(-x)) if part != "output" else x
        return x

    seen = np.random.Generator(np.random.Philox(0)).normal(size=(4, 3))
    z = perceptron("encoder", seen)
    got = model.encode(torch.tensor(seen, dtype=torch.float32)).detach().numpy()
    assert np.allclose(got, z, atol=1e-5)
    e = np.ones((4, 2))
    after = z + perceptron("predictor", np.concatenate([z, e], axis=1))
    latents = torch.tensor(z[:, None], dtype=torch.float32)
    embedded = torch.ones(4, 1, 2)
    assert np.allclose(model.predict(latents, embedded).detach().numpy(), after, atol=1e-5)


def test_heads_are_seeded_and_share_nothing_with_the_layout() -> None:
    task = WorldModelTask()
    first, again, other = (ActionHead(task, 2, seed) for seed in (1, 1, 2))
    assert np.array_equal(values(first.flat), values(again.flat))
    assert not np.array_equal(values(first.flat), values(other.flat))
    assert not set(first.named()) & set(parameter_shapes(task))
    assert first(torch.zeros(5, 3, 2)).shape == (5, 3, 8)


def test_bound_vector_is_a_leaf_and_no_parameter() -> None:
    module = torch.nn.Linear(2, 3)
    flat = bind(module, ["bias", "weight"])
    assert flat.is_leaf
    assert len(list(module.parameters())) == 2
    flat.detach()[:3] = 4.0
    assert module.bias.tolist() == [4.0] * 3
