"""What a coordinator's state directory tells about its rounds, read from a private copy.

Records, attempts and roster are sealed and complete.  Figures of loss, bytes, time and public data
come from the events beside them, of which a ledger keeps a limited number: those of early rounds of
a long federation may be gone, and are None here.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lensemble.errors import LedgerIntegrityError, OperatorError
from lensemble.ids import NodeId
from lensemble.workload import Workload
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.gatekeeper import EVALUATED, Verdict, decode
from lensemble_coord.training.ledger import Ledger
from lensemble_coord.training.ledger_copy import copy_ledger
from lensemble_coord.training.public_gate import Figures
from lensemble_coord.training.record import GENESIS_ROUND, ContributionRecord
from lensemble_coord.training.rows import Attempt, Run

PHASES = ("open", "collecting", "aggregating", "aligning", "committing")
MAX_NAME = 24
DRIFT = ("drift_before", "drift_after", "mean_degrees", "rms_degrees", "max_degrees")
_PAGE = 1000


@dataclass
class NodeRound:
    """What one contributor of a round moved and told; bytes are as the coordinator sees them."""

    bytes_down: int = 0
    bytes_up: int = 0
    loss: float | None = None
    epsilon: float | None = None


@dataclass
class Round:
    """One committed round; what is not known of it is None or empty."""

    record: ContributionRecord
    record_hash: str
    run: str
    committed_at: str
    cohort: int
    """C: the nodes bound to the masking, or where there is none, those admitted by then."""
    nodes: dict[str, NodeRound] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: str = ""
    verdict: Verdict | None = None
    update_norm: float | None = None
    figures: Figures | None = None
    """Of the state after the round: where its step was rejected, of the one before."""

    @property
    def index(self) -> int:
        return self.record.round

    @property
    def loss(self) -> float | None:
        """Mean over the contributors that share theirs."""
        shared = [each.loss for each in self.nodes.values() if each.loss is not None]
        return sum(shared) / len(shared) if shared else None


@dataclass
class History:
    """A federation, or one run of it."""

    federation: str
    workload: Workload
    config_hash: str
    directory: Path
    names: dict[str, str]
    rounds: list[Round]
    aborted: list[Attempt]
    runs: list[Run]
    start: Verdict | None = None
    """Of the state that round 0 began with, if that was tested."""

    def name(self, node: str) -> str:
        """What people call ``node``: printable, short, and never empty."""
        return self.names.get(node) or node[:12]

    @property
    def contributors(self) -> list[str]:
        """Every node that contributed to a round, by name."""
        found = {each.node for entry in self.rounds for each in entry.record.contributors}
        return sorted(found, key=lambda node: (self.name(node), node))


def printable(text: str, most: int = MAX_NAME) -> str:
    """``text`` without what has no glyph, cut to ``most`` characters."""
    clean = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    return clean if len(clean) <= most else clean[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def read(root: Path, run: str = "") -> History:
    """The history in ``root``, of the one ``run`` if it is named (``latest``: the newest).

    A running coordinator is not disturbed.

    Raises:
        OperatorError: there is no ledger, or no such run.
        LedgerIntegrityError, StorageError: it cannot be read.
    """
    directory = StateDirectory(root)
    if not directory.ledger.is_file():
        raise OperatorError(
            f"{root} holds no {directory.ledger.name}",
            "Name a coordinator's state directory, or a copy of one, with --state-dir.",
        )
    with tempfile.TemporaryDirectory(prefix="lensemble-report-") as private:
        copied = copy_ledger(directory.ledger, Path(private))
        ledger = Ledger(copied.path, check=False)
        try:
            return _told(root, ledger, run)
        finally:
            ledger.close()


def _told(root: Path, ledger: Ledger, run: str) -> History:
    runs = ledger.runs()
    wanted = _run_named(runs, run)
    roster = ledger.roster()
    history = History(
        federation=ledger.federation,
        workload=ledger.workload,
        config_hash=ledger.config_hash,
        directory=root,
        names=_distinct({node: printable(member.name) for node, member in roster.items()}),
        rounds=[],
        aborted=[
            each
            for each in ledger.attempts()
            if each.state == "aborted" and wanted in ("", each.run)
        ],
        runs=[each for each in runs if wanted in ("", each.run)],
    )
    for each in ledger.committed(0):
        if wanted not in ("", each.run):
            continue
        seen = sum(member.first_seen <= each.committed_at for member in roster.values())
        masking = each.record.masking
        cohort = len(masking.members) if masking else max(seen, each.record.c_t)
        history.rounds.append(
            Round(each.record, each.record_hash, each.run, each.committed_at, cohort)
        )
    _add_events(history, ledger)
    _stand(history)
    return history


def _stand(history: History) -> None:
    """Give every round the figures of the state that stands after it."""
    known: dict[str, Figures] = {}
    if history.start:
        known[history.start.digest] = history.start.figures
    for entry in history.rounds:
        if entry.verdict is not None and not entry.record.refusal:
            known[entry.record.next_digest] = entry.verdict.figures
        entry.figures = known.get(entry.record.next_digest)
        if entry.figures and entry.record.refusal:
            entry.figures = msgspec.structs.replace(entry.figures, **dict.fromkeys(DRIFT))


def _run_named(runs: list[Run], run: str) -> str:
    if not run:
        return ""
    if run == "latest" and runs:
        return runs[-1].run
    if run in {each.run for each in runs}:
        return run
    known = ", ".join(each.run for each in runs[-10:]) or "none"
    raise OperatorError(f"there is no run {run!r} here", f"Name one of these, or none: {known}.")


def _distinct(names: dict[NodeId, str]) -> dict[str, str]:
    """The names, with a piece of the node's id where two nodes have the same."""
    given = list(names.values())
    return {
        node: name if name and given.count(name) == 1 else f"{name} {node[:6]}".strip()
        for node, name in names.items()
    }


def _events(ledger: Ledger) -> Iterator[tuple[str, dict[str, Any]]]:
    after = 0
    while batch := ledger.events(after, _PAGE):
        for each in batch:
            after = each.seq
            try:
                fields = json.loads(each.event)
            except ValueError as error:
                raise LedgerIntegrityError(f"event {each.seq} is not JSON") from error
            yield each.event, fields


def _add_events(history: History, ledger: Ledger) -> None:
    by_index = {each.index: each for each in history.rounds}
    add: dict[str, Callable[[Round, dict[str, Any]], None]] = {
        "round.closed": _add_closed,
        "round.node": _add_node,
        "round.diagnosed": _add_norm,
    }
    for text, fields in _events(ledger):
        name, entry = fields.get("event"), by_index.get(fields.get("round", GENESIS_ROUND))
        if name == EVALUATED:
            _add_verdict(history, by_index, decode(text))
        elif entry is not None and name in add:
            add[name](entry, fields)


def _add_verdict(history: History, by_index: dict[int, Round], verdict: Verdict | None) -> None:
    if verdict is None:
        return
    if verdict.round == GENESIS_ROUND:
        history.start = verdict
    elif verdict.round in by_index:
        by_index[verdict.round].verdict = verdict


def _add_closed(entry: Round, fields: dict[str, Any]) -> None:
    entry.left_out = str(fields.get("left_out", ""))
    for phase in PHASES:
        seconds = _number(fields.get(f"{phase}_s"))
        if seconds is not None:
            entry.seconds[phase] = seconds


def _add_node(entry: Round, fields: dict[str, Any]) -> None:
    entry.nodes[str(fields.get("node", ""))] = NodeRound(
        int(_number(fields.get("bytes_down")) or 0),
        int(_number(fields.get("bytes_up")) or 0),
        _number(fields.get("loss")),
        _number(fields.get("epsilon")),
    )


def _add_norm(entry: Round, fields: dict[str, Any]) -> None:
    entry.update_norm = _number(fields.get("mean_update_l2"))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
