"""Keys, revisions, history and leases as plain state, for the local adapters.

A `Keyspace` is the committed state. A `Draft` is built on top of one and tries transactions one after another, each
sees those before it; `Keyspace.keep` then applies the whole draft, or it is dropped. So a store with a disk drafts a
group of transactions, writes the draft to disk, and only then applies it: readers never see what might still be lost,
and a failed write leaves nothing to undo.

Nothing here does IO, waits, or knows the time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cotenant.store.port import (
    Change,
    Changes,
    Committed,
    Compare,
    Conflict,
    Delete,
    Entry,
    Lease,
    LeaseLost,
    Listing,
    Operation,
    Put,
)

FIRST_REVISION = 1  # of an empty store, as in etcd


@dataclass(frozen=True, slots=True)
class Held:
    """An entry and the lease that it is bound to, or 0."""

    entry: Entry
    lease_id: int


@dataclass(frozen=True, slots=True)
class HistoryLimit:
    """The limit of history kept for watches; the oldest is dropped first."""

    revisions: int = 10_000
    bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.revisions < 1 or self.bytes < 0:
            raise ValueError(f"invalid history limit {self}: it needs at least one revision and a size of 0 or more")


@dataclass(slots=True)
class Keyspace:
    """The committed state, and the history since `compacted`."""

    revision: int = FIRST_REVISION
    compacted: int = 0
    history_bytes: int = 0
    lease_id_last: int = 0
    leases: dict[int, Lease] = field(default_factory=dict)
    _held: dict[str, Held] = field(default_factory=dict)
    _sorted: list[str] = field(default_factory=list)
    _bound: dict[int, set[str]] = field(default_factory=dict)
    _history: list[Changes] = field(default_factory=list)

    def held(self, key: str) -> Held | None:
        """Return the entry of a key and its lease."""
        return self._held.get(key)

    def bound_to(self, lease_id: int) -> Iterable[str]:
        """Return the keys that are deleted with a lease."""
        return self._bound.get(lease_id, ())

    def listing(self, prefix: str) -> Listing:
        """Return all keys under a prefix, in order."""
        first = bisect_left(self._sorted, prefix)
        last = bisect_right(self._sorted, prefix, lo=first, key=lambda key: key[: len(prefix)])
        held = self._held
        return Listing(tuple([held[key].entry for key in self._sorted[first:last]]), self.revision)

    def since(self, revision: int) -> Sequence[Changes]:
        """Return the history after a revision that is not compacted."""
        return self._history[max(0, revision - self._forgotten) :]

    @property
    def _forgotten(self) -> int:
        """The last revision that is not in the history."""
        return max(self.compacted, FIRST_REVISION)

    @property
    def history_revisions(self) -> int:
        """The number of revisions that watches can still request."""
        return len(self._history)

    def keep(self, draft: Draft) -> None:
        """Apply a draft that was built on this keyspace."""
        if draft.base is not self or draft.base_revision != self.revision:
            raise AssertionError(f"drafted at {draft.base_revision}, but the keyspace is at {self.revision}")
        for key, held in draft.held_by_key.items():
            self.place(key, held)
        for changes in draft.history:
            self.record(changes)
        self.leases.update(draft.granted)
        for lease_id in draft.revoked:
            self.leases.pop(lease_id, None)
        self.lease_id_last = draft.lease_id_last
        self.forget(draft.compacted)

    def fill(self, rows: Iterable[tuple[str, Held]]) -> None:
        """Set all keys of an empty keyspace."""
        self._held = dict(rows)
        self._sorted = sorted(self._held)
        for key, held in self._held.items():
            if held.lease_id:
                self._bound.setdefault(held.lease_id, set()).add(key)

    def place(self, key: str, held: Held | None) -> None:
        """Set or remove one key."""
        before = self._held.get(key)
        if before is not None and before.lease_id:
            self._unbind(key, before.lease_id)
        if held is not None:
            if before is None:
                insort(self._sorted, key)
            self._held[key] = held
            if held.lease_id:
                self._bound.setdefault(held.lease_id, set()).add(key)
        elif before is not None:
            del self._held[key]
            del self._sorted[bisect_left(self._sorted, key)]

    def _unbind(self, key: str, lease_id: int) -> None:
        keys = self._bound[lease_id]
        keys.discard(key)
        if not keys:
            del self._bound[lease_id]

    def record(self, changes: Changes) -> None:
        """Add the next revision to the history."""
        self._history.append(changes)
        self.history_bytes += size_of(changes)
        self.revision = changes.revision

    def forget(self, revision: int) -> None:
        """Drop the history up to and including a revision."""
        if revision <= self.compacted:
            return
        count = max(0, revision - self._forgotten)
        self.history_bytes -= sum(map(size_of, self._history[:count]))
        del self._history[:count]
        self.compacted = revision


class Draft:
    """Transactions tried in order on top of a keyspace, to be applied together or not at all."""

    __slots__ = (
        "base",
        "base_revision",
        "compacted",
        "granted",
        "held_by_key",
        "history",
        "lease_id_last",
        "revision",
        "revoked",
    )

    def __init__(self, base: Keyspace) -> None:
        self.base = base
        self.base_revision = base.revision
        self.revision = base.revision
        self.compacted = base.compacted
        self.lease_id_last = base.lease_id_last
        self.history: list[Changes] = []
        self.held_by_key: dict[str, Held | None] = {}
        self.granted: dict[int, Lease] = {}
        self.revoked: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether applying this draft would change nothing."""
        return not (self.history or self.granted or self.revoked or self.compacted > self.base.compacted)

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none."""
        for compare in compares:
            held = self._find(compare.key)
            if (held.entry.mod_revision if held else 0) != compare.mod_revision:
                return Conflict(self.revision)
        for operation in operations:
            if isinstance(operation, Put) and operation.lease_id:
                self._require(operation.lease_id)
        return self._write(operations)

    def grant(self, ttl_seconds: float) -> Lease:
        """Grant a lease with a new ID."""
        self.lease_id_last += 1
        lease = Lease(self.lease_id_last, ttl_seconds)
        self.granted[lease.id] = lease
        return lease

    def revoke(self, lease_id: int) -> Committed:
        """Revoke a lease and delete its keys; an ended lease is ignored."""
        if not self._is_live(lease_id):
            return Committed(self.revision)
        keys = {key for key in self.base.bound_to(lease_id) if key not in self.held_by_key}
        keys |= {key for key, held in self.held_by_key.items() if held and held.lease_id == lease_id}
        self.revoked.add(lease_id)
        self.granted.pop(lease_id, None)
        return self._write([Delete(key) for key in sorted(keys)])

    def forget(self, revision: int) -> None:
        """Drop the history up to and including a revision, which must have been reached."""
        if revision > self.revision:
            raise ValueError(f"revision {revision} is in the future: the store is at {self.revision}")
        self.compacted = max(self.compacted, revision)

    def trim(self, limit: HistoryLimit) -> None:
        """Drop the oldest history once it exceeds its limit by a quarter, so that this happens rarely."""
        count = self.base.history_revisions + len(self.history)
        size = self.base.history_bytes + sum(map(size_of, self.history))
        if count * 4 <= limit.revisions * 5 and size * 4 <= limit.bytes * 5:
            return
        for changes in chain(self.base.since(self.base.compacted), self.history):
            if count <= limit.revisions and size <= limit.bytes:
                return
            count -= 1
            size -= size_of(changes)
            self.compacted = max(self.compacted, changes.revision)

    def _find(self, key: str) -> Held | None:
        return self.held_by_key[key] if key in self.held_by_key else self.base.held(key)

    def _is_live(self, lease_id: int) -> bool:
        return (lease_id in self.base.leases or lease_id in self.granted) and lease_id not in self.revoked

    def _require(self, lease_id: int) -> None:
        if not self._is_live(lease_id):
            raise LeaseLost(f"lease {lease_id} has expired; nothing can be put under it")

    def _write(self, operations: Sequence[Operation]) -> Committed:
        revision = self.revision + 1
        changes = tuple(change for operation in operations if (change := self._do(operation, revision)))
        if changes:
            self.revision = revision
            self.history.append(Changes(revision, changes))
        return Committed(self.revision)

    def _do(self, operation: Operation, revision: int) -> Change | None:
        before, key = self._find(operation.key), operation.key
        if isinstance(operation, Put):
            create_revision = before.entry.create_revision if before else revision
            entry = Entry(key, operation.value, create_revision, revision)
            self.held_by_key[key] = Held(entry, operation.lease_id)
            return Change(key, operation.value, revision)
        if before is None:
            return None
        self.held_by_key[key] = None
        return Change(key, None, revision)


def size_of(changes: Changes) -> int:
    """Return the estimated size of one revision of history."""
    return sum(len(change.key) + len(change.value or b"") for change in changes.changes)
