"""``lensemblectl demo``: a federation of real processes on this machine, from data to model.

Each node gets trajectories of an arm with physics of its own, which stay in its files.  They join
by invite and train one world model together over real QUIC; afterwards it is compared with what
each node would have learned alone, and the coordinator's files are verified from scratch.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from lensemble.config import commented
from lensemble.ctl import replies, requests
from lensemble.errors import LensembleError, OperatorError
from lensemble.workload import Workload
from lensemble_coord.config import TITLE as COORDINATOR_TITLE
from lensemble_coord.config import CoordinatorConfig
from lensemble_local import netns
from lensemble_local.processes import Daemon, own_directory, spawn, started
from lensemble_node.config import TITLE as NODE_TITLE
from lensemble_node.config import NodeConfig

MAX_NODES = 16
MAX_ROUNDS = 1000
EPISODES = 20
INNER_STEPS = 50
WARM_START_STEPS = 200
JOIN_S = 60.0
WORKLOAD_TITLE = "What the demo trains; see configs/workloads/arm.toml for a commented version."


class Scores(msgspec.Struct, frozen=True):
    """5-step state errors on the nodes' held-out data together: 1 is no better than no change."""

    first: float
    last: float
    alone: tuple[float, ...]

    @property
    def mean_alone(self) -> float:
        return sum(self.alone) / len(self.alone)


class Demo:
    """One demo in ``directory``; each step says on ``console`` what it does."""

    def __init__(self, directory: Path, nodes: int, rounds: int, console: Console) -> None:
        self.directory = directory
        self.rounds = rounds
        self.data = directory / "data"
        self.workload = directory / "workload.toml"
        self.warm_start = directory / "warm-start.safetensors"
        self.names = [f"node-{index}" for index in range(nodes)]
        self.genesis = ""
        self._console = console
        self.coordinator = self._daemon("coordinator", "lensemble_coord")
        self.nodes = [self._daemon(name, "lensemble_node") for name in self.names]

    def _daemon(self, name: str, module: str) -> Daemon:
        place = self.directory / name
        place.mkdir(mode=0o700)
        return Daemon(name, module, place / "config.toml", place / "ctl.sock", place / "daemon.log")

    @property
    def state_dir(self) -> Path:
        """The coordinator's."""
        return self.directory / "coordinator" / "state"

    def say(self, what: str, text: str) -> None:
        self._console.print(f"[bold]{what:<11}[/bold] {text}", highlight=False, soft_wrap=True)

    # ---- before the daemons ----

    def prepare(self, engine: str) -> None:
        """Data, warm start, configurations."""
        self._run_module(
            "lensemble_local.arm",
            f"--out={self.data}",
            f"--nodes={len(self.nodes)}",
            f"--episodes={EPISODES}",
            f"--engine={engine}",
        )
        self.say(
            "data",
            f"{len(self.nodes)} nodes x {EPISODES} episodes of a two-link arm ({engine}), "
            "each with physics of its own, HDF5",
        )
        self.workload.write_text(commented(Workload, WORKLOAD_TITLE, self._terms()))
        self._run_module(
            "lensemble_node.worker.training.baseline",
            "warmstart",
            f"--workload={self.workload}",
            f"--data={self.data / 'public.h5'}",
            f"--steps={WARM_START_STEPS}",
            f"--out={self.warm_start}",
        )
        self.say("warm start", f"{WARM_START_STEPS} steps on public data, shared by all")
        self._write_configs()

    def _terms(self) -> dict[str, Any]:
        return {
            "name": "demo",
            "inner": {
                "steps": INNER_STEPS,
                "lr": 4e-3,
                "schedule_steps": max(400, INNER_STEPS * self.rounds),
            },
            "objective": {"sketch_dim": 128},
            "outer": {"lr": 0.7, "momentum": 0.5},
        }

    def _write_configs(self) -> None:
        count = len(self.nodes)
        rounds = {
            "min_participants": min(3, count),
            "aggregation": "masked" if count > 1 else "plain",
            "allow_two_party": count == 2,
        }
        given: dict[str, Any] = {
            "name": "coordinator",
            "workload": str(self.workload),
            "warm_start": str(self.warm_start),
            "listen": {"addresses": ["127.0.0.1:0", "[::1]:0"]},
            "rounds": rounds,
            "ctl": {"socket": str(self.coordinator.socket)},
        }
        text = commented(CoordinatorConfig, COORDINATOR_TITLE, given)
        (self.directory / "coordinator" / "config.toml").write_text(text)
        for index, daemon in enumerate(self.nodes):
            given = {
                "name": daemon.name,
                "data": {"path": str(self.data / f"node{index}.h5")},
                "share": {"plain": count == 1},
                "ctl": {"socket": str(daemon.socket)},
            }
            text = commented(NodeConfig, NODE_TITLE, given)
            (self.directory / daemon.name / "config.toml").write_text(text)

    # ---- the federation ----

    def federate(self) -> replies.RoundList:
        """Start everything, join, run the rounds; returns them."""
        with started([self.coordinator, *self.nodes]):
            self._join()
            with self.coordinator.ask() as client:
                status = client.ask(requests.Status())
            if isinstance(status, replies.CoordinatorStatus):
                self.say("aggregation", status.aggregation)
            pids = ", ".join(f"{each.name} {each.pid}" for each in self.nodes)
            self.say("processes", f"coordinator {self.coordinator.pid}, {pids}")
            self._run_rounds()
            with self.coordinator.ask() as client:
                kept = client.ask(requests.Checkpoints())
                listed = client.ask(requests.Rounds(limit=self.rounds))
        if isinstance(kept, replies.CheckpointList):
            self.genesis = kept.checkpoints[0].digest
        if not isinstance(listed, replies.RoundList):
            raise OperatorError(f"the coordinator answered {type(listed).__name__}")
        return listed

    def _join(self) -> None:
        with self.coordinator.ask() as client:
            invited = client.ask(requests.Invite(uses=len(self.nodes)))
        if not isinstance(invited, replies.Invited):
            raise OperatorError(f"the coordinator answered {type(invited).__name__}")
        for node in self.nodes:
            with node.ask() as client:
                client.ask(requests.Join(ticket=invited.ticket))
        self.coordinator.until("all nodes have joined", self._all_here, JOIN_S)

    def _all_here(self) -> bool:
        with self.coordinator.ask() as client:
            status = client.ask(requests.Status())
        return isinstance(status, replies.CoordinatorStatus) and len(self.nodes) == sum(
            each.connected and each.activity == "idle" for each in status.participants
        )

    def _run_rounds(self) -> None:
        command = [
            *(sys.executable, "-m", "lensemblectl.app", "run"),
            f"--rounds={self.rounds}",
            f"--socket={self.coordinator.socket}",
        ]
        # Live progress belongs to the terminal; standard output may be kept for the result.
        quiet = self._console.stderr
        status = subprocess.run(
            command, stdout=sys.stderr if quiet else None, check=False
        ).returncode
        if status != 0:
            raise OperatorError(
                f"the run of {self.rounds} rounds ended with status {status}",
                f"Read {self.coordinator.log}.",
            )

    # ---- after the daemons ----

    def verify(self) -> str:
        """Re-derive the whole history from the coordinator's files; "ok", or what is wrong."""
        command = [
            *(sys.executable, "-m", "lensemble_coord.training.verify"),
            str(self.state_dir),
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return "ok"
        return done.stdout.strip() or done.stderr.strip() or f"status {done.returncode}"

    def score(self, first: str, last: str) -> Scores:
        """Judge the first and last global state, and a local-only model of each node."""
        alone = self._train_alone()
        checkpoints = self.state_dir / "checkpoints"
        sets = [checkpoints / first, checkpoints / last, *alone]
        pairs: list[str] = []
        for index in range(len(self.nodes)):
            pairs += [f"--train={self.data / f'node{index}.h5'}"]
            pairs += [f"--heldout={self.data / f'heldout-{index}.h5'}"]
        answers = json.loads(
            self._run_module(
                "lensemble_node.worker.training.evaluate",
                f"--workload={self.workload}",
                *pairs,
                "--json",
                "--parameters",
                *map(str, sets),
            )
        )
        errors = [float(each["mix"]["state5"]) for each in answers]
        return Scores(errors[0], errors[1], tuple(errors[2:]))

    def _train_alone(self) -> list[Path]:
        """As many steps of each node's own data, from the same start, by the same code."""
        found, running = [], []
        for index, daemon in enumerate(self.nodes):
            out = self.directory / daemon.name / "alone.f32"
            command = [
                *(sys.executable, "-m", "lensemble_node.worker.training.baseline", "local"),
                f"--workload={self.workload}",
                f"--data={self.data / f'node{index}.h5'}",
                f"--start={self.warm_start}",
                f"--steps={INNER_STEPS * self.rounds}",
                f"--out={out}",
                f"--node={daemon.name}",
            ]
            with (self.directory / daemon.name / "alone.log").open("wb") as log:
                running.append(spawn(command, log))
            found.append(out)
        for process in running:
            if process.wait() != 0:
                raise OperatorError(
                    "training a node alone failed", f"Read {self.directory}/*/*.log."
                )
        return found

    def _run_module(self, module: str, *arguments: str) -> str:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OperatorError(f"`python -m {module}` failed:\n{done.stderr.strip()}")
        return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="lensemblectl demo", description=__doc__)
    parser.add_argument("--nodes", type=int, choices=range(1, MAX_NODES + 1), default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", choices=("mujoco", "numpy"), default="mujoco")
    parser.add_argument("--dir", type=Path, help="a new directory; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="one final JSON line")
    options = parser.parse_args(arguments)
    if not 1 <= options.rounds <= MAX_ROUNDS:
        parser.error(f"--rounds takes 1 to {MAX_ROUNDS}")
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
    directory = own_directory(options.dir)
    demo = Demo(directory, options.nodes, options.rounds, console)
    demo.say("network", netns.described(no_namespace))
    demo.prepare(options.engine)
    listed = demo.federate()
    demo.say("verify", "from the coordinator's files alone: chain, signatures, outer steps")
    verdict = demo.verify()
    demo.say("compare", "train each node alone for as many steps, judge every model")
    scores = demo.score(demo.genesis, listed.rounds[-1].digest)
    result = {
        "rounds_closed": len(listed.rounds),
        "contributors_per_round": [len(each.contributors) for each in listed.rounds],
        "seconds_per_round": [round(each.seconds or 0.0, 3) for each in listed.rounds],
        "val_loss_first": scores.first,
        "val_loss_last": scores.last,
        "local_only_val_loss": scores.mean_alone,
        "verify": verdict,
        "state_dir": str(demo.state_dir),
    }
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _summarise(console, demo, listed, scores, verdict)
        console.print(f"{time.monotonic() - began:.0f} s in all", highlight=False, soft_wrap=True)
    return 0 if verdict == "ok" and len(listed.rounds) == options.rounds else 1


def _summarise(
    console: Console,
    demo: Demo,
    listed: replies.RoundList,
    scores: Scores,
    verdict: str,
) -> None:
    console.print()
    console.print("5-step state error on held-out data of all nodes; 1 is no better than no change")
    table = Table()
    table.add_column("model")
    table.add_column("error", justify="right")
    table.add_row("warm start, before round 0", f"{scores.first:.3f}")
    for name, error in zip(demo.names, scores.alone, strict=True):
        table.add_row(f"{name} alone, as many steps", f"{error:.3f}")
    table.add_row("mean of the nodes alone", f"{scores.mean_alone:.3f}")
    table.add_row("[bold]federated[/bold]", f"[bold]{scores.last:.3f}[/bold]")
    console.print(table)
    seconds = [each.seconds or 0.0 for each in listed.rounds]
    mean_s, ratio = sum(seconds) / len(seconds), scores.last / scores.mean_alone
    console.print(
        f"{len(listed.rounds)} rounds closed, {mean_s:.1f} s each; the federated model's error is "
        f"{ratio:.2f} of the mean of the nodes alone",
        highlight=False,
    )
    mark = "[green]verified[/green]" if verdict == "ok" else f"[red]{verdict}[/red]"
    console.print(
        f"history {mark}: every record, signature, digest and outer step", highlight=False
    )
    console.print(
        f"files are in {demo.directory}; remove them with rm -r", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    sys.exit(main())
