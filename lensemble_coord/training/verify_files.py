"""Verifies what the ledger names: every byte of every kept artifact, and every step they allow."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lensemble.blob import SumDigest
from lensemble.checkpoint import Kind, Lineage, open_checkpoint
from lensemble.errors import CheckpointIntegrityError, LensembleError
from lensemble.ids import Digest
from lensemble.params import ParamLayout
from lensemble.secagg.plan import FieldPlan
from lensemble.workload import Workload
from lensemble_coord.training.aggregate import sum_pieces
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.record import GENESIS_ROUND, ContributionRecord
from lensemble_coord.training.replay import replay
from lensemble_coord.training.report import Progress, Report
from lensemble_coord.training.rows import ArtifactKind


def _named(record: ContributionRecord, kind: ArtifactKind) -> Digest | None:
    by_kind = {
        "weights": record.next_digest,
        "momentum": record.momentum_digest,
        "sum": record.field_sum_digest,
    }
    return by_kind[kind]


class FileVerification:
    """Checks the artifacts of ``records``, by round and already chained, into ``report``."""

    def __init__(
        self,
        directory: StateDirectory,
        workload: Workload,
        records: Mapping[int, ContributionRecord],
        report: Report,
        progress: Progress,
    ) -> None:
        self._directory = directory
        self._workload = workload
        self._records = records
        self._report = report
        self._progress = progress
        self._sound: dict[ArtifactKind, set[int]] = {"weights": set(), "momentum": set()}
        self._sound["sum"] = set()

    def run(
        self, layout: ParamLayout, present: Mapping[ArtifactKind, Mapping[int, Digest]]
    ) -> None:
        """Check what is ``present``, by kind and round, then the outer steps it allows."""
        for kind, named in present.items():
            self._check_kind(kind, layout, named)
        self._check_steps(layout)

    # ---- bytes ----

    def _check_kind(
        self, kind: ArtifactKind, layout: ParamLayout, present: Mapping[int, Digest]
    ) -> None:
        newest = max(self._records, default=GENESIS_ROUND)
        tail = self._records.get(newest)
        if kind == "weights" or (tail is not None and _named(tail, kind) is not None):
            self._require_newest(kind, newest, present)
        rounds_of: dict[Digest, list[int]] = {}
        for round_index, digest in present.items():
            rounds_of.setdefault(digest, []).append(round_index)
        with ThreadPoolExecutor(os.cpu_count(), "verify") as pool:
            faults = pool.map(partial(self._fault_of, kind, layout=layout), rounds_of)
            for done, ((digest, rounds), fault) in enumerate(
                zip(rounds_of.items(), faults, strict=True), 1
            ):
                self._check_named(kind, digest, rounds)
                if fault is None:
                    self._count(kind)
                    self._sound[kind].update(rounds)
                else:
                    self._report.problem(self._where(kind, digest), fault, rounds[-1])
                self._progress(kind, done, len(rounds_of))

    def _count(self, kind: ArtifactKind) -> None:
        if kind == "sum":
            self._report.sums += 1
        else:
            self._report.checkpoints += 1

    def _fault_of(self, kind: ArtifactKind, digest: Digest, layout: ParamLayout) -> str | None:
        """What is wrong with one artifact, every byte of it; called in threads."""
        try:
            if kind == "sum":
                self._check_sum(digest, self._plan_of(digest, layout))
            else:
                self._check_checkpoint(kind, digest, layout)
        except LensembleError as error:
            return error.message
        return None

    def _require_newest(
        self, kind: ArtifactKind, newest: int, present: Mapping[int, Digest]
    ) -> None:
        if kind != "sum" and newest not in present:
            self._report.problem("ledger.sqlite: artifacts", f"no {kind} is kept", newest)

    def _check_named(self, kind: ArtifactKind, digest: Digest, rounds: Iterable[int]) -> None:
        for each in rounds:
            record = self._records.get(each)
            due = None if record is None else _named(record, kind)
            if due != digest:
                what = f"{kind} is {digest}, the record says {due}"
                self._report.problem("ledger.sqlite: artifacts", what, each)

    def _where(self, kind: ArtifactKind, digest: Digest) -> str:
        places = {
            "weights": self._directory.checkpoint(digest),
            "momentum": self._directory.momentum_of(digest),
            "sum": self._directory.sum(digest),
        }
        return str(places[kind].relative_to(self._directory.root))

    def _check_checkpoint(self, kind: Kind, digest: Digest, layout: ParamLayout) -> None:
        by_kind = {
            "weights": self._directory.checkpoint(digest),
            "momentum": self._directory.momentum_of(digest),
        }
        found = open_checkpoint(by_kind[kind])
        if found.layout != layout:
            raise CheckpointIntegrityError(f"{found.path}: its layout is not the workload's")
        lineages = [
            Lineage(
                kind,
                record.round,
                record.config_hash,
                record.prior_digest if kind == "weights" else record.prior_momentum_digest,
            )
            for record in self._records.values()
            if _named(record, kind) == digest
        ]
        if found.header.lineage not in lineages:
            raise CheckpointIntegrityError(
                f"{found.path}: header.json says {found.header.lineage}, no record does"
            )
        found.verify()

    def _plan_of(self, digest: Digest, layout: ParamLayout) -> FieldPlan:
        """The plan of the sum ``digest``: what the record before its round left for it."""
        rounds = [each.round for each in self._records.values() if _named(each, "sum") == digest]
        before = self._records.get(min(rounds, default=GENESIS_ROUND) - 1)
        code = b"" if before is None else before.following
        return FieldPlan(layout, self._workload.room, code)

    def _check_sum(self, digest: Digest, plan: FieldPlan) -> None:
        path = self._directory.sum(digest)
        running = SumDigest(plan)
        for piece in sum_pieces(path, plan):
            running.update(piece)
        if running.hexdigest() != digest:
            raise CheckpointIntegrityError(
                f"{path}: its bytes have the digest {running.hexdigest()}"
            )

    # ---- steps ----

    def _check_steps(self, layout: ParamLayout) -> None:
        states = sorted(self._sound["weights"] & {GENESIS_ROUND, *self._sound["momentum"]})
        last = None
        for base in states:
            if last is not None and base < last:
                continue
            later: list[ContributionRecord] = []
            while base + len(later) + 1 in self._sound["sum"] & set(self._records):
                later.append(self._records[base + len(later) + 1])
            last = base + len(later)
            if later and base in self._records:
                with self._report.noting("outer step", base + 1):
                    self._check_segment(self._records[base], later, layout)

    def _check_segment(
        self,
        base: ContributionRecord,
        later: list[ContributionRecord],
        layout: ParamLayout,
    ) -> None:
        agree = True
        for result in replay(self._directory, self._workload, layout, base, later):
            if isinstance(result, int):
                self._progress("outer steps", result, layout.nbytes)
                continue
            record = self._records[result.round]
            self._report.recomputed += 1
            parameters, momentum = record.stepped
            plan = None if result.next_plan is None else result.next_plan.hex()
            for name, found, due in (
                ("momentum", result.momentum_digest, momentum),
                ("parameters", result.next_digest, parameters),
                ("field plan", plan, None if plan is None else record.next_plan),
            ):
                # Everything after the first wrong step differs too, and says nothing new.
                if agree and found != due:
                    what = f"recomputed {name}: {found}, the record says {due}"
                    self._report.problem("outer step", what, result.round)
                    agree = False
