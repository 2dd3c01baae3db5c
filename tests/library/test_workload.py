import hashlib
import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lensemble.workload import (
    UNSAID_AT_DEFAULT,
    FieldTerms,
    Gauge,
    Inner,
    NoisyField,
    NoopTask,
    Normalize,
    Objective,
    Privacy,
    Release,
    Workload,
    WorldModelTask,
    initial_parameters,
    layout,
    parameter_shapes,
)


def test_the_defaults_are_a_contract() -> None:
    """A change of a default changes every config hash and every warm start: it is on purpose."""
    workload = Workload()
    assert workload.digest == "78ee3bcdcd8db42032f65f81356f9e3cdf26e47568e1319f6cf7b6e31e66f2ad"
    assert layout(workload).digest == (
        "7514fec2a150bedb239c824c0701d52c42c39e19099de18819686a3ccb2b500c"
    )
    flat = initial_parameters(workload)
    assert (flat.dtype, flat.shape) == (np.float32, (27480,))
    assert hashlib.sha256(flat.tobytes()).hexdigest() == (
        "be4e8c6c2dcc5a2f7005cc1cde3af8c1b7bd3f7bad4acdf7c95ff4aa61bda613"
    )


def test_canonical_is_sorted_compact_ascii_json_of_every_key() -> None:
    workload = Workload(
        name="arm-2",
        root_seed=7,
        gauge=Gauge(align=True),
        objective=Objective(probe_hash="ab" * 32, anchor="rotation"),
        normalize=Normalize(kind="stats", offset=(0.5,) * 6, scale=(2.0,) * 6),
    )
    text = workload.canonical().decode("ascii")
    tree = json.loads(text)
    assert text == json.dumps(tree, sort_keys=True, separators=(",", ":"))
    assert set(tree) == set(Workload.model_fields)
    assert workload.digest == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("path", UNSAID_AT_DEFAULT)
def test_a_key_at_its_default_may_be_unsaid_and_counts_otherwise(path: str) -> None:
    *sections, key = path.split(".")
    tree = json.loads(Workload().canonical())
    for section in sections:
        tree = tree[section]
    assert key not in tree


def test_what_is_unsaid_at_its_default_changes_the_hash_when_it_is_set() -> None:
    probe = Objective(probe_hash="ab" * 32)
    plain = Workload(objective=probe)
    turned = Workload(objective=probe, gauge=Gauge(align=True))
    rotation = Workload(objective=probe.model_copy(update={"anchor": "rotation"}))
    shifted = Normalize(kind="stats", offset=(0.1,) * 6, scale=(3.0,) * 6)
    scaled = Workload(objective=probe, normalize=shifted)
    assert len({plain.digest, turned.digest, rotation.digest, scaled.digest}) == 4
    for each in (plain, turned, rotation, scaled):
        assert Workload.model_validate_json(each.canonical()) == each


def test_alignment_needs_a_probe() -> None:
    with pytest.raises(ValidationError, match=r"gauge.align is true.*objective.probe_hash"):
        Workload(gauge=Gauge(align=True))


@given(
    seed=st.integers(0, (1 << 63) - 1),
    task=st.builds(WorldModelTask, latent_dim=st.integers(1, 64), history=st.integers(1, 4))
    | st.builds(NoopTask, parameters=st.integers(1, 100)),
    inner=st.builds(Inner, steps=st.integers(1, 100), lr=st.floats(1e-6, 1.0)),
    objective=st.builds(Objective, lambda_sig=st.floats(0.0, 1e6)),
)
def test_what_travels_is_what_was_meant(
    seed: int, task: WorldModelTask | NoopTask, inner: Inner, objective: Objective
) -> None:
    meant = Workload(root_seed=seed, task=task, inner=inner, objective=objective)
    heard = Workload.model_validate_json(meant.canonical())
    assert heard == meant
    assert heard.digest == meant.digest


def test_a_whole_number_is_the_same_weight() -> None:
    assert Workload(objective=Objective(lambda_sig=5)).digest == (
        Workload(objective=Objective(lambda_sig=5.0)).digest
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"name": "Arm"},
        {"name": "arm\n"},
        {"name": ""},
        {"root_seed": -1},
        {"root_seed": 1 << 63},
        {"root_seed": "7"},
        {"root_seed": True},
        {"rounds": 5},
        {"task": {"kind": "other"}},
        {"task": {"kind": "noop", "latent_dim": 3}},
        {"inner": {"steps": 0}},
        {"inner": {"lr": float("nan")}},
        {"objective": {"lambda_sig": float("inf")}},
        {"objective": {"lambda_sig": -1.0}},
        {"outer": {"momentum": 1.0}},
        {"outer": {"dtype": "bf16"}},
        {"field": {"k": 31}},
        {"field": {"k": 30, "n_max": 4096, "more": 1}},
        {"privacy": {"noise_multiplier": 0.0}},
        {"privacy": {"clip_norm": 0.0}},
        {"privacy": {"sample_rate": 0.0}},
        {"privacy": {"delta": 1.0}},
        {"privacy": {"unit": "episode", "placement": "distributed"}},
        {"privacy": {"enabled": True, "unit": "episode"}, "task": {"kind": "noop"}},
        {"release": {"quantize": "int4"}},
    ],
    ids=str,
)
def test_what_is_not_a_workload(tree: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Workload.model_validate(tree)


def test_the_bound_of_the_field_leaves_no_wrap() -> None:
    for k in (8, 24, 30):
        for n_max in (1, 63, 64, 4096):
            terms = FieldTerms(k=k, n_max=n_max)
            assert n_max * round(terms.bound * 2**k) < 1 << 31


def test_the_action_head_is_in_no_layout() -> None:
    names = parameter_shapes(WorldModelTask())
    assert not [name for name in names if "action" in name or "head" in name]
    assert {name.split(".")[0] for name in names} == {"encoder", "predictor"}


def test_the_warm_start_depends_on_the_seed_and_the_name_alone() -> None:
    small = Workload(task=WorldModelTask(latent_dim=4), root_seed=5)
    wide = Workload(task=WorldModelTask(latent_dim=4, action_embedding=9), root_seed=5)
    other = Workload(task=WorldModelTask(latent_dim=4), root_seed=6)
    first = layout(small).views(initial_parameters(small))
    second = layout(wide).views(initial_parameters(wide))
    third = layout(other).views(initial_parameters(other))
    for name in first:
        if name.startswith("encoder."):
            assert np.array_equal(first[name], second[name])
        assert not np.array_equal(first[name], third[name])
    for name, view in first.items():
        weight = first[name.rsplit(".", 1)[0] + ".weight"]
        assert np.abs(view).max() <= 1 / np.sqrt(weight.shape[1])


def test_the_noop_warm_start_is_zero() -> None:
    flat = initial_parameters(Workload(task=NoopTask(parameters=10)))
    assert np.array_equal(flat, np.zeros(10, dtype=np.float32))


# ---- privacy ----


def private(n_max: int = 64, k: int = 20, **terms: object) -> Workload:
    return Workload(
        field=FieldTerms(k=k, n_max=n_max),
        privacy=Privacy.model_validate({"enabled": True} | terms),
    )


def test_the_field_must_have_room_for_the_noise_and_says_how_much() -> None:
    local, spread = private(k=23).room, private(k=24, placement="distributed", cohort=64).room
    assert isinstance(local, NoisyField)
    assert isinstance(spread, NoisyField)
    assert (local.coordinate_bound, local.sum_bound(64)) == (9.5, 132.0)
    assert spread.sum_bound(64) == 72.5
    with pytest.raises(ValidationError, match=r"field\.k is 24.*reach 132.*at most 23"):
        private(k=24)
    off = Workload(privacy=Privacy(noise_multiplier=1000.0))
    assert off.room == off.field
    episodes = private(k=24, unit="episode", noise_multiplier=1000.0)
    assert episodes.room == episodes.field


@given(
    st.integers(8, 30),
    st.integers(1, 4096),
    st.floats(1e-3, 100.0),
    st.floats(1e-2, 100.0),
    st.booleans(),
)
def test_no_sum_that_is_allowed_wraps(
    k: int, n_max: int, clip: float, sigma: float, spread: bool
) -> None:
    cohort = max(2, n_max)
    terms = {
        "clip_norm": clip,
        "noise_multiplier": sigma,
        "placement": "distributed" if spread else "local",
        "cohort": cohort,
    }
    each = sigma * clip / (math.sqrt(cohort) if spread else 1.0)
    reach = n_max * clip + 8.5 * each * math.sqrt(n_max)
    try:
        workload = private(n_max, k, **terms)
    except ValidationError:
        assert reach * 2.0**k > 2.0**31 * (1 - 1e-9)
    else:
        assert isinstance(workload.room, NoisyField)
        assert workload.room.sum_bound(n_max) == pytest.approx(reach)
        assert workload.room.sum_bound(n_max) * 2.0**k <= 2.0**31 * (1 + 1e-9)
        assert workload.privacy.noise_sd == pytest.approx(each)


@pytest.mark.parametrize(
    ("terms", "text"),
    [
        ({"kind": "stats", "offset": [0.0] * 6, "scale": [1.0] * 5}, "scale 5"),
        ({"kind": "stats", "offset": [0.0] * 6, "scale": [0.0] * 6}, "greater than 0"),
        ({"kind": "stats", "offset": [0.0] * 5, "scale": [1.0] * 5}, "takes 6"),
        ({"kind": "stats"}, "if and only if"),
        ({"kind": "none", "offset": [0.0] * 6, "scale": [1.0] * 6}, "if and only if"),
        ({"kind": "stats", "offset": [float("nan")] * 6, "scale": [1.0] * 6}, "finite"),
    ],
)
def test_normalisation_gives_two_numbers_for_every_dimension(
    terms: dict[str, object], text: str
) -> None:
    with pytest.raises(ValidationError, match=text):
        Workload.model_validate({"normalize": terms})


def test_the_shipped_file_states_every_key() -> None:
    def keys(tree: dict[str, object], under: str = "") -> set[str]:
        found = set()
        for name, value in tree.items():
            found |= keys(value, f"{name}.") if isinstance(value, dict) else {under + name}
        return found

    path = Path(__file__).parents[2] / "configs" / "workloads" / "arm.toml"
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    whole = Workload.model_validate(tree)
    assert keys(tree) == keys(whole.model_dump(mode="json"))
    assert whole.inner == Inner()
    assert whole.objective == Objective()
    assert (whole.privacy, whole.release) == (Privacy(), Release())
