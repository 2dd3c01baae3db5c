"""Tasks of a node's own: consent, care with what the code does, and rounds as for any other."""

import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from lensemble.errors import (
    CheckpointIntegrityError,
    ConfigError,
    ContractViolation,
    DatasetError,
    LensembleError,
    TaskError,
)
from lensemble.ids import Digest, FederationId
from lensemble.task import MAX_OPTION_BYTES
from lensemble.wire import messages
from lensemble.workload import (
    MAX_CANONICAL_BYTES,
    CustomTask,
    FieldTerms,
    Objective,
    Privacy,
    Workload,
    initial_parameters,
    layout,
)
from lensemble_local.rounds import Federation
from lensemble_node.terms import agree
from lensemble_node.worker.training.arguments import read_workload
from lensemble_node.worker.training.local_round import Trainer
from lensemble_node.worker.training.source import DataSource, TaskCode
from lensemble_node.worker.training.stops import Diverged
from tests.node import texts, worlds

WORKLOAD = texts.workload()
PRIOR = initial_parameters(WORKLOAD)


def trainer(place: Path, workload: Workload = WORKLOAD, node: int = 0, **code: object) -> Trainer:
    given = {"entry": texts.ENTRY, "data": texts.folder(place / f"data{node}", node)} | code
    return Trainer(workload, TaskCode(**given), place / f"state{node}", f"n{node}", 1)


# ---- the workload ----


def custom(**terms: object) -> dict[str, object]:
    return {"kind": "custom", "entry": "a.b:C", "parameters": {"w": [2, 3]}} | terms


def nested(depth: int) -> dict[str, object]:
    return {"deeper": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("terms", "part"),
    [
        ({"entry": "a.b.C"}, "task.custom.entry"),
        ({"entry": "../a:C"}, "task.custom.entry"),
        ({"parameters": {}}, "task.custom.parameters"),
        ({"parameters": {"w": [0]}}, "task.custom.parameters.w"),
        ({"parameters": {"w": []}}, "task.custom.parameters.w"),
        ({"parameters": {"w": [1 << 20, 1 << 20]}}, "numbers; 2147483648 are the most"),
        ({"parameters": {"/etc/w": [1]}}, "task.custom.parameters"),
        ({"start": {"v": 1.0}}, "task.start names 'v'"),
        ({"options": {"x": "y" * MAX_OPTION_BYTES}}, "are the most"),
        ({"options": nested(12)}, "nests deeper"),
        ({"options": {"x": object()}}, "is not JSON"),
    ],
)
def test_a_custom_task_is_bounded(terms: dict[str, object], part: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Workload.model_validate({"task": custom(**terms)})
    told = str(caught.value)
    assert part in told or part in ".".join(str(e["loc"]) for e in caught.value.errors()), told


def test_what_belongs_to_the_world_model_is_refused_with_a_custom_task() -> None:
    task = CustomTask.model_validate(custom())
    with pytest.raises(ValidationError, match="has no latents"):
        Workload(task=task, objective=Objective(probe_hash="ab" * 32))
    with pytest.raises(ValidationError, match="has no episodes"):
        Workload(task=task, privacy=Privacy(enabled=True, unit="episode"))


def test_a_workload_that_would_not_travel_is_refused() -> None:
    assert MAX_CANONICAL_BYTES == messages.MAX_WORKLOAD_BYTES
    many = {f"layer_{'x' * 100}_{index}": [1] for index in range(900)}
    with pytest.raises(ValidationError, match="bytes of JSON; 65536 are the most"):
        Workload.model_validate({"task": custom(parameters=many)})


def test_canonical_json_gives_the_workload_back() -> None:
    assert Workload.model_validate_json(WORKLOAD.canonical()) == WORKLOAD


def test_the_start_is_drawn_or_as_the_workload_says() -> None:
    task = CustomTask(
        entry="a:B", parameters={"w": (4, 25), "b": (3,), "norm": (2,)}, start={"norm": 1.0}
    )
    workload = Workload(task=task)
    views = layout(workload).views(initial_parameters(workload))
    assert 0.1 < np.abs(views["shared.w"]).max() <= 0.2
    assert not views["shared.b"].any()
    assert (views["shared.norm"] == 1).all()
    other = initial_parameters(workload.model_copy(update={"root_seed": 1}))
    assert not np.array_equal(other, initial_parameters(workload))


# ---- consent ----


def welcome(workload: Workload, *, trains: bool = True) -> messages.Welcome:
    return messages.Welcome(
        federation=FederationId("5" * 32),
        epoch=1,
        build="b",
        coordinator="hub",
        workload=workload.canonical(),
        config_hash=workload.digest,
        layout_digest=layout(workload).digest,
        aggregation="masked",
        trains=trains,
        last=messages.LastRecord(round=-1, digest=Digest("0" * 64), contributors=()),
    )


@pytest.mark.parametrize(("entry", "here"), [("", "runs none"), ("os:System", "runs 'os:System'")])
def test_no_coordinator_makes_a_node_run_code(entry: str, here: str) -> None:
    with pytest.raises(ContractViolation, match=here) as caught:
        agree(welcome(WORKLOAD), plain=False, entry=entry)
    assert f'set `task.entry = "{texts.ENTRY}"`' in caught.value.remediation
    assert agree(welcome(WORKLOAD), plain=False, entry=texts.ENTRY).workload
    assert agree(welcome(WORKLOAD, trains=False), plain=False, entry=entry).workload


def test_the_worker_asks_for_consent_again(tmp_path: Path) -> None:
    made = trainer(tmp_path, entry="os:System")
    with pytest.raises(ConfigError, match=r"task\.entry is 'os:System'"):
        _ = made.facts
    with pytest.raises(ConfigError, match="this node names none"):
        Trainer(WORKLOAD, DataSource(tmp_path), tmp_path, "n", 1)


# ---- rounds ----


def test_a_federation_of_letters_learns_the_same_in_any_order(tmp_path: Path) -> None:
    # Words of 16 bits are rounded by chance.
    workload = texts.workload(lr=2e-2).model_copy(update={"field": FieldTerms(bits=32)})
    digests, losses = [], []
    for name, order in (("a", (0, 1, 2)), ("b", (2, 0, 1))):
        nodes = [trainer(tmp_path / name, workload, node) for node in order]
        made = Federation(workload, nodes, PRIOR)
        for _ in range(3):
            made.round()
            losses.append(float(np.mean([each.loss_first for each in made.releases])))
        digests.append(made.digest)
    assert digests[0] == digests[1]
    assert losses[2] < 0.9 * losses[0]


def test_the_shipped_workload_fits_its_class(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "configs" / "workloads" / "letters.toml"
    workload = read_workload(shipped)
    made = trainer(tmp_path, workload)
    assert made.facts.steps > workload.inner.batch


def test_an_aborted_round_rolls_back_the_data_and_what_is_local(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    first = made.train(PRIOR, **worlds.order(WORKLOAD)).vector.copy()
    again = made.train(PRIOR, **worlds.order(WORKLOAD, attempt=1))
    assert again.reused
    made.discard(0)
    assert np.array_equal(made.train(PRIOR, **worlds.order(WORKLOAD)).vector, first)
    assert made.adopt(0)
    second = trainer(tmp_path).train(PRIOR, **worlds.order(WORKLOAD, 1)).vector
    assert not np.array_equal(second, first)
    local = (tmp_path / "state0" / "local" / "head.safetensors").read_bytes()
    assert b"output.bias" in local
    assert "shared.output.bias" not in {each.name for each in layout(WORKLOAD).tensors}


def test_local_state_of_other_code_is_refused(tmp_path: Path) -> None:
    code = CODE.format(extra="return {'output.bias': torch.zeros(12), 'more': torch.zeros(2)}")
    trainer(tmp_path).train(PRIOR, **worlds.order(WORKLOAD))
    made = trainer(tmp_path)
    assert made.adopt(0)
    workload = written(tmp_path, "grown", code.replace("METHOD", "def local(self)"))
    assert workload.task.entry == "grown:Mine"
    # The same workload by name, other code behind it.
    store = tmp_path / "state0" / "local" / "cursor.json"
    store.write_text(store.read_text().replace(WORKLOAD.digest, workload.digest))
    other = trainer(tmp_path, workload, entry="grown:Mine", folder=tmp_path)
    with pytest.raises(CheckpointIntegrityError, match="of the local training state has shape"):
        other.train(PRIOR, **worlds.order(workload, 1))


# ---- code that does not behave ----

CODE = """
import torch
from lensemble.errors import DatasetError
from lensemble_local.letters import Letters
class Mine(Letters):
    METHOD:
        {extra}
"""


def written(place: Path, name: str, code: str) -> Workload:
    (place / f"{name}.py").write_text(code)
    task = WORKLOAD.task.model_copy(update={"entry": f"{name}:Mine"})
    return WORKLOAD.model_copy(update={"task": task})


LOSS = "def loss(self, parameters, examples)"
CASES = {
    "raises": (LOSS, "raise KeyError('my secret')", TaskError, "loss raised KeyError at raises.py"),
    "exits": (LOSS, "raise SystemExit(3)", TaskError, "loss raised SystemExit at exits.py"),
    "notanumber": (
        LOSS,
        "return super().loss(parameters, examples) * float('nan')",
        Diverged,
        "the loss of step 1 is nan",
    ),
    "detached": (LOSS, "return torch.zeros(())", TaskError, "a tensor of shape (), not a scalar"),
    "vector": (
        LOSS,
        "return super().loss(parameters, examples) * torch.ones(2)",
        TaskError,
        "a tensor of shape (2,), not a scalar with a gradient",
    ),
    "number": (LOSS, "return 0.5", TaskError, "loss() is float, not a scalar"),
    "misshapen": (
        "def shapes(self)",
        "return super().shapes() | {'hidden.bias': (17,)}",
        TaskError,
        "tensor 'hidden.bias' is (17,) in its shapes() and (16,) in the workload's",
    ),
    "forgotten": (
        "def shapes(self)",
        "return {k: v for k, v in super().shapes().items() if k != 'letters'}",
        TaskError,
        "tensor 'letters' is missing in its shapes()",
    ),
    "empty": ("def examples(self)", "return 0", TaskError, "examples() is 0"),
    "unproven": ("def records(self)", "return []", TaskError, "records() gives none"),
    "taken": (
        "def local(self)",
        "return {'letters': torch.zeros(2)}",
        TaskError,
        "local() may not name a tensor 'letters'",
    ),
    "infinite": (
        "def local(self)",
        "return {'b': torch.tensor([float('inf')])}",
        TaskError,
        "local() has no finite tensor for 'b'",
    ),
    "nodata": (
        "def examples(self)",
        "raise DatasetError('diary.txt is empty')",
        DatasetError,
        "diary.txt is empty",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_code_does_wrong_is_named(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    method, body, kind, told = CASES[name]
    workload = written(tmp_path, name, CODE.format(extra=body).replace("METHOD", method))
    made = trainer(tmp_path, workload, entry=f"{name}:Mine", folder=tmp_path)
    with pytest.raises(LensembleError) as caught:
        made.train(PRIOR, **worlds.order(workload))
    assert type(caught.value) is kind
    assert told in caught.value.message
    # What an exception says may quote the data, and messages leave the node.
    assert "my secret" not in caught.value.message
    assert ("my secret" in capfd.readouterr().err) == (name == "raises")
    assert not list((tmp_path / "state0" / "release").iterdir())


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("no_such_package.tasks:Mine", "there is no module 'no_such_package' here"),
        ("json:NoSuchClass", "module 'json' has no class 'NoSuchClass'"),
        ("json:JSONDecoder", "that class has no method 'shapes'"),
        ("broken_import:Mine", "import of broken_import raised ZeroDivisionError"),
    ],
)
def test_code_that_cannot_be_imported_is_named(tmp_path: Path, entry: str, told: str) -> None:
    (tmp_path / "broken_import.py").write_text("1 / 0\n")
    task = WORKLOAD.task.model_copy(update={"entry": entry})
    workload = WORKLOAD.model_copy(update={"task": task})
    made = trainer(tmp_path, workload, entry=entry, folder=tmp_path)
    with pytest.raises(LensembleError) as caught:
        _ = made.facts
    assert told in caught.value.message


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, folder=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        _ = made.facts


@pytest.fixture(autouse=True)
def _import_path() -> object:
    before = list(sys.path)
    yield
    sys.path[:] = before
