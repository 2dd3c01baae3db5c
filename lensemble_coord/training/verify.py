"""Re-derives a coordinator's history from its files alone, on any machine.

Checked are: the ledger file, its log and every row of it; the chain of records; every signature of
every contributor; every manifest; every byte of every checkpoint, momentum and sum that is kept;
and every outer step that the kept sums allow, recomputed bit for bit.  Older rounds are verified by
the chain.  The identity key, the lock and the spool say nothing about the past and are left alone.

The directory is read and never written; a coordinator may be running in it.

``python -m lensemble_coord.training.verify DIRECTORY [--json]`` exits 1 if there is a problem.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from lensemble import identity, seeds
from lensemble.errors import ContractViolation
from lensemble.ids import Digest, NodeId
from lensemble.params import ParamLayout
from lensemble.secagg.plan import FieldPlan
from lensemble.secagg.scale import why_wide
from lensemble.wire.messages import MaskKeys, commitment_payload, update_payload
from lensemble.workload import layout as layout_of_workload
from lensemble_coord.training import masking
from lensemble_coord.training import record as records
from lensemble_coord.training.commit import KINDS, orphans
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.ledger_copy import WAL_SUFFIX, copy_ledger, state_of
from lensemble_coord.training.manifest import read_manifest
from lensemble_coord.training.record import GENESIS_ROUND, ContributionRecord, record_hash
from lensemble_coord.training.report import Progress, Report
from lensemble_coord.training.verify_files import FileVerification

EXIT_SOUND, EXIT_PROBLEMS = 0, 1

VerifySignature: TypeAlias = Callable[[NodeId, bytes, bytes], bool]
"""Takes node, signature and the bytes that were signed."""


def _silent(_: str, __: int, ___: int) -> None:
    pass


def verify_state(
    root: Path,
    progress: Progress = _silent,
    verify_signature: VerifySignature = identity.verify,
) -> Report:
    """Verify the state directory ``root``; what is wrong is in the report and never raised.

    If a running coordinator committed meanwhile, what was missed may have been retired in order:
    then all is verified again, a few times at most.
    """
    for last in (False, False, True):
        report, at_rest = _verify_once(root, progress, verify_signature)
        if report.sound or at_rest or last:
            break
    return report


def _verify_once(
    root: Path, progress: Progress, verify_signature: VerifySignature
) -> tuple[Report, bool]:
    """The report, and whether the ledger stood still meanwhile."""
    report, at_rest = Report(str(root)), True
    directory = StateDirectory(root)
    with (
        tempfile.TemporaryDirectory(prefix="lensemble-verify-") as private,
        report.noting("ledger.sqlite"),
    ):
        copied = copy_ledger(directory.ledger, Path(private))
        for each in copied.problems:
            report.problem(f"ledger.sqlite{WAL_SUFFIX}", each)
        report.notes += [f"ledger.sqlite{WAL_SUFFIX}: {each}" for each in copied.notes]
        ledger = Ledger(copied.path, check=False)
        try:
            _verify_all(directory, ledger, report, progress, verify_signature)
        finally:
            ledger.close()
        at_rest = state_of(directory.ledger) == copied.state
    # What was read is a copy; what is wrong is the original.
    report.problems = [
        msgspec.structs.replace(each, what=each.what.replace(private, str(root)))
        for each in report.problems
    ]
    return report, at_rest


def _verify_all(
    directory: StateDirectory,
    ledger: Ledger,
    report: Report,
    progress: Progress,
    verify_signature: VerifySignature,
) -> None:
    report.federation = ledger.federation
    layout = layout_of_workload(ledger.workload)
    with report.noting("ledger.sqlite"):
        for each in ledger.damage():
            report.problem("ledger.sqlite", each)
    chained: dict[int, ContributionRecord] = {}
    whole = False
    with report.noting("ledger.sqlite"):
        _verify_chain(ledger, layout, report, chained)
        whole = True
    _verify_signatures(chained, report, progress, verify_signature)
    with report.noting("ledger.sqlite"):
        _verify_manifests(directory, ledger, layout, report)
    with report.noting("ledger.sqlite"):
        present = {kind: ledger.present(kind) for kind in KINDS}
        if not whole:
            # Of rounds whose records cannot be read, nothing can be said.
            present = {
                kind: {at: digest for at, digest in named.items() if at in chained}
                for kind, named in present.items()
            }
        files = FileVerification(directory, ledger.workload, chained, report, progress)
        files.run(layout, present)
    with report.noting("ledger.sqlite"):
        found = orphans(directory, ledger)
        report.notes += [f"{name} is named by no record" for name in found]


def _verify_chain(
    ledger: Ledger,
    layout: ParamLayout,
    report: Report,
    chained: dict[int, ContributionRecord],
) -> None:
    prior: ContributionRecord | None = None
    for each in ledger.committed():
        record = each.record
        found = [*records.faults(record, prior), *_disagreements(record, ledger, layout)]
        if each.record_hash != record_hash(record):
            found.append(f"the stored hash is not the record's, {record_hash(record)}")
        for what in found:
            report.problem("ledger.sqlite: records", what, record.round)
        if record.refusal:
            report.notes.append(f"the step of round {record.round} was rejected: {record.refusal}")
        chained[record.round] = prior = record
        report.records += 1
        report.newest_round = record.round
    if prior is None:
        report.problem("ledger.sqlite: records", "there is none, not even the first")


def _disagreements(
    record: ContributionRecord, ledger: Ledger, layout: ParamLayout
) -> Iterator[str]:
    seed = seeds.sketch(ledger.workload.root_seed, record.round)
    for name, found, due in (
        ("federation", record.federation, ledger.federation),
        ("config_hash", record.config_hash, ledger.config_hash),
        ("layout_digest", record.layout_digest, layout.digest),
        ("sketch_seed", record.sketch_seed, 0 if record.round == GENESIS_ROUND else seed),
    ):
        if found != due:
            yield f"{name} is {found}, by the workload it is {due}"
    if record.following and (reason := why_wide(ledger.workload)):
        yield f"next_plan has words of 16 bits, and {reason}"
    try:
        FieldPlan(layout, ledger.workload.room, record.following)
    except ContractViolation as error:
        yield f"next_plan: {error.message}"


def _verify_signatures(
    chained: dict[int, ContributionRecord],
    report: Report,
    progress: Progress,
    verify_signature: VerifySignature,
) -> None:
    for done, record in enumerate(chained.values(), 1):
        keys = _verify_masking(record, report, verify_signature)
        for each in record.contributors:
            at = (record.federation, record.round, record.attempt, each.dataset_root)
            bound = commitment_payload(*at, record.config_hash, keys=keys.get(each.node))
            for name, signature, payload in (
                ("commitment", each.commitment_signature, bound),
                ("update", each.update_signature, update_payload(*at, each.update_digest)),
            ):
                report.signatures += 1
                if not verify_signature(each.node, bytes.fromhex(signature), payload):
                    what = f"the {name} signature of {each.node} is not that node's"
                    report.problem("ledger.sqlite: records", what, record.round)
        progress("signatures", done, len(chained))


def _verify_masking(
    record: ContributionRecord, report: Report, verify_signature: VerifySignature
) -> dict[NodeId, MaskKeys]:
    """Check the roster of a masked round and who signed its keys; the keys by node."""
    if record.masking is None:
        return {}
    where = "ledger.sqlite: records"
    with report.noting(where, record.round):
        digest = masking.roster_of(record, record.masking).digest
        if digest != record.masking.roster_digest:
            what = f"the roster of the masking is {digest}, not {record.masking.roster_digest}"
            report.problem(where, what, record.round)
    keys = {each.node: masking.keys_of(each) for each in record.masking.members}
    for each in record.masking.members:
        at = (record.federation, record.round, record.attempt, each.dataset_root)
        payload = commitment_payload(*at, record.config_hash, keys=keys[each.node])
        report.signatures += 1
        if not verify_signature(each.node, bytes.fromhex(each.commitment_signature), payload):
            what = f"the masking keys of {each.node} are not signed by that node"
            report.problem(where, what, record.round)
    return keys


def _verify_manifests(
    directory: StateDirectory, ledger: Ledger, layout: ParamLayout, report: Report
) -> None:
    for run in ledger.runs():
        where = str(directory.manifest(run.run).relative_to(directory.root))
        with report.noting(where):
            manifest = read_manifest(directory, run.run, Digest(run.manifest_digest))
            report.manifests += 1
            found = (manifest.federation, manifest.config_hash, manifest.layout_digest)
            if found != (ledger.federation, ledger.config_hash, layout.digest):
                report.problem(where, "it is of another federation or workload")


# ---- the program ----


def render(report: Report) -> str:
    """The report for a person, a few lines."""
    newest = "none" if report.newest_round is None else report.newest_round
    steps = f"recomputed {report.recomputed} outer steps"
    counts = (
        f"checked {report.records} records, {report.signatures} signatures, "
        f"{report.manifests} manifests, {report.checkpoints} checkpoints, {report.sums} sums"
    )
    federation = report.federation or "unknown"
    lines = [f"{report.directory}: federation {federation}, newest round {newest}", counts, steps]
    lines += [f"note: {each}" for each in report.notes]
    for each in report.problems:
        at = "" if each.round is None else f", round {each.round}"
        lines.append(f"PROBLEM: {each.where}{at}: {each.what}")
    lines.append("sound" if report.sound else f"{len(report.problems)} problems")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Verify one directory; returns the exit code."""
    parser = argparse.ArgumentParser(prog="lensemble-verify", description=__doc__)
    parser.add_argument("directory", type=Path, help="state directory of a coordinator, or a copy")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON line")
    options = parser.parse_args(arguments)
    report = verify_state(options.directory)
    text = msgspec.json.encode(report).decode() if options.json else render(report)
    sys.stdout.write(text + "\n")
    return EXIT_SOUND if report.sound else EXIT_PROBLEMS


if __name__ == "__main__":
    sys.exit(main())
