"""Input that says which store it is and how recent: files beside it, and keys that it holds about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.verification.fuzz.targets import Prepared, Target, file_target

from cotenant.store import witness_file
from cotenant.store.eras import ERAS, KEPT_MAX, begun, eras_of, name_of
from cotenant.store.identity_check import IDENTITY, PROGRESS, STOPPED, look_of
from cotenant.store.keyspace import Keyspace
from cotenant.store.port import Entry, Listing
from cotenant.store.sqlite_sidecar import Note, Sidecar, packed
from cotenant.store.witness import REVISION_MAX, Identity, RememberedStore, compare_store, learn

MEMORY = RememberedStore("a" * 32, 1_700_000_000, 40, 39, "era", 38)
IDENTITIES = (Identity("a" * 32, 1_700_000_000, "00ff", ("b",)).encode(), b'{"id": "a", "generation": 1, "key": ""}')


def targets() -> Iterator[Target]:
    """Yield the targets."""
    memory = json.dumps(asdict(MEMORY)).encode()
    yield Target("store memory", file_target("queue.json", _memory, (memory,)))
    notes = packed(Note(1, 40, b"0" * 16)) + packed(Note(2, 41, b"1" * 16))
    yield Target("SQLite sidecar", file_target("s.db-witness", _note, (notes,)))
    yield Target("store identity", lambda directory: Prepared(_identity, IDENTITIES))
    yield Target("store eras", lambda directory: Prepared(_eras, (b'[["x",3],["y",8]]', begun((), 0)[1])))


def _memory(path: Path) -> None:
    """A memory that is read can be written and read again."""
    memory = witness_file.read(path)
    if memory is None:
        return
    if not 0 <= memory.revision <= REVISION_MAX:
        raise AssertionError(f"remembers {memory}")
    witness_file.write(path, memory)
    if witness_file.read(path) != memory:
        raise AssertionError("another memory after it was written")


def _note(path: Path) -> None:
    """A damaged note does not prevent noting the next commit."""
    note = Sidecar(path.with_name("s.db"))
    note.regression(Keyspace())
    note.close()


def _identity(data: bytes) -> None:
    """A store with any identity is checked, and the remembered state fits it."""
    for stopped in ((), (Entry(STOPPED, data, 5, 5),)):
        entries = (Entry(IDENTITY, data, 2, 2), Entry(PROGRESS, b"", 3, 6), *stopped)
        look = look_of(Listing(entries, 7))
        compare_store(MEMORY, look.seen)
        if look.seen.identity and compare_store(learn(None, look.seen), look.seen):
            raise AssertionError("the state just remembered is rejected")


def _eras(data: bytes) -> None:
    """Another era can be begun after any."""
    found = eras_of(Entry(ERAS, data, 1, 1))
    name, value = begun(found, 9)
    if name_of(value) != name or len(eras_of(Entry(ERAS, value, 1, 1))) > KEPT_MAX:
        raise AssertionError("the new era is not the last one")
