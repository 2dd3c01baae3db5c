"""What trains a workload of each kind: nothing at all, the world model, a task of the node's own.

Each turns a prior into a release by the same steps: read what the node keeps, train, hand the
weights to the pipeline, put down what to keep and what to send.  Torch is imported by the last two
only, so that a no-op worker starts fast and stays small.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NotRequired, Protocol, TypeAlias, TypedDict

import numpy as np

from lensemble import merkle, seeds
from lensemble.errors import (
    ConfigError,
    ProbeError,
)
from lensemble.ids import Digest
from lensemble.merkle import DatasetFacts
from lensemble.params import FlatParameters
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import CustomTask, NoopTask, Workload, WorldModelTask
from lensemble_node.worker.seat import Run, Seat
from lensemble_node.worker.training.gauge import Alignment, Drift, Sight
from lensemble_node.worker.training.local_store import Cursor, LocalStore
from lensemble_node.worker.training.noise import SecretNoise
from lensemble_node.worker.training.protect import Protection
from lensemble_node.worker.training.release import Extent, release
from lensemble_node.worker.training.segments import Losses, Segment
from lensemble_node.worker.training.source import DataSource, TaskCode
from lensemble_node.worker.training.stops import pause
from lensemble_node.worker.training.words import Encoder

NOOP_REACH = 1e-3
"""Updates of the no-op task are uniform within +-this."""
_PIECE = 1 << 16
"""Parameters; what is made of them stays in a core's cache."""


class RoundOrder(TypedDict):
    """What the coordinator says of the round, and how to report.

    ``progress`` is told steps done and loss of each; ``should_stop`` is asked before every step.
    ``prior_digest``, when given, must be the digest of the prior, and is not computed once more
    where it is ``prior_known``: it was, in this process, of what nothing else can write to.
    ``plan`` is that of the field, as ``FieldPlan`` takes it, all wide when not given.
    """

    round_index: int
    attempt: int
    sketch_seed: int
    global_step: int
    progress: Callable[[int, float], None]
    should_stop: Callable[[], bool]
    prior_digest: NotRequired[Digest]
    prior_known: NotRequired[bool]
    plan: NotRequired[bytes]


class Meeting(Protocol):
    """The processes that train as one, see ``crew.Crew``."""

    def ready(self) -> None: ...


class Team(Protocol):
    """This process among them, see ``crew.Team``."""

    @property
    def crew(self) -> Meeting: ...

    def lead(
        self,
        segment: Segment,
        progress: Callable[[int, float], None],
        should_stop: Callable[[], bool],
    ) -> Losses: ...

    def follow(self, run: Run) -> None: ...


def work_for(
    workload: Workload, source: DataSource | TaskCode | None, node: str, threads: int
) -> "Work":
    """What trains ``workload``; arguments and errors as for ``Trainer``."""
    match workload.task:
        case NoopTask() as task:
            return _Noop(workload, task, node)
        case CustomTask() as task:
            return _Custom(workload, _code(source, task), node, threads)
        case WorldModelTask():
            return _World(workload, _data(workload, source), node, threads)


def _data(workload: Workload, source: DataSource | TaskCode | None) -> DataSource:
    if not isinstance(source, DataSource):
        raise ConfigError(
            f"workload {workload.name!r} trains a world model; this node names no dataset",
            "Give the node's configuration a dataset path.",
        )
    return source


def _code(source: DataSource | TaskCode | None, task: CustomTask) -> TaskCode:
    if not isinstance(source, TaskCode):
        raise ConfigError(
            f"the workload is trained by the code of {task.entry!r}; this node names none",
            f'If you have that code and trust it, set `task.entry = "{task.entry}"`.',
        )
    return source


@dataclass(frozen=True)
class Result:
    vector: Digest
    extent: Extent
    losses: tuple[float, float]
    clip_factor: float | None
    drift: Drift | None = None


@dataclass(frozen=True)
class Making:
    """Where a release goes, what happens to it before, and which batches it is made from."""

    store: LocalStore
    protection: Protection
    stream: str
    plan: FieldPlan
    chance: SecretNoise

    def put_down(self, round_index: int, difference: Iterable[FlatParameters]) -> Digest:
        """Write ``difference`` as words, and beside the candidate what rounding leaves of it.

        Raises:
            FieldBoundExceeded: a coordinate that the field does not hold.
            CheckpointIntegrityError: what was left of the last one is damaged.
            StorageError: the file system refuses.
        """
        workload = self.protection.workload
        mine = self.store.adopted_by == workload.digest
        due = self.store.residual(self.plan.layout) if mine else None
        if self.plan.all_wide and not self.store.keeps_residual:
            encoder = Encoder(self.plan, workload.room, self.chance, due)
            return self.store.write_vector(round_index, encoder.words(difference))
        with self.store.residual_of(round_index) as left:
            encoder = Encoder(self.plan, workload.room, self.chance, due, left)
            return self.store.write_vector(round_index, encoder.words(difference))


class _Noop:
    """No model: a seeded update made, encoded and written piece by piece.

    Where it has to be clipped, noised or quantised it is made whole.
    """

    def __init__(self, workload: Workload, task: NoopTask, node: str) -> None:
        self._workload = workload
        self._task = task
        self._node = node

    def facts(self, _: Path) -> DatasetFacts:
        leaf = merkle.leaf({"noop": merkle.text_column([self._node])})
        return DatasetFacts(merkle.root([leaf]), 1, 0, 0, 0)

    def place(self, _: str) -> None:
        """Nothing is trained, anywhere."""

    def pin(self, probe: Path, _: Digest) -> None:
        raise ConfigError(f"the no-op task has no use for the probe {probe}")

    def join(self, _: Seat, rendezvous: str, device: str) -> "Team":
        raise ConfigError(f"the no-op task needs nobody's help ({rendezvous}, {device})")

    def train(self, prior: FlatParameters, order: RoundOrder, making: Making) -> Result:
        label = f"noop:{self._node}:{order['round_index']}{making.stream}"
        seed = seeds.derive(self._workload.root_seed, label)
        for done in range(1, self._workload.inner.steps + 1):
            pause(self._task.step_seconds, order["should_stop"])
            order["progress"](done, 0.0)
        pipeline, extent = making.protection.pipeline(), Extent()
        drawn = _uniform(seed, len(prior))
        cursor = Cursor(0, order["round_index"], self._workload.digest)
        making.store.write_pending({}, {}, cursor)

        def measured() -> Iterator[FlatParameters]:
            for piece in drawn:
                extent.include(piece)
                yield piece

        pieces = measured()
        if pipeline.on_difference:
            whole = pipeline.released(_joined(drawn, len(prior)))
            pieces, extent = whole.pieces(), whole.extent
        vector = making.put_down(order["round_index"], pieces)
        return Result(vector, extent, (0.0, 0.0), making.protection.clip_factor)


def _joined(pieces: Iterable[FlatParameters], size: int) -> FlatParameters:
    whole, at = np.empty(size, dtype=np.float32), 0
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole


def _uniform(seed: int, size: int) -> Iterator[FlatParameters]:
    """``size`` seeded coordinates within ``NOOP_REACH``; each piece is valid until the next."""
    generator = np.random.Generator(np.random.SFC64(seed))
    room = np.empty(min(_PIECE, size), dtype=np.float32)
    for start in range(0, size, _PIECE):
        piece = room[: size - start]
        generator.random(out=piece, dtype=np.float32)
        piece -= np.float32(0.5)
        piece *= np.float32(2 * NOOP_REACH)
        yield piece


class _World:
    """The world model.  Torch is imported here only: a no-op worker starts fast and stays small."""

    def __init__(self, workload: Workload, source: DataSource, node: str, threads: int) -> None:
        import torch  # noqa: PLC0415  # see the class

        from lensemble_node.worker.training import (  # noqa: PLC0415
            dataset,
            episode_steps,
            inner_loop,
        )

        torch.set_num_threads(threads)
        task = workload.task
        if not isinstance(task, WorldModelTask):
            raise TypeError(f"task {task.kind} has no world model")
        self._workload = workload
        self._data = dataset.open_dataset(source)
        self._data.fit(task, workload.normalize)
        windows = self._data.windows(task.history)
        private = workload.privacy.enabled and workload.privacy.unit == "episode"
        kind = episode_steps.EpisodeLearner if private else inner_loop.Learner
        self._make = partial(kind, workload, windows, self._data.action_dim, node)
        self._learner = self._make()
        self._points: torch.Tensor | None = None
        self._run = self._learner.run
        self._history = task.history

    def facts(self, state_dir: Path) -> DatasetFacts:
        return self._data.commitment(state_dir)

    def place(self, device: str) -> None:
        from lensemble_node.worker.training.device import choose  # noqa: PLC0415  # as above

        self._learner = self._make(choose(device))
        self._run = self._learner.run

    def join(self, seat: Seat, rendezvous: str, device: str) -> "Team":
        from lensemble_node.worker.training import crew, episode_steps, sharded  # noqa: PLC0415
        from lensemble_node.worker.training.device import choose  # noqa: PLC0415  # as above

        if isinstance(self._learner, episode_steps.EpisodeLearner):
            raise ConfigError(
                'privacy.unit is "episode", whose secret coins only one process may throw',
                "Set `worker.processes = 1`.",
            )
        met = crew.Crew(seat, rendezvous, choose(device))
        team = crew.Team(met, sharded.Sharded(met, self._learner), self._learner)
        self._run = team.lead
        return team

    def pin(self, probe: Path, digest: Digest) -> None:
        from lensemble_node.worker.training import probe as probes  # noqa: PLC0415  # as above

        found = probes.read(probe)
        found.expect(digest)
        self._learner.anchor_to(found.anchor())
        self._points = found.spread()

    def train(self, prior: FlatParameters, order: RoundOrder, making: Making) -> Result:
        from lensemble_node.worker.training import episode_steps, heads  # noqa: PLC0415

        anchored = self._workload.objective.lambda_anc > 0 or self._workload.gauge.align
        if anchored and self._points is None:
            raise ProbeError(
                f"workload {self._workload.name!r} keeps to a probe's frame and none is pinned",
                "Give this node the federation's probe.",
            )
        learner, protection = self._learner, making.protection
        if isinstance(learner, episode_steps.EpisodeLearner):
            learner.noise = protection.noise
        head, optimizer, cursor = making.store.read()
        if cursor.config_hash != self._workload.digest:
            # The first round here, or what another workload left behind.
            head, optimizer, cursor = {}, {}, Cursor()
        embodiment = self._data.embodiment
        local = heads.mine(head, optimizer, cursor.batches, embodiment)
        learner.load(prior, local)
        before = self._sight(learner.model.layout.views(prior))
        segment = Segment(
            self._workload.inner.steps, order["global_step"], order["sketch_seed"], making.stream
        )
        losses = self._run(segment, order["progress"], order["should_stop"])
        layout, pipeline, drift = learner.model.layout, protection.pipeline(), None
        after = self._sight(learner.model.named())
        if before is not None and after is not None:
            aligned = Alignment(self._workload.gauge, before, after, self._history)
            drift = aligned.drift
            pipeline = replace(pipeline, on_weights=(aligned.stage(layout),))
        difference = release(learner.model.named(), prior, layout, pipeline)
        kept = learner.local_state()
        cursor = Cursor(kept.cursor, order["round_index"], self._workload.digest)
        making.store.write_pending(*heads.with_others(kept, head, optimizer, embodiment), cursor)
        vector = making.put_down(order["round_index"], difference.pieces())
        found = (losses.first, losses.last)
        return Result(vector, difference.extent, found, protection.clip_factor, drift)

    def _sight(self, views: Mapping[str, FlatParameters]) -> Sight | None:
        """The learner's model, whose weights are ``views``, on the probe; None without a probe."""
        if self._points is None:
            return None
        return Sight(self._learner.model.latents(self._points), views)


class _Custom:
    """A task of the node's own; torch and the task's code are imported and run here only."""

    def __init__(self, workload: Workload, code: TaskCode, node: str, threads: int) -> None:
        import torch  # noqa: PLC0415  # as _World

        from lensemble_node.worker.training import crew, custom  # noqa: PLC0415

        torch.set_num_threads(threads)
        self._workload = workload
        self._device = torch.device("cpu")
        self._make = partial(custom.CustomDescent.of, workload, code, node)
        self._made: custom.CustomDescent | None = None
        self._team: crew.Team | None = None

    def place(self, device: str) -> None:
        from lensemble_node.worker.training.device import choose  # noqa: PLC0415  # as above

        self._device = choose(device)

    def pin(self, probe: Path, _: Digest) -> None:
        raise ConfigError(f"a custom task has no use for the probe {probe}")

    def join(self, seat: Seat, rendezvous: str, device: str) -> "Team":
        from lensemble_node.worker.training import crew  # noqa: PLC0415  # as above

        self.place(device)
        met = crew.Crew(seat, rendezvous, self._device)
        self._made = self._make(self._device)
        self._team = crew.Team(met, crew.Copied(met, self._made), self._made)
        return self._team

    def facts(self, _: Path) -> DatasetFacts:
        self._made = self._made or self._make(self._device)
        return self._made.custom.facts()

    def train(self, prior: FlatParameters, order: RoundOrder, making: Making) -> Result:
        from lensemble_node.worker.training import inner_loop  # noqa: PLC0415  # as above

        head, optimizer, cursor = making.store.read()
        if cursor.config_hash != self._workload.digest:
            head, optimizer, cursor = {}, {}, Cursor()
        descent, protection = self._made or self._make(self._device), making.protection
        self._made = descent
        descent.load(prior, inner_loop.LocalState(head, optimizer, cursor.batches))
        segment = Segment(
            self._workload.inner.steps, order["global_step"], order["sketch_seed"], making.stream
        )
        run = descent.run if self._team is None else self._team.lead
        losses = run(segment, order["progress"], order["should_stop"])
        pipeline, named = protection.pipeline(), descent.shared.named()
        difference = release(named, prior, descent.layout, pipeline)
        kept = descent.local_state()
        cursor = Cursor(kept.cursor, order["round_index"], self._workload.digest)
        making.store.write_pending(kept.head, kept.optimizer, cursor)
        vector = making.put_down(order["round_index"], difference.pieces())
        found = (losses.first, losses.last)
        return Result(vector, difference.extent, found, protection.clip_factor)


Work: TypeAlias = _Noop | _World | _Custom
"""What trains a workload of each kind."""
