"""Every named place at which a daemon or worker can be killed, and what it takes to get there.

A ``Case`` is one kill: of whom, during which deed, at which point, at the how manieth time there.
``STATES`` says in which state of a round the coordinator's points fall.
"""

from collections.abc import Iterator
from typing import NamedTuple

FILE = ("file.written", "file.flushed", "file.named", "file.listed")
CHECKPOINT = ("begun", "written", "flushed", "named", "listed")
LOCAL = ("local.written", "local.flushed", "local.named", "local.listed")
TRANSACTION = ("transaction.made", "transaction.committed")
MESSAGE = ("message.made", "message.sent")

LOCAL_FILES = (
    "head.safetensors",
    "optimizer.safetensors",
    "cursor.json",
    "residual.bf*",
    "round-*.u*",
    "round-*.json",
    "round-*.spent",
)


class Case(NamedTuple):
    """``state``: of the round as the coordinator has it, where a round goes on at all."""

    victim: str
    deed: str
    point: str
    count: int = 1
    state: str = ""

    @property
    def label(self) -> str:
        return "-".join((self.victim, self.deed, self.point.replace(" ", "_"), str(self.count)))


def _each(stems: tuple[str, ...], *subjects: str) -> tuple[str, ...]:
    return tuple(f"{stem} {subject}" for subject in subjects for stem in stems)


def _parts(kind: str) -> tuple[str, ...]:
    return tuple(f"checkpoint.{part} {kind}" for part in CHECKPOINT)


STATES: dict[str, tuple[tuple[str, int], ...]] = {
    "closed": tuple(
        (point, 1) for point in (*_each(FILE, "run-*.json"), *_each(TRANSACTION, "runs"))
    ),
    "open": (
        ("round.entered Open", 1),
        *((point, 1) for point in _each(TRANSACTION, "attempts")),
        *((point, count) for point in _each(MESSAGE, "RoundOpen") for count in (1, 3)),
        ("state.sent sum header", 1),
        ("state.sent sum data", 2),
        ("state.sent sum trailer", 3),
        ("round.entered Sharing", 1),
        *((point, count) for point in _each(MESSAGE, "Roster") for count in (1, 3)),
    ),
    "collecting": (
        ("round.entered Collecting", 1),
        *((point, count) for point in _each(MESSAGE, "Collect") for count in (1, 3)),
        ("spool.opened", 1),
        ("spool.written", 1),
        ("spool.written", 5),
        ("spool.written", 9),
    ),
    "aggregating": (
        ("round.entered Unmasking", 1),
        *((point, count) for point in _each(MESSAGE, "UnmaskRequest") for count in (1, 3)),
        ("round.entered Aggregating", 1),
        *((f"sum.{part}", 1) for part in CHECKPOINT),
    ),
    "aligning": (("round.entered Aligning", 1),),
    "committing": (
        ("round.entered Committing", 1),
        ("pack.written", 1),
        *((point, 1) for point in (*_parts("weights"), *_parts("momentum"))),
        *((point, count) for point in _each(FILE, "header.json") for count in (1, 2)),
        *((point, 1) for point in _each(TRANSACTION, "records", "artifacts")),
        ("ledger.settled", 1),
        *((f"sweep.removed {kind}", 1) for kind in ("checkpoints", "momentum", "sums")),
        *((f"sweep.doomed {kind}", 1) for kind in ("checkpoints", "momentum")),
    ),
}
"""Of a round that closes; a round is asked for while the last one is closed."""

ENDED: tuple[tuple[str, int], ...] = (
    ("round.entered Closed", 1),
    *((point, count) for point in _each(MESSAGE, "RoundClose") for count in (1, 3)),
    *((point, 2) for point in _each(TRANSACTION, "runs")),
    *((point, 1) for point in _each(TRANSACTION, "events")),
    ("spool.closed", 1),
    ("spool.removed", 2),
)
"""While a round ends; in which state depends on how fast the disk is."""

ABORTED: tuple[tuple[str, int], ...] = (
    ("round.entered Aborted", 1),
    *((point, 2) for point in _each(TRANSACTION, "attempts")),
    *((point, 1) for point in _each(MESSAGE, "RoundClose")),
    ("round.entered Open", 2),
)
"""Of an attempt that aborts because a worker was killed, and the next one."""

NODE_ROUND: tuple[tuple[str, int], ...] = (
    *((point, 1) for name in ("Commitment", "Shares", "Update", "UnmaskAnswer")
      for point in _each(MESSAGE, name)),
    *((point, 2) for point in _each(MESSAGE, "Progress")),
    *((f"worker.says {name}", 1) for name in (
        "Bound", "Consumed", "StateHeld", "Trained", "Masked", "Filled", "Sent", "Spent", "Closed",
    )),
    ("worker.says Consumed", 3),
    ("worker.says Filled", 5),
    ("state.written sum", 1),
    ("state.written sum", 2),
    ("state.received state", 1),
    ("state.named state", 1),
    ("state.received momentum", 1),
    ("state.named momentum", 1),
    ("state.settled", 1),
    *((point, 1) for point in _each(LOCAL, *LOCAL_FILES)),
    *((f"pending.{part}", 1) for part in ("written", "named", "listed")),
    ("update.sent header", 1),
    ("update.sent data", 1),
    ("update.sent data", 3),
    ("update.sent trailer", 1),
    ("adopt.decided", 1),
    *((f"adopt.moved {name}", 1) for name in LOCAL_FILES[:4]),
    ("adopt.listed", 1),
    ("adopt.cleared", 1),
)  # fmt: skip

FETCH: dict[str, tuple[tuple[str, int], ...]] = {
    "coordinator": (
        *((f"state.sent {kind} header", 1) for kind in ("state", "momentum")),
        *((f"state.sent {kind} data", 2) for kind in ("state", "momentum")),
        *((f"state.sent {kind} trailer", 1) for kind in ("state", "momentum")),
    ),
    "node": (
        *((f"state.written {kind}", count) for kind in ("state", "momentum")
          for count in (1, 2, 3)),
        *((f"state.{part} {kind}", 1) for kind in ("state", "momentum")
          for part in ("received", "named")),
        ("state.settled", 1),
    ),
}  # fmt: skip
"""In a round for which a node holds nothing of the state, so that it cannot take the steps."""

JOIN: dict[str, tuple[tuple[str, int], ...]] = {
    "coordinator": (
        *((point, count) for point in _each(TRANSACTION, "invites") for count in (1, 2)),
        *((point, 1) for point in _each(MESSAGE, "Welcome", "Provision")),
    ),
    "node": (
        *((point, count) for point in _each(FILE, "coordinator.json") for count in (1, 2)),
        *((point, 1) for point in _each(MESSAGE, "Join", "Inventory", "Provisioned")),
        ("worker.says Configured", 1),
        ("worker.says Attached", 2),
    ),
}

BEGIN: dict[str, tuple[tuple[str, int], ...]] = {
    "coordinator": (
        *((f"identity.{part}", 1) for part in CHECKPOINT[1:]),
        ("lock.taken", 1),
        *((point, 1) for point in (*_parts("weights"), *_each(FILE, "header.json"))),
        *((point, 1) for point in _each(TRANSACTION, "schema", "meta", "records")),
        ("ledger.settled", 1),
        *((f"ledger.{part}", 1) for part in ("made", "named", "listed")),
    ),
    "node": (*((f"identity.{part}", 1) for part in CHECKPOINT[1:]), ("lock.taken", 1)),
}

WORKER_LOST: tuple[tuple[str, int], ...] = tuple(
    (point, 1) for point in _each(MESSAGE, "Fault", "EdgeLost")
)
"""A node that is killed as it tells that its worker was."""

LEAVE: tuple[tuple[str, int], ...] = (
    *((point, 1) for point in _each(MESSAGE, "Leave")),
    ("worker.says Detached", 1),
)

RETURN: tuple[tuple[str, int], ...] = (
    *((point, 1) for point in _each(TRANSACTION, "roster")),
    *((f"{point} Circle", 1) for point in MESSAGE),
)
"""While a node that was admitted before is let in again, and told who else is here."""

PRIVATE: tuple[tuple[str, int], ...] = tuple(
    (f"charge.{part} {name}", 1)
    for name in ("ledger.jsonl", "privacy.jsonl")
    for part in ("written", "flushed")
)

ELSEWHERE = {
    "message.made Refused": "a refusal changes nothing on either side",
    "message.sent Refused": "a refusal changes nothing on either side",
    "worker.says Failed": "tests/node/test_worker_process.py kills workers that fail",
    "sweep.removed manifests": "only in recovery from a kill that the matrix has",
    **dict.fromkeys(
        _each(LOCAL, "ledger.jsonl", "privacy.jsonl"),
        "a ledger of charges is written anew only to repair it, as in tests/power",
    ),
    "worker.says Worked": "progress is for people; where it falls is a matter of pace",
}
"""Points that no case visits, and why none need."""


def cases() -> Iterator[Case]:
    """The whole matrix."""
    for state, points in STATES.items():
        for point, count in points:
            yield Case("coordinator", "round", point, count, state)
    plain = (
        ("coordinator", "round", ENDED),
        ("coordinator", "abort", ABORTED),
        ("coordinator", "return", RETURN),
        ("node", "round", NODE_ROUND),
        ("node", "abort", WORKER_LOST),
        ("node", "private", PRIVATE),
        ("node", "leave", LEAVE),
    )
    for victim, deed, chosen in plain:
        for point, count in chosen:
            yield Case(victim, deed, point, count)
    for deed, both in (("fetch", FETCH), ("join", JOIN), ("begin", BEGIN)):
        for victim, chosen in both.items():
            for point, count in chosen:
                yield Case(victim, deed, point, count)


CASES = tuple(cases())

SAMPLE = frozenset(
    {
        Case("coordinator", "round", "state.sent sum data", 2, "open"),
        Case("coordinator", "round", "transaction.made records", 1, "committing"),
        Case("node", "round", "state.written sum", 2),
        Case("node", "round", "state.named state"),
        Case("node", "fetch", "state.written momentum", 2),
        Case("node", "round", "message.made UnmaskAnswer"),
    }
)
"""What the default run visits."""
