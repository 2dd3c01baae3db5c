"""Where things lie in a coordinator's state directory.

::

ledger.sqlite
checkpoints/<digest>/   weights.safetensors, header.json
momentum/<digest>/      the same form
sums/<digest>.u32       revealed field sums of the rounds that can be recomputed
spool/                  updates in flight that have no room in memory
manifests/run-<id>.json
"""

from pathlib import Path

import msgspec

from lensemble.ids import Digest
from lensemble_coord.training.aggregate import SUM_SUFFIX


class StateDirectory(msgspec.Struct, frozen=True):
    root: Path

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def momentum(self) -> Path:
        return self.root / "momentum"

    @property
    def sums(self) -> Path:
        return self.root / "sums"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def manifests(self) -> Path:
        return self.root / "manifests"

    def checkpoint(self, digest: Digest) -> Path:
        return self.checkpoints / digest

    def momentum_of(self, digest: Digest) -> Path:
        return self.momentum / digest

    def sum(self, digest: Digest) -> Path:
        return self.sums / (digest + SUM_SUFFIX)

    def manifest(self, run: str) -> Path:
        return self.manifests / f"run-{run}.json"
