"""A federation whose coordinator and nodes live on hosts of their own, with a network between."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.federation import COORDINATOR, Federation, Process
from tests.netns import wires

SEED = 20
PORT = 7707
WAN = {"heartbeat_s": 1.0, "heartbeat_timeout_s": 5.0}
"""What the configuration advises across the internet."""

CLEAR = {"delay_ms": 0.0, "jitter_ms": 0.0, "loss": 0.0, "mbit_s": 0.0, "cut": False}
Terms = dict[str, Any]


class Network:
    """The program ``wires`` with these hosts, numbered from .1 in one network."""

    def __init__(self, names: list[str]) -> None:
        self.addresses = {name: f"10.77.0.{n}" for n, name in enumerate(names, 1)}
        given = [f"{name}={address}" for name, address in self.addresses.items()]
        self._popen = subprocess.Popen(
            [sys.executable, wires.__file__, str(SEED), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.namespaces: dict[str, str] = self._answer()

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the network is gone"
        return json.loads(line)

    def set(self, host: str, *, up: Terms | None = None, down: Terms | None = None) -> None:
        """Give the ways ``up`` from and ``down`` to ``host`` these terms, ``CLEAR`` otherwise."""
        ways = {"up": up, "down": down}
        given = {way: {**CLEAR, **terms} for way, terms in ways.items() if terms is not None}
        self._order({"port": host, **given})

    def passed(self, host: str) -> tuple[int, int]:
        """Packets that have gone up from ``host`` and down to it."""
        facts = self._order({"port": host})
        return facts["up"][0], facts["down"][0]

    def _order(self, order: Terms) -> Any:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order).encode() + b"\n")
        self._popen.stdin.flush()
        return self._answer()

    def inside(self, host: str) -> list[str]:
        """What goes before a command that is to run on ``host``."""
        return ["nsenter", f"--net={self.namespaces[host]}"]

    def ip(self, host: str, words: str) -> None:
        """Run ``ip words`` on ``host``."""
        subprocess.run([*self.inside(host), "ip", *words.split()], check=True)

    def close(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait(5)
        assert self._popen.stdout is not None
        self._popen.stdout.close()


class Hosts(Federation):
    """A federation on ``network``; every daemon listens at its host's address or, if a node, at
    whatever address its host has."""

    def __init__(self, root: Path, network: Network, nodes: int, **terms: Any) -> None:
        self.network = network
        super().__init__(root, nodes, **terms)

    def _process(self, name: str, module: str) -> Process:
        made = super()._process(name, module)
        made.command = [*self.network.inside(name), *made.command]
        return made

    def _configure(self, process: Process, given: Terms) -> None:
        address = self.network.addresses[process.name]
        bound = f"{address}:{PORT}" if process.name == COORDINATOR else "0.0.0.0:0"
        listen = {"addresses": [bound], **given.get("listen", {})}
        super()._configure(process, {**given, "listen": listen})


@contextmanager
def hosts(root: Path, nodes: int, **terms: Any) -> Iterator[Hosts]:
    """A federation on hosts that is started and joined; ended whatever happens."""
    names = [COORDINATOR, *(f"node-{index}" for index in range(nodes))]
    network = Network(names)
    try:
        made = Hosts(root, network, nodes, **terms)
        try:
            made.start()
            made.join()
            yield made
        finally:
            made.end()
    finally:
        network.close()
