"""Accepts a store that has regressed: writes what makes every member and agent continue with it.

Revisions continue far above everything that anybody has seen, so every new epoch is newer than the epochs that agents
obey; and attempts with their own epoch get a new one at the next load. Leaders are elected again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from cotenant.storage.v1 import records_pb2
from cotenant.store.backup_file import AHEAD, LEADERS, OPERATIONS_MAX, identity_of
from cotenant.store.eras import ERAS, begun
from cotenant.store.identity_check import IDENTITY, PROGRESS, STOPPED
from cotenant.store.port import Committed, Compare, Delete, Operation, Put, Store
from cotenant.store.revision_offset import BASE, FILLING, REVISION_MAX, PartialRestore, base_of
from cotenant.store.sqlite import SqliteStore
from cotenant.store.witness import Identity, RememberedStore

ATTEMPTS = "placement/attempts/"


async def accept(raw: Store, known: Sequence[RememberedStore], changes: Sequence[Operation] = ()) -> int:
    """Accept a store that has regressed or was replaced; return the revision from which it continues.

    `known` is what witnesses remember, and `changes` are further writes, made before any process trusts the store. If
    this is interrupted, it must be repeated.

    Raises:
        PartialRestore: the store was being restored.
        StoreUnavailable: the store does not answer.
    """
    while (goes_on := await _accepted(raw, known, changes)) is None:
        pass  # another process initialized or accepted the store in between
    if isinstance(raw, SqliteStore):
        await raw.accept()
    return goes_on


async def _accepted(raw: Store, known: Sequence[RememberedStore], changes: Sequence[Operation]) -> int | None:
    """Accept a store as of one read; return None if its identity has changed since."""
    listing = await raw.list("")
    entries = {entry.key: entry for entry in listing.entries}
    if FILLING in entries:
        raise PartialRestore("a restore is in progress or was interrupted; run `cotenant restore --replace` again")
    base = base_of(entries.get(BASE)) or 0
    seen = max([listing.revision + base, *(one.revision for one in known)])
    goes_on = min(seen, REVISION_MAX - AHEAD) + AHEAD
    now = time.time()
    there = identity_of(entries.get(IDENTITY)) or Identity.new(0.0)
    identity = there.accepted(now, [one.id for one in known], max((one.generation for one in known), default=0))
    written = {change.key for change in changes}
    operations = list(changes)
    for key, entry in entries.items():
        if key.startswith(ATTEMPTS) and key not in written:
            operations += _renewed(key, entry.value)
    for begin in range(0, len(operations), OPERATIONS_MAX):
        await raw.transact([], operations[begin : begin + OPERATIONS_MAX])
    named = entries.get(IDENTITY)
    result = await raw.transact(
        [Compare(IDENTITY, named.mod_revision if named else 0)],
        [
            *(Delete(key) for key in entries if key.endswith(LEADERS)),
            Put(BASE, str(goes_on).encode()),
            Put(IDENTITY, identity.encode()),
            Put(PROGRESS, b""),
            Delete(STOPPED),
            Put(ERAS, begun((), 0)[1]),
        ],
    )
    return goes_on if isinstance(result, Committed) else None


def _renewed(key: str, value: bytes) -> list[Operation]:
    """Return a write that replaces an attempt's own epoch by that of its record, which is newer."""
    try:
        stored = records_pb2.StoredAttempt.FromString(value)
    except DecodeError:  # placement reports it when it loads
        return []
    if not stored.attempt.epoch:
        return []
    stored.attempt.epoch = 0
    return [Put(key, stored.SerializeToString())]
