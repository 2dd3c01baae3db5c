"""Tables of which every row carries a seal, so that a change of any stored value is noticed.

SQLite keeps the bytes safe through crashes, not through rot or editing; ``seal`` is the SHA-256 of
the table's name and the row's values, recomputed whenever a row is read.
"""

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from lensemble import files
from lensemble.crash_points import reached
from lensemble.errors import LedgerIntegrityError, SchemaVersionMismatch, StorageError
from lensemble.logs import logger

SCHEMA_VERSION = 1
APPLICATION_ID = 0x4C4E5342
MAX_WAL_BYTES = 4 << 20
BUSY_TIMEOUT_S = 5.0
CACHE_KIB = 512
"""Of pages in memory, which SQLite would let grow to four times that with the ledger."""

_SEAL_TAG = b"lensemble/ledger-row/v1\x00"
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}

Value: TypeAlias = int | float | str | None
Row: TypeAlias = dict[str, Value]

TABLES: dict[str, tuple[str, ...]] = {
    "meta": ("key TEXT PRIMARY KEY", "value TEXT"),
    "records": (
        "round INTEGER PRIMARY KEY",
        "attempt INTEGER",
        "run TEXT",
        "committed_at TEXT",
        "record TEXT",
        "record_hash TEXT",
    ),
    "artifacts": ("kind TEXT", "round INTEGER", "digest TEXT"),
    "attempts": (
        "round INTEGER",
        "attempt INTEGER",
        "run TEXT",
        "state TEXT",
        "code TEXT",
        "reason TEXT",
        "opened_at TEXT",
        "closed_at TEXT",
    ),
    "runs": (
        "run TEXT PRIMARY KEY",
        "requested INTEGER",
        "done INTEGER",
        "state TEXT",
        "code TEXT",
        "reason TEXT",
        "manifest_digest TEXT",
        "started_at TEXT",
        "ended_at TEXT",
    ),
    "roster": (
        "node TEXT PRIMARY KEY",
        "name TEXT",
        "admitted_by TEXT",
        "first_seen TEXT",
        "last_seen TEXT",
    ),
    "invites": (
        "secret_hash TEXT PRIMARY KEY",
        "expires REAL",
        "uses_left INTEGER",
        "used_by TEXT",
    ),
    "events": ("seq INTEGER PRIMARY KEY", "at TEXT", "event TEXT"),
}
KEYS: dict[str, tuple[str, ...]] = {
    "meta": ("key",),
    "records": ("round",),
    "artifacts": ("kind", "round"),
    "attempts": ("round", "attempt"),
    "runs": ("run",),
    "roster": ("node",),
    "invites": ("secret_hash",),
    "events": ("seq",),
}


def _columns(table: str) -> tuple[str, ...]:
    return tuple(column.split(" ", 1)[0] for column in TABLES[table])


def _create(table: str) -> str:
    columns = [*TABLES[table], "seal TEXT"]
    if len(KEYS[table]) > 1:
        columns.append(f"PRIMARY KEY ({', '.join(KEYS[table])})")
    return f"CREATE TABLE {table} ({', '.join(columns)})"


def _schema_rows(table: str) -> Iterator[tuple[str, str, str, str | None]]:
    """What SQLite's own schema table holds of ``table``; an integer key needs no index."""
    yield "table", table, table, _create(table)
    if not any(column.endswith("INTEGER PRIMARY KEY") for column in TABLES[table]):
        yield "index", f"sqlite_autoindex_{table}_1", table, None


def seal(table: str, values: Sequence[Value]) -> str:
    """SHA-256, hex, over a domain tag, the table's name and the values in column order."""
    # A damaged cell may come back as bytes, which no row has: any text for them will not match.
    text = json.dumps([table, *values], separators=(",", ":"), ensure_ascii=True, default=repr)
    return hashlib.sha256(_SEAL_TAG + text.encode()).hexdigest()


class SealedTables:
    """The database at ``path``; its methods may be called from any thread, one at a time each.

    Raises:
        LedgerIntegrityError: it is no ledger, or damaged; every method may raise this.
        SchemaVersionMismatch: written by a newer version.
        StorageError: unreadable, unwritable or no room; every method may raise this.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._first = ""
        """The table that the transaction in progress changed first."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        with files.storage(path):
            os.close(os.open(path, flags, 0o600))
        self._connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(create)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, create: bool) -> None:
        with self._mapped():
            if not create:
                self._check_schema()
            for pragma in (
                "journal_mode = WAL",
                "synchronous = FULL",
                "wal_autocheckpoint = 0",
                "cell_size_check = ON",
                f"cache_size = -{CACHE_KIB}",
            ):
                self._connection.execute(f"PRAGMA {pragma}")
            if create:
                self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                with self.transaction():
                    for table in TABLES:
                        self._connection.execute(_create(table))
            self._truncate_wal()

    def _check_schema(self) -> None:
        ((application,),) = self._connection.execute("PRAGMA application_id")
        ((version,),) = self._connection.execute("PRAGMA user_version")
        if application != APPLICATION_ID:
            raise LedgerIntegrityError(f"{self.path} is not a ledger of Lensemble")
        if version > SCHEMA_VERSION:
            raise SchemaVersionMismatch(
                f"{self.path} has schema {version}; this build reads up to {SCHEMA_VERSION}"
            )
        if version < SCHEMA_VERSION:
            raise LedgerIntegrityError(f"{self.path} has the schema {version}, which never was")
        stored = set(
            self._connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        )
        wrong = stored ^ {row for table in TABLES for row in _schema_rows(table)}
        if wrong:
            names = ", ".join(sorted({str(row[1]) for row in wrong}))
            raise LedgerIntegrityError(f"{self.path}: table {names} is not defined as written")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Hold the lock, and name SQLite's errors in our terms."""
        with self._lock:
            try:
                yield
            except UnicodeDecodeError as error:
                raise LedgerIntegrityError(f"{self.path}: text that is not UTF-8") from error
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
                if code & 0xFF in _CORRUPT:
                    raise LedgerIntegrityError(f"{self.path}: {error}") from error
                raise StorageError(
                    f"{self.path}: {error}, {files.free_bytes(self.path)} bytes are free",
                    "Give the daemon room and rights in its state directory.",
                ) from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or none of it, durable at its end; may be nested."""
        with self._mapped():
            if self._in_transaction():
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            self._first = ""
            try:
                yield
                reached("transaction.made", self._first or "schema")
                self._connection.execute("COMMIT")
                reached("transaction.committed", self._first or "schema")
            except BaseException:
                if self._in_transaction():
                    self._connection.execute("ROLLBACK")
                raise
            wal = self.path.with_name(self.path.name + "-wal")
            if wal.exists() and wal.stat().st_size > MAX_WAL_BYTES:
                self.tidy()

    def _in_transaction(self) -> bool:
        return self._connection.in_transaction

    def _truncate_wal(self) -> None:
        """Move the log into the database; frames of an earlier log never stay behind in it."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        reached("ledger.settled")

    def settle(self) -> None:
        """Leave everything in the one file, so that a plain copy of it is whole."""
        with self._mapped():
            self._truncate_wal()

    def tidy(self) -> None:
        """``settle``, if the disk lets it: what is committed is safe in the log as well."""
        try:
            self.settle()
        except StorageError as error:
            logger("ledger").warning("ledger.not_settled", reason=error.message)

    def close(self) -> None:
        with self._mapped():
            self._connection.close()

    def damage(self) -> list[str]:
        """What SQLite's own check finds; empty for a sound file."""
        with self._mapped():
            found = [str(row[0]) for row in self._connection.execute("PRAGMA integrity_check(20)")]
        return [] if found == ["ok"] else found

    def broken_seals(self) -> list[str]:
        """One sentence for each row of any table that does not have its seal."""
        found = []
        for table in TABLES:
            with self._mapped():
                cursor = self._connection.execute(f"SELECT * FROM {table}")  # noqa: S608 - ours
                for stored in cursor:
                    try:
                        self._unsealed(table, stored)
                    except LedgerIntegrityError as error:
                        found.append(error.message)
        return found

    def put(self, table: str, row: Row) -> None:
        """Insert or replace the row with the key of ``row``."""
        self._write("INSERT OR REPLACE", table, row)

    def insert(self, table: str, row: Row) -> None:
        """Insert a row whose key is new.

        Raises:
            LedgerIntegrityError: the key is there.
        """
        try:
            self._write("INSERT", table, row)
        except StorageError as error:
            if isinstance(error.__cause__, sqlite3.IntegrityError):
                key = ", ".join(f"{name} {row[name]}" for name in KEYS[table])
                raise LedgerIntegrityError(f"{self.path}: {table} already has {key}") from error
            raise

    def _write(self, verb: str, table: str, row: Row) -> None:
        values = [row[column] for column in _columns(table)]
        marks = ", ".join("?" * (len(values) + 1))
        with self.transaction():
            self._first = self._first or table
            self._connection.execute(
                f"{verb} INTO {table} VALUES ({marks})",
                [*values, seal(table, values)],
            )

    def rows(self, table: str, rest: str = "", values: Sequence[Value] = ()) -> list[Row]:
        """The rows of ``table`` that ``rest`` (SQL from WHERE on) selects, seals checked."""
        query = f"SELECT * FROM {table} {rest}"  # noqa: S608 - names are constants
        with self._mapped():
            found = self._connection.execute(query, values).fetchall()
        return [self._unsealed(table, stored) for stored in found]

    def row(self, table: str, *key: Value) -> Row | None:
        """The row with that key, if any."""
        where = " AND ".join(f"{name} = ?" for name in KEYS[table])
        found = self.rows(table, f"WHERE {where}", key)
        return found[0] if found else None

    def delete(self, table: str, rest: str, values: Sequence[Value] = ()) -> None:
        """Delete the rows of ``table`` that ``rest`` (SQL from WHERE on) selects."""
        with self.transaction():
            self._first = self._first or table
            self._connection.execute(
                f"DELETE FROM {table} {rest}",  # noqa: S608 - names are constants
                values,
            )

    def _unsealed(self, table: str, stored: Sequence[Value]) -> Row:
        columns = _columns(table)
        *values, found = stored
        row = dict(zip(columns, values, strict=True))
        if found != seal(table, values):
            key = ", ".join(f"{name} {row[name]}" for name in KEYS[table])
            raise LedgerIntegrityError(
                f"{self.path}: {table}, {key}: the row does not have its seal"
            )
        return row
