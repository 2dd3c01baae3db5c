"""``lensemblectl simulate``: a whole federation in one process, over an in-process network.

The coordinator and the nodes are the daemons' own code, given a memory driver instead of QUIC;
workers are real child processes.  Nothing else differs from a federation over a network.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import trio
from pydantic import Field, Strict

import lensemble_coord.daemon
import lensemble_node.daemon
from lensemble import identity, logs, ticket
from lensemble.config import ConfigPath, Section, load
from lensemble.errors import LensembleError, OperatorError
from lensemble.transport.memory_driver import MemoryNetwork
from lensemble_coord.config import CoordinatorConfig
from lensemble_coord.training.coordinator import RunEnded
from lensemble_node.config import NodeConfig
from lensemble_node.participant import Member
from lensemble_node.participation import Unable

EXIT_FAILED = 1
EXIT_USAGE = 2
INVITE_TTL_S = 3600.0


class NetworkSection(Section):
    """Weather of the in-process network, the same between the coordinator and every node."""

    delay_ms: float = Field(default=0.0, ge=0, le=60_000)
    jitter_ms: float = Field(default=0.0, ge=0, le=60_000)
    seed: int = Field(default=0, ge=0)


class SimulationConfig(Section):
    """What ``simulate CONFIG`` reads."""

    coordinator: ConfigPath
    nodes: Annotated[tuple[ConfigPath, ...], Strict(False)] = Field(min_length=1, max_length=64)
    rounds: int = Field(default=5, ge=1, le=1_000_000)
    network: NetworkSection = NetworkSection()


class Simulated(msgspec.Struct, frozen=True):
    """What a simulation ends with."""

    rounds_closed: int
    contributors_per_round: tuple[int, ...]
    seconds_per_round: tuple[float, ...]
    digest: str
    completed: bool
    reason: str


async def simulate(
    coordinator: CoordinatorConfig,
    nodes: list[NodeConfig],
    rounds: int,
    network: MemoryNetwork,
) -> Simulated:
    """Run ``rounds`` rounds of a federation in this process; returns once they have ended.

    Raises:
        OperatorError: a node cannot take part, such as one without data, or is not configured.
    """
    hub = network.driver(_identity(coordinator.state_dir).node)
    async with trio.open_nursery() as nursery:
        daemon = await nursery.start(lensemble_coord.daemon.serve, coordinator, hub)
        members = []
        for config in nodes:
            spoke = network.driver(_identity(config.state_dir).node)
            await daemon.admit(spoke.node, config.name)
            joined = ticket.Membership(hub.node, hub.addresses(), daemon.federation, b"")
            serving = await nursery.start(lensemble_node.daemon.serve, config, spoke, joined)
            members.append(serving.member)
        await _ready(daemon, members)
        outcome: RunEnded = await daemon.run_rounds(rounds)
        await daemon.rounds.gate.tested()
        closed = daemon.closed_rounds
        digest = daemon.digest
        nursery.cancel_scope.cancel()
    return Simulated(
        len(closed),
        tuple(len(each.contributors) for each in closed),
        tuple(round(sum(each.seconds.values()), 3) for each in closed),
        digest,
        outcome.completed,
        outcome.reason,
    )


async def _ready(daemon: lensemble_coord.daemon.Serving, members: list[Member]) -> None:
    """Wait until all nodes can be asked, or one says that it cannot take part."""
    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(_watch, member)
        await daemon.wait_for_nodes(len(members))
        nursery.cancel_scope.cancel()


async def _watch(member: Member) -> None:
    while not isinstance(unable := member.state.worker, Unable):
        await member.changed.wait()
    raise OperatorError(f"{member.config.name}: {unable.reason}", unable.remediation)


def _identity(state_dir: Path) -> identity.Identity:
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return identity.load_or_create(state_dir / "identity.key")


async def _simulate_file(config: SimulationConfig, rounds: int) -> Simulated:
    coordinator = load(config.coordinator, CoordinatorConfig)
    nodes = [load(path, NodeConfig) for path in config.nodes]
    return await simulate(coordinator, nodes, rounds, _network(config.network, coordinator, nodes))


def _first(errors: BaseExceptionGroup[LensembleError]) -> LensembleError:
    found: LensembleError | BaseExceptionGroup[LensembleError] = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def _network(
    weather: NetworkSection, coordinator: CoordinatorConfig, nodes: list[NodeConfig]
) -> MemoryNetwork:
    network = MemoryNetwork(weather.seed)
    hub = _identity(coordinator.state_dir).node
    for config in nodes:
        between = network.between(hub, _identity(config.state_dir).node)
        between.delay_s = weather.delay_ms / 1000
        between.jitter_s = weather.jitter_ms / 1000
    return network


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="lensemblectl simulate", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=int, default=0, help="instead of the file's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    logs.configure("warning", "auto")
    outcome: list[Simulated | LensembleError] = []
    try:
        config = load(options.config, SimulationConfig)
        rounds = options.rounds or config.rounds
        outcome.append(trio.run(_simulate_file, config, rounds))
    except* LensembleError as errors:
        outcome.append(_first(errors))
    (result,) = outcome
    if isinstance(result, LensembleError):
        sys.stderr.write(f"Error: {result.message}\nTry: {result.remediation}\n")
        return EXIT_USAGE
    if options.json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(result)) + "\n")
    else:
        _describe(result)
    return 0 if result.completed else EXIT_FAILED


def _describe(result: Simulated) -> None:
    rows = zip(result.contributors_per_round, result.seconds_per_round, strict=True)
    for index, (count, seconds) in enumerate(rows):
        sys.stdout.write(f"round {index}: {count} contributors, {seconds:.2f} s\n")
    state = "completed" if result.completed else f"ended early: {result.reason}"
    sys.stdout.write(f"{state}; global state {result.digest}\n")


if __name__ == "__main__":
    sys.exit(main())
