"""Makes state directories with a history of committed rounds, through the real parts."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from lensemble.blob import update_digest
from lensemble.checkpoint import Lineage, write_flat
from lensemble.identity import Identity
from lensemble.ids import Digest, FederationId
from lensemble.secagg.plan import FieldPlan
from lensemble.seeds import sketch
from lensemble.wire.messages import commitment_payload, update_payload
from lensemble.workload import NoopTask, Workload, initial_parameters
from lensemble.workload import layout as layout_of_workload
from lensemble_coord.training.aggregate import derive_sum
from lensemble_coord.training.commit import Retention, StepInputs, apply_outer_step, retire, sweep
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.manifest import begin_run
from lensemble_coord.training.record import ContributionRecord, Contributor, genesis, record_hash
from lensemble_coord.training.spool import Spool

FEDERATION = FederationId("f" * 32)
WORKLOAD = Workload(root_seed=7, task=NoopTask(parameters=600_000))
KEEP_ALL = Retention(keep_last=100, keep_every=0, verify_keep_rounds=50)
NODES = tuple(
    sorted(
        (Identity(hashlib.sha256(f"node {n}".encode()).digest()) for n in range(3)),
        key=lambda identity: identity.node,
    )
)


def words(workload: Workload, round_index: int, node: int) -> NDArray[np.uint32]:
    size = layout_of_workload(workload).size
    generator = np.random.default_rng([round_index, node])
    return generator.integers(-(2**20), 2**20, size, dtype=np.int32).view(np.uint32)


def planned(plan: FieldPlan, wide: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The update whose words of 32 bits are ``wide`` as a blob of ``plan``."""
    if plan.all_wide:
        return wide
    signed, chunks, clipped = wide.view(np.int32), [], []
    for each in plan.segments:
        part = signed[each.first : each.last]
        if each.bits == 32:
            chunks.append(part.tobytes())
            continue
        steps = np.rint(part * 2.0 ** (each.k - plan.k))
        clipped.append(int(np.count_nonzero(np.abs(steps) > plan.limit)))
        narrow = np.clip(steps, -plan.limit, plan.limit).astype(np.int16)
        chunks.append(narrow.tobytes() + bytes(2 * (len(part) % 2)))
    chunks.append(np.array([1, *clipped], dtype=np.uint32).tobytes())
    return np.frombuffer(b"".join(chunks), dtype=np.uint32)


MakeWords: TypeAlias = Callable[[Workload, int, int], NDArray[np.uint32]]


class History:
    """A state directory at ``root`` whose ``advance`` commits a round of all ``NODES``."""

    def __init__(self, root: Path, workload: Workload = WORKLOAD, make: MakeWords = words) -> None:
        self.make = make
        self.directory = StateDirectory(root)
        self.workload = workload
        self.layout = layout_of_workload(workload)
        first = write_flat(
            self.directory.checkpoints,
            self.layout,
            Lineage("weights", -1, workload.digest),
            initial_parameters(workload),
        )
        self.ledger = Ledger.create(
            self.directory.ledger,
            FEDERATION,
            workload,
            genesis(FEDERATION, workload, self.layout, first.digest),
        )
        self.run = begin_run(self.directory, self.ledger, 10)

    @classmethod
    def reopened(cls, root: Path, workload: Workload) -> "History":
        """Recover the state directory at ``root`` as a coordinator does when it starts."""
        history = cls.__new__(cls)
        history.make, history.workload = words, workload
        history.directory = StateDirectory(root)
        history.layout = layout_of_workload(workload)
        history.ledger = Ledger(history.directory.ledger)
        history.ledger.interrupt_attempts()
        sweep(history.directory, history.ledger)
        run = history.ledger.unfinished_run()
        history.run = "" if run is None else run.run
        return history

    def prepare(self, nodes: tuple[Identity, ...] = NODES) -> ContributionRecord:
        """Sum and step of the next round, up to the moment before the commit."""
        tail = self.ledger.tail()
        plan = FieldPlan(self.layout, self.workload.room, tail.following)
        round_index = tail.round + 1
        attempt = self.ledger.next_attempt(round_index)
        self.ledger.begin_attempt(round_index, attempt, self.run)
        spool = Spool(self.directory.spool, 2 * self.layout.nbytes, self.layout.nbytes)
        spools, contributors = [], []
        for number, identity in enumerate(nodes):
            raw = planned(plan, self.make(self.workload, round_index, number)).data.cast("B")
            spooled = spool.open(identity.node, len(raw))
            spooled.pwrite(0, raw)
            spools.append(spooled)
            contributors.append(self._contributor(identity, round_index, attempt, plan, raw))
        facts = derive_sum(spools, plan, self.workload.field, self.directory.sums)
        spool.close()
        inputs = StepInputs(
            round_index,
            tail.next_digest,
            tail.momentum_digest,
            facts.field_sum_digest,
            len(nodes),
            tail.following,
        )
        prepared = apply_outer_step(self.directory, self.workload, self.layout, inputs)
        return ContributionRecord(
            federation=FEDERATION,
            round=round_index,
            attempt=attempt,
            contributors=tuple(contributors),
            c_t=len(nodes),
            prior_digest=tail.next_digest,
            next_digest=prepared.next_digest,
            prior_momentum_digest=tail.momentum_digest,
            momentum_digest=prepared.momentum_digest,
            field_sum_digest=facts.field_sum_digest,
            config_hash=self.workload.digest,
            layout_digest=self.layout.digest,
            sketch_seed=sketch(self.workload.root_seed, round_index),
            next_plan=prepared.next_plan.hex() or UNSET,
            prev_record_hash=record_hash(tail),
        )

    def _contributor(
        self,
        identity: Identity,
        round_index: int,
        attempt: int,
        plan: FieldPlan,
        raw: memoryview,
    ) -> Contributor:
        root = Digest(hashlib.sha256(identity.seed).hexdigest())
        digest = update_digest(plan, [raw])
        at = (FEDERATION, round_index, attempt, root)
        return Contributor(
            node=identity.node,
            dataset_root=root,
            update_digest=digest,
            commitment_signature=identity.sign(commitment_payload(*at, self.workload.digest)).hex(),
            update_signature=identity.sign(update_payload(*at, digest)).hex(),
        )

    def advance(self, rounds: int = 1, retention: Retention = KEEP_ALL) -> ContributionRecord:
        """Commit ``rounds`` rounds and retire what ``retention`` does not keep."""
        for _ in range(rounds):
            self.ledger.append(self.prepare(), self.run)
            retire(self.directory, self.ledger, retention)
        return self.ledger.tail()
