"""One life of a federation in a world: what goes wrong, when, and what must come of it."""

from functools import cache
from typing import Any, ClassVar

from msgspec.structs import replace

from lensemble import seeds
from lensemble.ids import NodeId
from lensemble.wire import messages
from lensemble_coord.roster import Invitation
from lensemble_coord.training import outer_round as r
from tests.coord.round_play import RULES
from tests.sim.checks import Checks
from tests.sim.mask_side import Revealed, digest_of, sign
from tests.sim.node_host import NodeHost
from tests.sim.parts import RIGHT, Parts
from tests.sim.terms import WORKLOAD
from tests.sim.world import Host, World

TROUBLED_S = 60.0
QUIET_S = 600.0
"""Once trouble stops, what was asked for is done within this."""

BACK_S = 300.0
"""Within which every node is back: a worker that stands still is found out after 120 s, and ended
60 s later if it does not let go of its edges."""

SETTLE_S = 5.0
"""In which what was begun under the last trouble shows."""

DAY_S = 86_400.0
INVITE = b"invite of the worlds"
ROUNDS_AFTER = 2

SIM_RULES = replace(
    RULES,
    max_attempts=4,
    open_timeout_s=20.0,
    collect_timeout_s=24.0,
    on_commitment_mismatch="exclude",
)


@cache
def sketch(round_index: int) -> int:
    return seeds.sketch(WORKLOAD.root_seed, round_index)


class Trouble:
    """Probabilities of what goes wrong, each where it says."""

    WORST: ClassVar = {
        "step_fails": 0.2,
        "declines": 0.2,
        "torn_update": 0.1,
        "other_dataset": 0.1,
        "repeats_itself": 0.1,
        "echoes": 0.05,
        "asks_twice": 0.2,
        "slow": 0.3,
        "stands_still": 0.3,
        "commitments_late": 0.3,
        "shares_late": 0.1,
        "answers_late": 0.2,
        "miscomputes": 0.2,
        "dies_masking": 0.3,
        "dies_committing": 0.3,
    }

    def __init__(self) -> None:
        self.calm()

    def calm(self) -> None:
        for what in self.WORST:
            setattr(self, what, 0.0)


class Federation:
    """A life of ``parts``, which are the right ones unless a test puts a broken one in."""

    def __init__(self, seed: int, parts: Parts = RIGHT) -> None:
        self.seed = seed
        self.parts = parts
        self.world = World(seed)
        self.trouble = Trouble()
        self.revealed = Revealed()
        count = (3, 4, 4, 5)[seed // 2 % 4]
        quorum = 3 if count == 5 else 2
        self.rules = replace(
            SIM_RULES,
            quorum=quorum,
            masked=seed % 2 == 1,
            threshold=count - 1 if seed % 8 == 7 else 0,
            collect_max_s=90.0 if seed % 5 == 0 else 0.0,
        )
        self.arena_rings = 2 if seed % 3 == 0 else 4
        self.slow_links: dict[str, float] = {}
        self.checks = Checks(self)
        self.coord = parts.coordinator(self, self.rules)
        keys = [NodeId(letter * 64) for letter in "abcdefgh"[:count]]
        self.allowed = keys[: seed % 3]
        self.nodes = [parts.node(self, key, INVITE) for key in keys]
        self._by_name = {node.name: node for node in self.nodes}
        expires = 1.8e9 + 30 * DAY_S
        self.coord.books.invites[INVITE] = Invitation(expires, count)
        for host in self.hosts:
            self.world.boot(host)
        self.checks.begin()

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.coord, *self.nodes)

    def node_at(self, host: Host) -> NodeHost:
        return self._by_name[host.name]

    sketch = staticmethod(sketch)

    def happens(self, trouble: str) -> bool:
        probability: float = getattr(self.trouble, trouble)
        return probability > 0 and self.world.random.random() < probability

    def chunk_s(self, host: Host) -> float:
        """Seconds that each chunk takes to or from ``host`` on top of everything else."""
        return self.slow_links.get(host.name, 0.0)

    def tampered(self, host: NodeHost, message: messages.FromNode) -> messages.FromNode:
        """What a broken node says in place of ``message``."""
        if not isinstance(message, messages.Update):
            return message
        changes: dict[str, Any] = {}
        if self.happens("other_dataset"):
            changes["dataset_root"] = digest_of("another dataset")
        if self.happens("torn_update"):
            changes["digest"] = digest_of("another update")
        if not changes:
            return message
        said = replace(message, **changes)
        payload = messages.update_payload(
            said.federation, said.round, said.attempt, said.dataset_root, said.digest
        )
        return replace(said, signature=sign(host.node, payload))

    # ---- faults ----

    def restart(self, host: Host, within_s: float, *, power: bool | None = None) -> None:
        """It dies now and comes back some time within so many seconds."""
        chance = self.world.random
        self.world.crash(host, power=chance.random() < 0.4 if power is None else power)
        if host is self.coord:
            self.coord.wall_offset_s += chance.choice([0.0, 0.0, -3 * DAY_S, 2 * DAY_S])
        self.world.at(self.world.now + chance.uniform(0.0, within_s), lambda: self.world.boot(host))

    def make_trouble(self) -> None:
        """Draw what goes wrong in this life, and when."""
        chance, conditions = self.world.random, self.world.conditions
        conditions.jitter_s = chance.choice([0.0, 0.05, 1.0])
        conditions.breaks = chance.choice([0.0, 0.0, 0.002, 0.01])
        for what, worst in Trouble.WORST.items():
            setattr(self.trouble, what, chance.choice([0.0, 0.0, worst]))
        if chance.random() < 0.3:
            slow = chance.choice(self.hosts)
            self.slow_links[slow.name] = chance.uniform(1.0, 5.0)
        for host in self.hosts:
            for _ in range(chance.choice([0, 0, 1, 2])):
                self._sometime(lambda host=host: self.restart(host, 15.0))  # type: ignore[misc]
        for node in self.nodes:
            self._troubles_of(node)
        self._troubles_of_disks()
        for _ in range(chance.choice([0, 0, 0, 2])):
            self._sometime(self.coord.abort)
        for _ in range(chance.choice([1, 3])):
            rounds = chance.randint(1, 3)
            self._sometime(lambda n=rounds: self.coord.ask(n))  # type: ignore[misc]

    def _sometime(self, call: Any) -> None:
        self.world.at(self.world.now + self.world.random.uniform(0.0, TROUBLED_S), call)

    def _troubles_of(self, node: NodeHost) -> None:
        chance, world = self.world.random, self.world
        for _ in range(chance.choice([0, 0, 0, 1])):
            ways = chance.choice([((node, self.coord),), ((self.coord, node),), None])
            seconds = chance.choice([1.0, 4.0, 15.0])
            both = ((node, self.coord), (self.coord, node))
            for one, other in ways or both:
                self._sometime(
                    lambda a=one, b=other, s=seconds: world.block(a, b, s)  # type: ignore[misc]
                )
        for _ in range(chance.choice([0, 0, 1, 2])):
            fault = chance.choice(["was killed by SIGKILL", "ran out of memory"])
            self._sometime(lambda fault=fault: node.up and node.kill_worker(fault))  # type: ignore[misc]
        if chance.random() < 0.1:
            self._sometime(lambda: self._wedge(node))

    def _wedge(self, node: NodeHost) -> None:
        if node.up and node.worker is not None:
            self.world.note(node, "worker", "does nothing more")
            node.worker.wedged = True

    def _troubles_of_disks(self) -> None:
        chance = self.world.random
        for disk in (self.coord.books.disk, *(node.disk for node in self.nodes)):
            disk.slow = chance.choice([1.0, 1.0, 1.0, 30.0])
            if chance.random() < 0.15:
                begin, lasts = chance.uniform(0.0, TROUBLED_S), chance.uniform(1.0, 20.0)
                for when, full in ((begin, True), (begin + lasts, False)):
                    self.world.at(
                        when,
                        lambda disk=disk, full=full: setattr(disk, "full", full),  # type: ignore[misc]
                    )

    def end_trouble(self) -> None:
        self.world.conditions.breaks = 0.0
        self.world.conditions.jitter_s = 0.05
        self.trouble.calm()
        self.slow_links.clear()
        for disk in (self.coord.books.disk, *(node.disk for node in self.nodes)):
            disk.slow, disk.full = 1.0, False
        for host in self.hosts:
            self.world.boot(host)
        wedged = [node for node in self.nodes if node.worker is not None and node.worker.wedged]
        # The last one is left to be found out.
        for node in wedged[:-1]:
            node.kill_worker("was ended by an operator")

    # ---- a life ----

    def live(self) -> None:
        """Trouble, then peace in which everything asked for is done.

        Raises:
            AssertionError: a promise is broken; it says which.
        """
        world, coord = self.world, self.coord
        coord.ask(2)
        self.make_trouble()
        world.run(lambda: False, TROUBLED_S)
        self.end_trouble()
        world.run(lambda: False, SETTLE_S)
        assert world.run(lambda: coord.resting, QUIET_S), f"a run did not end: {self._why()}"
        assert world.run(self._all_here, BACK_S), "a node does not come back"
        reached = coord.books.tail().round
        coord.ask(ROUNDS_AFTER)
        world.run(lambda: coord.books.run is not None, 5.0)
        assert world.run(lambda: coord.resting, QUIET_S), f"a quiet run did not end: {self._why()}"
        assert coord.books.tail().round == reached + ROUNDS_AFTER, "a quiet run came to nothing"
        assert coord.books.ledger.runs[-1].outcome == "completed"
        self.checks.end()
        for node in self.nodes:
            node.leave()
        assert world.run(self._all_gone, 120.0), f"not everything was given back: {self._kept()}"

    def _all_here(self) -> bool:
        return len(self.coord.state.ground.here) == len(self.nodes)

    def _all_gone(self) -> bool:
        return not self._kept()

    def _kept(self) -> str:
        return ", ".join(
            f"{node.name} holds {len(node.arena.leased)} rings, {node.provisioner.state}"[:200]
            for node in self.nodes
            if node.arena.leased or node.holdings
        )

    def _why(self) -> str:
        return f"{r.public_state(self.coord.state)}: {r.waiting(self.coord.state).reason}"
