"""However a model is cut into stages, the same tokens come out, from real worker processes."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from lensemble.stage_chunk import Sampling
from lensemble_node.engine_environment import available
from tests.node.llama_reference import Reference
from tests.node.stage_workers import Chain, Cut, Model, StageProcess, chain
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

CUT = Cut(ctx=40, sessions=3, rows=8)
SPLITS = {3: [(1,), (2,), (1, 2)], 4: [(1,), (2,), (3,), (1, 2), (1, 2, 3)]}
"""By number of layers: every cut into two, and one into each larger number of stages."""

PROMPT = [(37 * index + 11) % 280 for index in range(CUT.ctx)]
LENGTHS = [1, CUT.rows - 1, CUT.rows, CUT.rows + 1, CUT.ctx - 3, CUT.ctx]
HOT = Sampling(temperature=0.9, top_k=60, top_p=0.95, repeat_penalty=1.2, seed=5)


class Crew:
    """A worker for every layer range that a test needs; all get ready at once."""

    def __init__(self, model: Model, cache_dir: Path) -> None:
        self.model = model
        self.layers = model.facts.layers
        self.stages: dict[tuple[int, int], StageProcess] = {}
        for cuts in [(), *SPLITS[self.layers]]:
            for span in itertools.pairwise((0, *cuts, self.layers)):
                if span not in self.stages:
                    self.stages[span] = StageProcess(model, span, cache_dir, CUT)
        for stage in self.stages.values():
            stage.begin()

    def chain(self, *cuts: int) -> Chain:
        stages = [self.stages[span] for span in itertools.pairwise((0, *cuts, self.layers))]
        for stage in stages:
            if stage.hosted is None:
                stage.ready()
        return Chain(stages, CUT)


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.soak)])
def crew(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crew]:
    place = tmp_path_factory.mktemp("parity")
    crew = Crew(Model.open(write_tiny(place / "tiny.gguf", layers=request.param)), place)
    yield crew
    for stage in crew.stages.values():
        stage.close()


@pytest.fixture(scope="module")
def whole(crew: Crew) -> dict[int, list[tuple[int, float]]]:
    """Tokens and log-probabilities of the uncut model, by length of the prompt."""
    chain = crew.chain()
    return {length: list(chain.stream(PROMPT[:length], room(length))) for length in LENGTHS}


def room(length: int) -> int:
    """How many tokens may be drawn after a prompt; the last one is not computed on."""
    return min(12, CUT.ctx - length + 1)


def test_the_uncut_model_says_what_another_implementation_says(
    crew: Crew, whole: dict[int, list[tuple[int, float]]]
) -> None:
    reference = Reference(crew.model.path, crew.model.facts)
    for length, drawn in whole.items():
        assert reference.generate(PROMPT[:length], len(drawn)) == [token for token, _ in drawn]
        expected = reference.logits(PROMPT[:length])[-1].log_softmax(-1)
        assert drawn[0][1] == pytest.approx(float(expected.max()), abs=1e-4)


def test_a_cut_changes_nothing(crew: Crew, whole: dict[int, list[tuple[int, float]]]) -> None:
    for cuts, length in itertools.product(SPLITS[crew.layers], LENGTHS):
        drawn = list(crew.chain(*cuts).stream(PROMPT[:length], room(length)))
        assert drawn == whole[length], f"cut at {cuts}, after a prompt of {length} tokens"


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures_are_cut_and_right_too(tmp_path: Path, architecture: str) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", layers=2, architecture=architecture, seed=3)
    model = Model.open(path)
    reference = Reference(path, model.facts)
    expected = [reference.generate(PROMPT[:length], 6) for length in (1, 9, 30)]
    for cuts in ((), (1,)):
        with chain(model, cuts, tmp_path, CUT) as stages:
            drawn = [stages.generate(PROMPT[:length], 6) for length in (1, 9, 30)]
            logprobs = dict(stages.stream(PROMPT[:9], 1))
        assert drawn == expected, cuts
        likely = reference.logits(PROMPT[:9])[-1].log_softmax(-1)
        assert logprobs == {int(likely.argmax()): pytest.approx(float(likely.max()), abs=1e-4)}


def test_sampling_is_the_same_wherever_the_model_is_cut(crew: Crew) -> None:
    alone = crew.chain().generate(PROMPT[:9], 12, how=HOT)
    assert crew.chain(2).generate(PROMPT[:9], 12, how=HOT) == alone
    assert crew.chain().generate(PROMPT[:9], 12) != alone


def test_sessions_do_not_see_each_other(crew: Crew) -> None:
    chain = crew.chain(2)
    prompts = [PROMPT[:5], PROMPT[5:24], PROMPT[24:33]]
    alone = [chain.generate(prompt, 8, session=0) for prompt in prompts]
    streams = [chain.stream(prompt, 8, session) for session, prompt in enumerate(prompts)]
    together = list(zip(*streams, strict=True))
    assert [[step[session][0] for step in together] for session in range(3)] == alone


def test_a_session_that_was_left_in_the_middle_starts_clean(crew: Crew) -> None:
    chain = crew.chain(2)
    alone = chain.generate(PROMPT[:9], 8)
    abandoned = chain.stream(PROMPT[9:35], 6)
    next(abandoned)
    assert chain.generate(PROMPT[:9], 8) == alone


def test_no_kernel_is_made_after_the_first_chunk(crew: Crew) -> None:
    """Over 256 steps of every kind; runs last, for it ends the workers."""
    chain = crew.chain(2)
    for round_ in range(8):
        chain.generate(PROMPT[: 1 + round_], 33 - round_, session=round_ % 3)
    assert sum(len(stage.computed) for stage in chain.stages) > 2 * 256
    for stage in chain.stages:
        status, said = stage.stop()
        assert status == 0
        assert said.startswith("kernels: ")
        assert said.endswith("before the first chunk, 0 since\n")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["CUDA", "AMD"])
def test_a_gpu_says_what_another_implementation_says(tmp_path: Path, device: str) -> None:
    if available(device):
        pytest.skip(available(device))
    path = write_tiny(tmp_path / "tiny.gguf", layers=2, seed=3)
    model = Model.open(path)
    reference = Reference(path, model.facts)
    expected = [reference.generate(PROMPT[:length], 6) for length in (1, 9, 30)]
    for cuts in ((), (1,)):
        with chain(model, cuts, tmp_path, CUT, device) as stages:
            assert [stages.generate(PROMPT[:length], 6) for length in (1, 9, 30)] == expected
