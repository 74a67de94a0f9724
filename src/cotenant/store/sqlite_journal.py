"""The SQLite file behind a store: opened by one process only, read once, then only written.

Two tables hold the same data at different times: `entries` is the present state, `history` is how it came about, as far
back as watches may ask. A draft becomes one SQLite transaction, and each kind of row one statement for many rows: the
interpreter lock is released and acquired again at every statement, which is expensive beside a busy event loop.

The file is in WAL mode with synchronous=FULL, so COMMIT returns when the disk has the transaction, and a crash at any
moment leaves all of it or nothing. The exclusive locking mode keeps other processes out, because the state in memory is
valid only if no other process writes; the lock ends with the process.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from cotenant.store.ballast import Ballast
from cotenant.store.keyspace import FIRST_REVISION, Draft, Held, Keyspace
from cotenant.store.port import Change, Changes, Entry, Lease, StoreFull, StoreInUse, StoreUnavailable
from cotenant.store.sqlite_sidecar import Sidecar

APPLICATION_ID = 0x436F746E  # "Cotn", in the file's header
SCHEMA_VERSION = 1
ROWS_PER_STATEMENT_MAX = 256
CHECKPOINT_PAGES = 4_000  # 16 MiB of WAL before its pages are moved into the file

SCHEMA = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, create_revision INTEGER NOT NULL, mod_revision INTEGER NOT NULL,
    lease_id INTEGER NOT NULL
);
CREATE TABLE history (
    revision INTEGER NOT NULL, ordinal INTEGER NOT NULL, key TEXT NOT NULL, value BLOB,
    PRIMARY KEY (revision, ordinal)
) WITHOUT ROWID;
CREATE TABLE leases (id INTEGER PRIMARY KEY AUTOINCREMENT, ttl_seconds REAL NOT NULL);
CREATE TABLE compaction (revision INTEGER NOT NULL);
INSERT INTO compaction VALUES (0);
"""
STATEMENTS = tuple(statement.strip() for statement in SCHEMA.split(";") if statement.strip())
TABLES = tuple(statement for statement in STATEMENTS if statement.startswith("CREATE TABLE"))

# Conditions that hold for no row written by this module. SQLite accepts any type in any column, and has no checksums.
DAMAGED = {
    "entries": "typeof(key) != 'text' OR key = '' OR typeof(value) != 'blob' OR typeof(mod_revision) != 'integer'"
    " OR typeof(create_revision) != 'integer' OR create_revision < 1 OR mod_revision < create_revision"
    " OR typeof(lease_id) != 'integer' OR lease_id < 0",
    "history": "typeof(revision) != 'integer' OR typeof(ordinal) != 'integer' OR typeof(key) != 'text' OR key = ''"
    " OR typeof(value) NOT IN ('blob', 'null')",
    "leases": "typeof(ttl_seconds) != 'real' OR NOT ttl_seconds > 0",
    "compaction": "typeof(revision) != 'integer' OR revision < 0",
    "sqlite_sequence": "name = 'leases' AND (typeof(seq) != 'integer' OR seq < 0)",
}
REPLACING = "ON CONFLICT (key) DO UPDATE SET " + ", ".join(  # in place: cheaper than INSERT OR REPLACE
    f"{column} = excluded.{column}" for column in ("value", "create_revision", "mod_revision", "lease_id")
)

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter if an error quotes a damaged schema
Row = tuple[object, ...]
Item = TypeVar("Item")


def _make_private(path: Path) -> None:
    """Create the file for its owner only, whatever its directory's mode: it will hold the environments of jobs.

    An existing file is not opened: closing it would release the locks of other users of it in this process.
    """
    with suppress(OSError):  # it exists, or opening it reports the error
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _keep_private(path: Path) -> None:
    """Restrict an existing store, and its WAL, to its owner."""
    for part in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            part.chmod(0o600)


class Journal:
    """The open file. Not safe for concurrent use."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises `StoreInUse` if another process has it open."""
        self.path, self.ballast = path, Ballast(path)
        self.full = ""  # why the last write failed, if for lack of space
        _make_private(path)
        try:
            self._connection = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except UNREADABLE as error:
            raise StoreUnavailable(f"cannot open {path}: {error}") from error
        try:
            self._prepare()
        except UNREADABLE as error:
            self._connection.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:  # the upper bits are details
                raise StoreInUse(f"{path} is open in another process: a store belongs to one process") from error
            raise StoreUnavailable(f"cannot open {path}: {error}") from error
        except StoreUnavailable:
            self._connection.close()
            raise
        _keep_private(path)
        self.sidecar = Sidecar(path)
        self.regression = ""  # how it is older than what was committed, or another file; set by `load`

    def _prepare(self) -> None:
        for pragma in (
            "locking_mode = EXCLUSIVE",  # before WAL mode, so that its index is private to this process too
            "journal_mode = WAL",
            "synchronous = FULL",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        ):
            self._connection.execute(f"PRAGMA {pragma}")
        with self._transaction():
            application_id, version = self._pragma("application_id"), self._pragma("user_version")
            if (application_id, version) == (APPLICATION_ID, SCHEMA_VERSION):
                return
            if (application_id, version) != (0, 0) or self._pragma("schema_version"):
                raise StoreUnavailable(
                    f"{self.path} is not a store of this version: "
                    f"application id {application_id:#x}, schema {version}; expected {SCHEMA_VERSION}"
                )
            for statement in STATEMENTS:
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _pragma(self, name: str) -> int:
        (value,) = self._connection.execute(f"PRAGMA {name}").fetchone()
        return int(value)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # on a full disk SQLite rolls back by itself
                self._connection.execute("ROLLBACK")
            raise

    def load(self) -> Keyspace:
        """Read the committed state.

        Raises:
            StoreUnavailable: it cannot be read, or is inconsistent.
        """
        try:
            if wrong := self._damage():
                raise StoreUnavailable(f"{self.path} is damaged: {wrong}; restore a backup")
            keyspace = self._load()
            self.regression = self.sidecar.regression(keyspace)
            if self.sidecar.noted is None:
                self.sidecar.note(keyspace.revision, None)
            return keyspace
        except UNREADABLE as error:
            raise StoreUnavailable(f"cannot read {self.path}: {error}") from error
        except TypeError as error:  # a damaged page has different types in different queries
            raise StoreUnavailable(f"{self.path} is damaged: {error}; restore a backup") from error

    def _damage(self) -> str:
        """Return what in the file this module cannot have written; "" if nothing is found."""
        read = self._connection.execute
        there = dict(read("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
        for statement in TABLES:
            name = statement.split()[2]
            if there.get(name) != statement:
                return f"its table {name} is missing or different"
        for table, odd in DAMAGED.items():
            (count,) = read(f"SELECT count(*) FROM {table} WHERE {odd}").fetchone()
            if count:
                return f"{count} rows of {table} are invalid"
        (count,) = read("SELECT count(*) FROM compaction").fetchone()
        if count != 1:
            return f"compaction has {count} rows, not 1"
        (compacted,) = read("SELECT revision FROM compaction").fetchone()
        first, last, revisions = read(
            "SELECT min(revision), max(revision), count(DISTINCT revision) FROM history"
        ).fetchone()
        forgotten = max(FIRST_REVISION, compacted)
        if revisions and (first, last) != (forgotten + 1, forgotten + revisions):
            return f"its history goes from revision {first} to {last} in {revisions} steps, after {forgotten}"
        (newest,) = read("SELECT max(mod_revision) FROM entries").fetchone()
        if (newest or 0) > forgotten + revisions:
            return f"an entry has revision {newest}, but the last is {forgotten + revisions}"
        return ""

    def _load(self) -> Keyspace:
        read = self._connection.execute
        keyspace = Keyspace()
        keyspace.fill(
            (key, Held(Entry(key, value, create_revision, mod_revision), lease_id))
            for key, value, create_revision, mod_revision, lease_id in read("SELECT * FROM entries ORDER BY key")
        )
        for lease_id, ttl_seconds in read("SELECT id, ttl_seconds FROM leases"):
            keyspace.leases[lease_id] = Lease(lease_id, ttl_seconds)
        for (last,) in read("SELECT seq FROM sqlite_sequence WHERE name = 'leases'"):
            keyspace.lease_id_last = last
        (compacted,) = read("SELECT revision FROM compaction").fetchone()
        keyspace.forget(compacted)
        keyspace.revision = max(FIRST_REVISION, compacted)
        rows = read("SELECT revision, key, value FROM history ORDER BY revision, ordinal")
        for revision, group in groupby(rows, key=lambda row: int(row[0])):
            keyspace.record(Changes(revision, tuple(Change(key, value, revision) for _, key, value in group)))
        return keyspace

    def write(self, draft: Draft) -> None:
        """Write a draft durably and atomically. Raises `StoreUnavailable` if the disk refuses; nothing is written."""
        try:
            try:
                self._write_once(draft)
            except sqlite3.Error as error:
                if not (is_full(error) and self.ballast.drop()):
                    raise
                self._write_once(draft)
        except UNREADABLE as error:
            self.full = f"cannot write {self.path}: {error}" if is_full(error) else ""
            raise (StoreFull if self.full else StoreUnavailable)(f"cannot write {self.path}: {error}") from error
        self.full = ""
        if draft.history and not self.regression:
            self.sidecar.note(draft.revision, draft.history[-1])

    def _write_once(self, draft: Draft) -> None:
        with self._transaction():
            self._write(draft)

    def size_bytes(self) -> int:
        """Return the size of the file and its WAL."""
        size = 0
        for part in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            with suppress(OSError):
                size += part.stat().st_size
        return size

    def accept(self, revision: int) -> None:
        """Accept the file as it is, at its present revision."""
        self.sidecar.note(revision, None)
        self.sidecar.sync()
        self.regression = ""

    def _write(self, draft: Draft) -> None:
        held = draft.held_by_key.items()
        self._insert("entries", [row_of(key, kept) for key, kept in held if kept], on_conflict=REPLACING)
        self._delete("entries WHERE key", [key for key, kept in held if kept is None])
        self._insert("history", [row for changes in draft.history for row in history_rows(changes)])
        self._insert("leases", [(lease.id, lease.ttl_seconds) for lease in draft.granted.values()])
        self._delete("leases WHERE id", list(draft.revoked))
        if draft.compacted > draft.base.compacted:
            self._connection.execute("DELETE FROM history WHERE revision <= ?", (draft.compacted,))
            self._connection.execute("UPDATE compaction SET revision = ?", (draft.compacted,))

    def _insert(self, table: str, rows: Sequence[Row], on_conflict: str = "") -> None:
        for part in in_parts(rows):
            values = [value for row in part for value in row]
            self._connection.execute(insert_statement(table, len(part), len(part[0]), on_conflict), values)

    def _delete(self, where: str, keys: Sequence[object]) -> None:
        for part in in_parts(keys):
            self._connection.execute(delete_statement(where, len(part)), part)

    def close(self) -> None:
        """Move the WAL into the file and close it."""
        self._connection.close()
        self.sidecar.close()


def is_full(error: Exception) -> bool:
    """Return whether a write failed for lack of space."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def row_of(key: str, held: Held) -> Row:
    """Return an entry as a row."""
    entry = held.entry
    return key, entry.value, entry.create_revision, entry.mod_revision, held.lease_id


def history_rows(changes: Changes) -> Iterable[Row]:
    """Return a revision as rows, one per change."""
    return ((changes.revision, ordinal, change.key, change.value) for ordinal, change in enumerate(changes.changes))


def in_parts(rows: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Split rows into powers of two, so that there are few different statements to compile.

    >>> [len(part) for part in in_parts(range(261))]
    [256, 4, 1]
    """
    start, size = 0, ROWS_PER_STATEMENT_MAX
    while start < len(rows):
        while size > len(rows) - start:
            size //= 2
        yield rows[start : start + size]
        start += size


@cache
def insert_statement(table: str, rows: int, columns: int, on_conflict: str) -> str:
    """Build one statement that inserts many rows.

    >>> insert_statement("leases", 3, 2, "")
    'INSERT INTO leases VALUES (?, ?), (?, ?), (?, ?) '
    """
    row = f"({', '.join('?' * columns)})"
    return f"INSERT INTO {table} VALUES {', '.join([row] * rows)} {on_conflict}"


@cache
def delete_statement(where: str, rows: int) -> str:
    """Build one statement that deletes many rows."""
    return f"DELETE FROM {where} IN ({', '.join('?' * rows)})"
