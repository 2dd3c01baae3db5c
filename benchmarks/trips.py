"""Where the time of a token goes through real daemons: a model split in two and whole, in turns.

On a machine that is busy with other things the parts are medians of different tokens and need not
add up; the fastest tenth of the tokens then says more than the mean.

A coordinator and two nodes run as processes of their own over real QUIC, as in the demo.  Run by
``inference.py``, which prints the table.
"""

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from lensemble.ctl import replies, requests
from lensemble.errors import OperatorError
from lensemble_local import netns
from lensemble_local.demo_inference import NODES, STORY, Demo
from lensemble_local.processes import own_directory, started

WARM_TOKENS = 8


class Contender:
    """One run of the model, asked again and again."""

    def __init__(self, demo: Demo, run: str) -> None:
        self._demo = demo
        self._run = run
        self.tokens: list[int] = []
        self.turns: list[list[float]] = []
        """Of each answer: milliseconds from one token to the next, as its reader sees them."""

    def answer(self, tokens: int) -> None:
        turn = requests.Turn(role="user", content=STORY)
        request = requests.Prompt(run=self._run, turns=(turn,), max_tokens=tokens)
        with self._demo.coordinator.ask() as client:
            said = [
                (reply.token, time.perf_counter())
                for reply in client.stream(request)
                if isinstance(reply, replies.TokenText)
            ]
        if len(said) < WARM_TOKENS + 2:
            raise OperatorError(f"the answer has {len(said)} tokens, too few to measure")
        self.tokens = [token for token, _ in said]
        times = [at for _, at in said][WARM_TOKENS:]
        self.turns.append([1e3 * (b - a) for a, b in itertools.pairwise(times)])

    def parts(self) -> dict[str, Any]:
        """Milliseconds of a token, and what they are made of; medians."""
        status = self._demo.inspect(self._run)
        computed = [stage.compute_ms or 0.0 for stage in status.stages]
        gaps = sorted(gap for turn in self.turns for gap in turn)
        hop, edges = status.hop_ms or 0.0, len(computed) + 1
        return {
            "token_ms": statistics.median(gaps),
            "fast_token_ms": gaps[len(gaps) // 10],
            "compute_ms": computed,
            "hop_ms": hop,
            "edges": edges,
            "edges_ms": hop * edges,
            "coordinator_ms": statistics.median(gaps) - (status.trip_ms or 0.0),
        }


def measure(model: Path, tokens: int, turns: int) -> dict[str, Any]:
    """Both contenders of ``turns`` answers each; which goes first changes from turn to turn.

    Raises:
        OperatorError: a daemon or a run does not do what it should.
    """
    with tempfile.TemporaryDirectory() as directory:
        demo = Demo(own_directory(Path(directory) / "trips"), model, Console(quiet=True))
        demo.configure()
        return _compared(demo, tokens, turns)


def _compared(demo: Demo, tokens: int, turns: int) -> dict[str, Any]:
    with started([demo.coordinator, *demo.nodes]):
        demo.join()
        layers = demo.plan().layers
        half = layers // 2
        cut = demo.provision(f"0:{half}@{NODES[0]},{half}:{layers}@{NODES[1]}")
        whole = demo.provision(f"0:{layers}@{NODES[1]}")
        pair = Contender(demo, cut.run), Contender(demo, whole.run)
        for number in range(turns):
            for contender in pair if number % 2 else pair[::-1]:
                contender.answer(tokens)
        split, unsplit = pair
        found = {"split": split.parts(), "unsplit": unsplit.parts()}
    return {
        "identical": split.tokens == unsplit.tokens,
        "split_over_unsplit_tokens_per_s": statistics.median(
            sum(b) / len(b) / (sum(a) / len(a))
            for a, b in zip(split.turns, unsplit.turns, strict=True)
        ),
        "split_over_unsplit_median_token": statistics.median(
            statistics.median(b) / statistics.median(a)
            for a, b in zip(split.turns, unsplit.turns, strict=True)
        ),
        "split_over_unsplit_fast_token": found["unsplit"]["fast_token_ms"]
        / found["split"]["fast_token_ms"],
        **found,
    }


def table(found: dict[str, Any]) -> str:
    """The breakdown, for people."""
    split, whole = found["split"], found["unsplit"]
    rows = [
        ("fastest tenth of tokens, ms", split["fast_token_ms"], whole["fast_token_ms"]),
        ("one token, ms", split["token_ms"], whole["token_ms"]),
    ]
    for index, computed in enumerate(split["compute_ms"]):
        alone = whole["compute_ms"][index] if index < len(whole["compute_ms"]) else 0.0
        rows.append((f"  stage {index} computes", computed, alone))
    rows += [
        (f"  edges ({split['edges']} and {whole['edges']})", split["edges_ms"], whole["edges_ms"]),
        ("  coordinator, between trips", split["coordinator_ms"], whole["coordinator_ms"]),
    ]
    lines = [f"{'':32}{'split':>8}{'whole':>8}{'more':>8}"]
    lines += [f"{name:32}{a:8.2f}{b:8.2f}{a - b:+8.2f}" for name, a, b in rows]
    return "\n".join(lines)


def separate() -> str:
    """Enter a network of its own, before the first thread of this process; what became of it."""
    return netns.described(netns.enter())
