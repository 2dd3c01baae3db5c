"""What a run is about to do, written down before it starts: ``manifests/run-<id>.json``.

The manifest fixes the inputs that are known beforehand.  The others, contributors and digests of
each round, are in the ledger's records, each of which names its run; the ledger keeps the
manifest's digest, so that neither can change alone.
"""

import hashlib
import platform
import secrets
from importlib.metadata import PackageNotFoundError, version

import msgspec
import numpy as np

from lensemble import files, seeds
from lensemble.errors import ConfigError, LedgerIntegrityError
from lensemble.ids import Digest, FederationId
from lensemble.version import BUILD
from lensemble.wire.messages import WIRE_VERSION
from lensemble_coord.training.directory import StateDirectory
from lensemble_coord.training.ledger import Ledger

MANIFEST_SCHEMA = 1
MAX_RUN_ROUNDS = 100_000
MAX_MANIFEST_BYTES = 16 << 20
_TAG = b"lensemble/run-manifest/v1\x00"
_PACKAGES = (
    "blake3",
    "cryptography",
    "iroh",
    "msgspec",
    "numpy",
    "pydantic",
    "safetensors",
    "trio",
)


class RunManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a run that is settled before its first round opens."""

    schema: int = MANIFEST_SCHEMA
    run: str
    federation: FederationId
    config_hash: Digest
    config_resolved: str
    """Canonical JSON of the workload."""
    root_seed: int
    seed_scheme: str
    first_round: int
    rounds: int
    sketch_seeds: tuple[int, ...]
    """Of each round that is asked for, from ``first_round`` on."""
    aggregation: str
    field_bits: int | str
    """32, or "auto": the record of each round pins the widths of the next."""
    field_k: int
    field_n_max: int
    aggregation_dtype: str
    initial_digest: Digest
    initial_momentum_digest: Digest | None
    layout_digest: Digest
    written_by: str
    wire_version: int
    versions: dict[str, str]
    machine: str
    created_at: str


def manifest_digest(content: bytes) -> Digest:
    return Digest(hashlib.sha256(_TAG + content).hexdigest())


def begin_run(
    directory: StateDirectory, ledger: Ledger, rounds: int, aggregation: str = "plain"
) -> str:
    """Write the manifest of a run of ``rounds`` rounds, then enter the run in the ledger.

    Returns the id of the run.

    Raises:
        ConfigError: no round, or more than ``MAX_RUN_ROUNDS``.
        StorageError: the file system refuses.
    """
    if not 1 <= rounds <= MAX_RUN_ROUNDS:
        raise ConfigError(
            f"a run of {rounds} rounds", f"Ask for 1 to {MAX_RUN_ROUNDS} rounds at a time."
        )
    with files.storage(directory.manifests):
        manifest = plan_run(ledger, secrets.token_hex(8), rounds, aggregation)
        content = msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1)
        files.make_directory(directory.manifests)
    files.write_durably(directory.manifest(manifest.run), content)
    ledger.begin_run(manifest.run, rounds, manifest_digest(content))
    return manifest.run


def plan_run(ledger: Ledger, run: str, rounds: int, aggregation: str) -> RunManifest:
    """The manifest of a run that continues from the tail of ``ledger``."""
    workload, tail = ledger.workload, ledger.tail()
    first = tail.round + 1
    return RunManifest(
        run=run,
        federation=ledger.federation,
        config_hash=ledger.config_hash,
        config_resolved=ledger.workload_text,
        root_seed=workload.root_seed,
        seed_scheme=seeds.SCHEME,
        first_round=first,
        rounds=rounds,
        sketch_seeds=tuple(
            seeds.sketch(workload.root_seed, t) for t in range(first, first + rounds)
        ),
        aggregation=aggregation,
        field_bits=workload.field.bits,
        field_k=workload.field.k,
        field_n_max=workload.field.n_max,
        aggregation_dtype=workload.outer.dtype,
        initial_digest=tail.next_digest,
        initial_momentum_digest=tail.momentum_digest,
        layout_digest=tail.layout_digest,
        written_by=BUILD,
        wire_version=WIRE_VERSION,
        versions=_versions(),
        machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        created_at=ledger.now(),
    )


def _versions() -> dict[str, str]:
    found = {"numpy": np.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_manifest(directory: StateDirectory, run: str, due: Digest) -> RunManifest:
    """The manifest of ``run``, whose digest in the ledger is ``due``.

    Raises:
        LedgerIntegrityError: it is not what was written.
        StorageError: missing or unreadable.
    """
    path = directory.manifest(run)
    content = files.read_limited(path, MAX_MANIFEST_BYTES)
    if manifest_digest(content) != due:
        raise LedgerIntegrityError(f"{path}: its content does not have the digest of the ledger")
    try:
        return msgspec.json.decode(content, type=RunManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LedgerIntegrityError(f"{path}: {error}") from error
