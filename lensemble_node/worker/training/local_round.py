"""One node's part of a round: train from the prior, keep what is local, release the difference.

A retry of a round from the same prior releases the same bytes again, after a restart too, until
they are spent: then the round is trained anew.  What was trained counts only once the round closed
with it (``adopt``); otherwise it is rolled back (``discard``).

Where the workload asks for privacy, a release is charged to the node's ledger before it is spoken
of: checked against the budget, trained, written, charged, and only then handed out.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Unpack

import numpy as np

from lensemble import seeds
from lensemble.errors import (
    CheckpointIntegrityError,
    ContractViolation,
    GaugeError,
    InvariantError,
)
from lensemble.ids import Digest
from lensemble.merkle import DatasetFacts
from lensemble.params import FlatParameters, parameter_digest
from lensemble.secagg.field import FieldVector
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import Workload, layout
from lensemble_node.worker.seat import Seat
from lensemble_node.worker.training.charges import Account, Charges, Standing
from lensemble_node.worker.training.gauge import Drift
from lensemble_node.worker.training.kinds import Making, RoundOrder, Team, work_for
from lensemble_node.worker.training.local_store import LocalStore, Sidecar
from lensemble_node.worker.training.noise import Entropy, SecretNoise
from lensemble_node.worker.training.protect import Protection
from lensemble_node.worker.training.source import DataSource, TaskCode


@dataclass(frozen=True)
class Release:
    """``vector``: the blob of words of ``plan``, as uint32, mapped from the state directory.

    Norm and peak are those of the difference it encodes.  ``reused``: trained by an earlier call.
    ``clip_factor``: by which the difference was scaled to the workload's norm; None unclipped.
    ``drift``: how the latents' frame has turned; None without a probe.
    """

    vector: FieldVector
    plan: FieldPlan
    l2_norm: float
    max_abs: float
    loss_first: float
    loss_last: float
    reused: bool
    clip_factor: float | None = None
    drift: Drift | None = None


class Trainer:
    """Trains one workload on one node's data, with its state under ``state_dir``.

    Args:
        workload: what to train.
        source: the node's data, or its own task; none for the no-op task.
        state_dir: holds ``local/``, ``release/`` and the dataset cache.
        node: this node's id; seeds its batches and its action head.
        threads: torch's threads; results are reproducible for the same number.

    Raises:
        ConfigError: a world model without data, or a task whose code this node does not run.
        DatasetError: data that cannot be used.
    """

    def __init__(
        self,
        workload: Workload,
        source: DataSource | TaskCode | None,
        state_dir: Path,
        node: str,
        threads: int,
    ) -> None:
        self._workload = workload
        self._layout = layout(workload)
        self._state_dir = state_dir
        self._node = node
        self._store = LocalStore(state_dir, charged=workload.privacy.enabled)
        self._charges: Charges | None = None
        self._entropy: Entropy = os.urandom
        self._team: Team | None = None
        self._work = work_for(workload, source, node, threads)

    @cached_property
    def facts(self) -> DatasetFacts:
        """Root and counts of the data, computed on first use (or read from the cache)."""
        return self._work.facts(self._state_dir)

    def pin(self, probe: Path, digest: Digest) -> None:
        """Use the landmarks of the probe at ``probe``, whose hash the federation states.

        Raises:
            ProbeError: it cannot be read, or hashes otherwise.
            ConfigError: the workload trains no world model.
        """
        self._work.pin(probe, digest)

    def place(self, device: str) -> None:
        """Train on ``device``, "auto", "cpu" or "cuda"; to be called before ``pin`` and ``train``.

        Raises:
            ConfigError: it is not there.
        """
        self._work.place(device)

    def lead(self, seat: Seat, rendezvous: Path, device: str) -> None:
        """Train together with the followers of ``seat``; in place of ``place``.

        They have to be told of ``rendezvous``, where all meet; ``ready`` waits for their data.

        Raises:
            ConfigError: no such device, or a batch that cannot be shared among so many.
            GroupLost: they do not come.
        """
        self._team = self._work.join(seat, str(rendezvous), device)

    def ready(self) -> None:
        """Wait until all who train together have opened their data; raises ``GroupLost``."""
        if self._team is not None:
            self._team.crew.ready()

    def account(self, federation: str, entropy: Entropy = os.urandom) -> None:
        """Charge what is released to the budget in ``federation``; needed where privacy is enabled.

        Without privacy this does nothing.  ``entropy`` is where noise comes from.

        Raises:
            ConfigError: the accounting library is not installed.
            LedgerIntegrityError, PrivacyBudgetExceeded, StorageError: see ``Charges``.
        """
        self._entropy = entropy
        if self._workload.privacy.enabled:
            account = Account(federation, self.facts.root, self._workload)
            trained = self._store.adopted_by == self._workload.digest
            self._charges = Charges(self._state_dir, account, trained=trained)

    @property
    def standing(self) -> Standing | None:
        """What is spent of the privacy budget; None where nothing is accounted."""
        return None if self._charges is None else self._charges.standing()

    def spend(self, round_index: int) -> None:
        """Never release again what was released for ``round_index``; durable on return.

        To be called before a share is given out that lets the coordinator have the sum.

        Raises:
            StorageError: the file system refuses; no share may be given.
        """
        self._store.spend(round_index)

    def spend_before(self, round_index: int, attempt: int) -> None:
        """Spend what was trained for an attempt below ``attempt``, if it is there.

        For a release that may be in a revealed sum although this node gave no share for it.

        Raises:
            StorageError: the file system refuses.
        """
        known = self._store.released(round_index)
        if known is not None and known.attempt < attempt:
            self._store.spend(round_index)

    def train(self, prior: FlatParameters, **order: Unpack[RoundOrder]) -> Release:
        """Train from ``prior`` (float32, shape ``(layout.size,)``) and put down what to release.

        Raises:
            ContractViolation: ``prior`` does not have the layout's shape, or the plan is not one.
            GaugeError: a prior of round 0 or a sketch other than the federation's.
            FrameDriftExceeded: what was trained is too far from the round's frame.
            ProbeError: the workload has an anchor or aligns, and no probe is pinned.
            CheckpointIntegrityError: a later prior, or the local state, is damaged.
            FieldBoundExceeded: the update is too large for the field.
            PrivacyBudgetExceeded: there is no room for it in the budget; nothing is released.
            TaskError: the node's own task failed.
            Stopped, Diverged: from the inner loop; nothing is kept.
        """
        digest = self._check(prior, order)
        at = order["round_index"]
        known, spent = self._store.trained(at), self._store.spent(at)
        plan = FieldPlan(self._layout, self._workload.room, order.get("plan", b""))
        basis = (digest, self._workload.digest, self.facts.root)
        if (
            known is not None
            and (known.prior, known.config_hash, known.dataset_root) == basis
            and known.plan == plan.code
            and (spent is None or spent.vector != known.vector)
        ):
            return self._answer(known, reused=True)
        if (charges := self._required_charges()) is not None:
            charges.require_room()
        self._store.clear(at)
        # The same batches would give the same vector again, and two sums over it their difference.
        stream = "" if spent is None else f":{at}:{order['attempt']}"
        chance = SecretNoise(self._entropy)
        making = Making(self._store, self._protection(), stream, plan, chance)
        result = self._work.train(prior, order, making)
        sidecar = Sidecar(
            order["round_index"],
            order["attempt"],
            *basis,
            sketch_seed=order["sketch_seed"],
            vector=result.vector,
            l2_norm=result.extent.l2_norm,
            max_abs=result.extent.max_abs,
            loss_first=result.losses[0],
            loss_last=result.losses[1],
            clip_factor=result.clip_factor,
            drift=result.drift,
            plan=plan.code,
        )
        self._store.write_sidecar(sidecar)
        return self._answer(sidecar, reused=False)

    def adopt(self, round_index: int) -> bool:
        """The round closed with our update: keep what it trained.  False when nothing is there."""
        return self._store.adopt(round_index)

    def discard(self, round_index: int) -> None:
        """The round closed without our update: forget what it trained."""
        self._store.discard(round_index)

    def _protection(self) -> Protection:
        return Protection(self._workload, SecretNoise(self._entropy))

    def _required_charges(self) -> Charges | None:
        if self._workload.privacy.enabled and self._charges is None:
            raise InvariantError(
                f"workload {self._workload.name!r} asks for privacy, and no account was opened"
            )
        return self._charges

    def _answer(self, sidecar: Sidecar, *, reused: bool) -> Release:
        if (charges := self._required_charges()) is not None:
            charges.charge(
                sidecar.vector, sidecar.round_index, sidecar.attempt, sidecar.clip_factor
            )
        return Release(
            self._store.vector(sidecar.round_index),
            FieldPlan(self._layout, self._workload.room, sidecar.plan),
            sidecar.l2_norm,
            sidecar.max_abs,
            sidecar.loss_first,
            sidecar.loss_last,
            reused,
            sidecar.clip_factor,
            sidecar.drift,
        )

    def _check(self, prior: FlatParameters, order: RoundOrder) -> Digest:
        if prior.dtype != np.float32 or prior.shape != (self._layout.size,):
            raise ContractViolation(
                f"the prior is {prior.dtype} of {prior.shape}, not float32 of "
                f"({self._layout.size},)"
            )
        wanted = seeds.sketch(self._workload.root_seed, order["round_index"])
        if order["sketch_seed"] != wanted:
            raise GaugeError(
                f"round {order['round_index']} has the sketch seed {order['sketch_seed']}; the "
                f"workload's root seed gives {wanted}",
                "Run coordinator and node with the same workload and version.",
            )
        known = order.get("prior_digest") if order.get("prior_known", False) else None
        digest = known or parameter_digest(self._layout, prior)
        expected = order.get("prior_digest", digest)
        if digest != expected:
            message = f"the prior of round {order['round_index']} is {digest}, not {expected}"
            raise (
                GaugeError(f"warm start: {message}")
                if order["round_index"] == 0
                else CheckpointIntegrityError(message)
            )
        return digest
