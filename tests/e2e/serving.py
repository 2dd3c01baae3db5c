"""Real daemons that serve a model: provisioned, asked and watched over the control socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lensemble.ctl import replies, requests
from lensemble.ctl.client import Client
from tests.e2e.federation import Federation, until
from tests.tiny_gguf import write_tiny

PROVISION_S = 180.0
"""A worker compiles for some seconds on a quiet machine, and for much longer on a busy one."""

CTX, ROWS = 64, 8
DEADLINE_S = 4.0


class Serving(Federation):
    """A federation whose nodes may hold stages of ``model``."""

    def __init__(self, root: Path, nodes: int, **inference: Any) -> None:
        rules = {"step_deadline_s": DEADLINE_S, **inference}
        super().__init__(root, nodes, coordinator={"inference": rules})
        self.model = write_tiny(root / "tiny.gguf", layers=4)

    def ready(self) -> None:
        """Start everything, and wait until every node has said what it can hold."""
        self.start()
        self.join()

        count = len(self.nodes)
        until("every node has said what it can hold", lambda: self.offered() == count, 60.0)

    def offered(self) -> int:
        """How many nodes have said what they can hold."""
        plan = self.plan()
        silent = [each for each in plan.unused if "has not said" in each.reason]
        return len(plan.stages) + len(plan.unused) - len(silent)

    def plan(self, **terms: Any) -> replies.ModelPlan:
        return self.coordinator.ask(requests.PlanModel(model=str(self.model), ctx=CTX, **terms))

    def provision(self, split: str, **terms: Any) -> replies.ModelRunStatus:
        """Put the model on the nodes as ``split`` says; its status when it is ready, or over."""
        wish = {"model": str(self.model), "ctx": CTX, "rows": ROWS, "split": split, **terms}
        with Client(self.coordinator.socket, timeout_s=PROVISION_S) as client:
            *_, last = client.stream(requests.ProvisionModel(**wish))
        return last

    def coordinator_stream(self, request: requests.Request) -> list[Any]:
        """All replies to ``request``."""
        with Client(self.coordinator.socket, timeout_s=PROVISION_S) as client:
            return list(client.stream(request))

    def run(self, split: str, **terms: Any) -> str:
        """As ``provision``; the id of a run that is ready."""
        status = self.provision(split, **terms)
        assert status.takes_requests, (status.reason, status.fault, self.last_words())
        return status.run

    def last_words(self) -> str:
        return "\n".join(f"{each.name}: {each.last_words()}" for each in self.processes())

    def inspect(self, run: str = "") -> replies.ModelRunStatus:
        return self.coordinator.ask(requests.InspectRun(run=run))

    def until_over(self, run: str, within_s: float = 20.0) -> replies.ModelRunStatus:
        def over() -> replies.ModelRunStatus | None:
            status = self.inspect(run)
            return status if status.state == "torn down" else None

        return until(f"run {run} is torn down", over, within_s)

    def asking(self, run: str, text: str, most: int, **terms: Any) -> "Asking":
        return Asking(self.coordinator.socket, run, text, most, **terms)

    def ask(self, run: str, text: str, most: int = 8, **terms: Any) -> "Told":
        """The whole answer."""
        return self.asking(run, text, most, **terms).rest()

    def stage_pid(self, name: str, run: str) -> int:
        """Process id of the worker of the stage of ``run`` on this node."""
        (found,) = [each for each in self.node_status(name).stages if each.run == run]
        assert found.pid is not None
        return found.pid

    def workers(self, name: str) -> list[int]:
        """Process ids of the workers of stages on this node."""
        status = self.node_status(name)
        return [each.pid for each in status.stages if each.pid is not None]


class Told:
    """What was answered."""

    def __init__(self, said: list[replies.Reply], end: replies.Answered) -> None:
        tokens = [each for each in said if isinstance(each, replies.TokenText)]
        self.pauses = [each for each in said if isinstance(each, replies.Paused)]
        self.tokens = [each.token for each in tokens]
        self.text = "".join(each.text for each in tokens) + end.text
        self.end = end


class Asking:
    """A request under way."""

    def __init__(self, socket: Path, run: str, text: str, most: int, **terms: Any) -> None:
        self.client = Client(socket, timeout_s=PROVISION_S)
        asked = requests.Prompt(run=run, text=text, max_tokens=most, **terms)
        self._replies: Iterator[Any] = self.client.stream(asked)
        self.tokens: list[replies.TokenText] = []

    def until(self, count: int) -> None:
        """Wait for so many tokens."""
        while len(self.tokens) < count:
            self.first()

    def first(self) -> replies.TokenText:
        self.tokens.append(next(self._replies))
        return self.tokens[-1]

    def rest(self) -> Told:
        with self.client:
            *tokens, end = self._replies
        return Told([*self.tokens, *tokens], end)


@contextmanager
def serving(root: Path, nodes: int, **inference: Any) -> Iterator[Serving]:
    """Started and ended whatever happens."""
    made = Serving(root, nodes, **inference)
    try:
        made.ready()
        yield made
    finally:
        made.end()
