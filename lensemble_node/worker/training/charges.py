"""The node's durable record of what its releases have spent of the privacy budget.

One line of JSON and its check per charge, appended to two files of the state directory and flushed
in both before the release is spoken of.  A file that is missing or short is restored from the
other; a line that breaks off counts as one more charge.  Nothing is ever taken off, so the epsilon
of a node never falls while its state directory is there.

A charge counts for every workload that trains in the same federation or on the same data.
"""

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import LedgerIntegrityError, PrivacyBudgetExceeded
from lensemble.ids import Digest
from lensemble.privacy import accountant
from lensemble.privacy.accountant import Mechanism
from lensemble.state_dir import CHARGES
from lensemble.workload import Workload
from lensemble_node.worker.training.storage import write_atomically

MAX_LEDGER_BYTES = 1 << 28
_CHECK_CHARS = 16
TORN = "torn"


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """``steps`` times the mechanism (``sigma``, ``rate``), for the vector with SHA-256 ``release``.

    ``note`` is empty, or ``torn`` where a broken line stands for a charge that is not known.
    """

    sequence: int
    federation: str
    dataset_root: str
    config_hash: str
    unit: str
    sigma: float
    rate: float
    steps: int
    round: int
    attempt: int
    release: str
    clip_factor: float | None = None
    note: str = ""


class Account(msgspec.Struct, frozen=True):
    """``workload`` trained in ``federation`` on the data with ``dataset_root``."""

    federation: str
    dataset_root: Digest
    workload: Workload


class Standing(msgspec.Struct, frozen=True):
    """What is spent at ``delta``, and how many more releases the budget has room for."""

    epsilon: float
    budget: float
    delta: float
    releases: int
    rounds_left: int
    unit: Literal["participant", "episode"]


class Charges:
    """The ledger under ``state_dir``, for one account; repairs what a crash left.

    ``trained``: this node's own state says that it has taken part under this workload before.

    Raises:
        LedgerIntegrityError: damaged beyond a broken last line, or gone although ``trained``.
        PrivacyBudgetExceeded: the data was released in a way that rules the promise out.
        StorageError: the file system refuses.
    """

    def __init__(self, state_dir: Path, account: Account, *, trained: bool = False) -> None:
        self._paths = [state_dir / place for place in CHARGES]
        self._account = account
        self._terms = account.workload.privacy
        self._cost = accountant.cost_of(account.workload)
        with files.storage(state_dir):
            for path in self._paths:
                files.make_directory(path.parent)
        self._charges: list[Charge] = []
        self._doubtful = False
        """A charge was begun and is not known to be in both files."""
        self._recover()
        self._require_possible(trained=trained)

    # ---- asking ----

    def standing(self) -> Standing:
        """What is spent and left now."""
        self._settle()
        mine = sum(self._concerns(charge) for charge in self._charges)
        spent = accountant.epsilon(self._counts(), self._terms.delta, self._terms.epsilon)
        budget, delta = self._terms.epsilon, self._terms.delta
        return Standing(spent, budget, delta, mine, self._room, self._terms.unit)

    def require_room(self) -> None:
        """Refuse one more release that would go over the budget.

        Raises:
            PrivacyBudgetExceeded: with the numbers.
        """
        self._settle()
        if self._room > 0:
            return
        now = self.standing()
        after = accountant.spent_after(
            self._counts(), self._cost, 1, self._terms.delta, self._terms.epsilon
        )
        raise PrivacyBudgetExceeded(
            f"one more release would bring this node's epsilon from {now.epsilon:.3f} to "
            f"{after:.3f} at delta {now.delta:g}; the budget is {now.budget:g}, spent by "
            f"{now.releases} releases"
        )

    # ---- charging ----

    def charge(
        self,
        release: Digest,
        round_index: int,
        attempt: int,
        clip_factor: float | None = None,
    ) -> None:
        """Make the charge of ``release`` durable, once: charging it again changes nothing.

        Raises:
            PrivacyBudgetExceeded: there is no room for it.
            StorageError: the file system refuses; nothing may be sent.
        """
        self._settle()
        if any(charge.release == release for charge in self._charges):
            return
        self.require_room()
        charge = self._charge(release, round_index, attempt)
        self._append(msgspec.structs.replace(charge, clip_factor=clip_factor))
        self._room -= 1

    def _charge(self, release: str, round_index: int, attempt: int, note: str = "") -> Charge:
        account, (mechanism, steps) = self._account, self._cost
        return Charge(
            sequence=len(self._charges),
            federation=account.federation,
            dataset_root=account.dataset_root,
            config_hash=account.workload.digest,
            unit=self._terms.unit,
            sigma=mechanism.sigma,
            rate=mechanism.rate,
            steps=steps,
            round=round_index,
            attempt=attempt,
            release=release,
            note=note,
        )

    def _append(self, charge: Charge) -> None:
        self._doubtful = True
        for path in self._paths:
            with files.storage(path):
                _append_durably(path, _line(charge))
        self._charges.append(charge)
        self._size += len(_line(charge))
        self._doubtful = False

    def _concerns(self, charge: Charge) -> bool:
        account = self._account
        return (
            charge.federation == account.federation or charge.dataset_root == account.dataset_root
        )

    def _counts(self) -> Counter[Mechanism]:
        counts = Counter[Mechanism]()
        for charge in filter(self._concerns, self._charges):
            counts[Mechanism(charge.sigma, charge.rate)] += charge.steps
        return counts

    # ---- opening ----

    def _settle(self) -> None:
        """Look again where the files are not what this object left them."""
        with files.storage(self._paths[0]):
            sizes = [path.stat().st_size if path.exists() else 0 for path in self._paths]
        if self._doubtful or any(size != self._size for size in sizes):
            self._recover()
            self._doubtful = False

    def _recover(self) -> None:
        """Read both files, make them whole and equal, and count what is left."""
        found = [_read(path) for path in self._paths]
        self._charges = charges = max((one for one, _ in found), key=len)
        for path, (other, _) in zip(self._paths, found, strict=True):
            if other != charges[: len(other)]:
                raise _damaged(path, "differs from its copy")
        torn = [tail for other, tail in found if tail and len(other) == len(charges)]
        if torn:
            # On its way to the ledger or rotten there: nobody can say, so it counts.
            release = hashlib.sha256(torn[0]).hexdigest()
            charges.append(self._charge(release, -1, 0, TORN))
        whole = b"".join(map(_line, charges))
        self._size = len(whole)
        for path, (other, tail) in zip(self._paths, found, strict=True):
            if tail or len(other) < len(charges):
                write_atomically(path, whole)
        self._room = accountant.releases_left(
            self._counts(), self._cost, self._terms.epsilon, self._terms.delta
        )

    def _require_possible(self, *, trained: bool) -> None:
        mine = [charge for charge in self._charges if self._concerns(charge)]
        config = self._account.workload.digest
        if trained and all(charge.config_hash != config for charge in mine):
            raise LedgerIntegrityError(
                f"{self._paths[0]} has no charge of this workload, and this node has taken part "
                "in its rounds",
                "Restore `privacy/` of the state directory from a copy; without it the budget "
                "that is left is not known.",
            )
        if self._terms.unit == "participant" and any(one.unit == "episode" for one in mine):
            raise PrivacyBudgetExceeded(
                'this node has released with privacy.unit "episode", which bounds nothing for '
                "the participant as a whole",
                'Go on with unit "episode"; what was released cannot be taken back.',
            )


def _line(charge: Charge) -> bytes:
    body = msgspec.json.encode(charge)
    return body + b" " + _check(body) + b"\n"


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"lensemble/charge/v1\x00" + body).hexdigest()[:_CHECK_CHARS].encode()


def _parse(line: bytes, sequence: int) -> Charge | None:
    body, _, check = line.rpartition(b" ")
    if check != _check(body):
        return None
    try:
        charge = msgspec.json.decode(body, type=Charge)
    except msgspec.DecodeError:
        return None
    return charge if charge.sequence == sequence else None


def _read(path: Path) -> tuple[list[Charge], bytes]:
    """The charges in ``path``, and what is left of a last line that is no charge."""
    with files.storage(path):
        if not path.exists():
            return [], b""
        if path.stat().st_size > MAX_LEDGER_BYTES:
            raise _damaged(path, f"is over {MAX_LEDGER_BYTES} bytes")
        pieces = path.read_bytes().split(b"\n")
    charges: list[Charge] = []
    for number, piece in enumerate(pieces):
        last = not any(pieces[number + 1 :])
        charge = None if number == len(pieces) - 1 else _parse(piece, len(charges))
        if charge is not None:
            charges.append(charge)
        elif last:
            return charges, piece
        else:
            raise _damaged(path, f"has no charge in line {number + 1}")
    return charges, b""


def _damaged(path: Path, how: str) -> LedgerIntegrityError:
    return LedgerIntegrityError(
        f"the privacy ledger {path} {how}",
        "Restore it from a copy; nothing is released while it cannot be read.",
    )


def _append_durably(path: Path, line: bytes) -> None:
    fresh = not path.exists()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        size = os.fstat(fd).st_size
        try:
            files.write_all(fd, line, size)
            reached("charge.written", path)
            os.fsync(fd)
            reached("charge.flushed", path)
        except OSError:
            # Known not to have left: the half of a line would count as a charge at the next start.
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)
    if fresh:
        files.flush_directory(path.parent)
