"""The port of all stores: keys, revisions, transactions, watches, leases.

The model is etcd's, because it makes fencing possible: the store has one revision, which every committed transaction
that writes anything raises by exactly 1; each key has the revision that created it and the revision that changed it
last. A transaction compares such revisions and then writes all or nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

VALUE_BYTES_MAX = 1024 * 1024  # of one value; larger data does not belong in the store


@dataclass(frozen=True, slots=True)
class Entry:
    """A key at some revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries under a prefix, by key, at one revision of the store."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds if the key was last changed at `mod_revision`; 0 holds if there is no such key."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value. A key put under a lease is deleted with the lease."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; deleting a missing key is no error and, alone, raises no revision."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Committed:
    """All comparisons held and all operations were applied, at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A comparison failed and nothing was applied; the store is at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A key was put, or deleted if `value` is None."""

    key: str
    value: bytes | None
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one transaction under a watched prefix."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Relisted:
    """The history that a watch requested has been compacted: this is the whole prefix instead."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited claim to which keys may be bound."""

    id: int
    ttl_seconds: float


class StoreUnavailable(Exception):
    """The store did not answer. Whether a transaction in progress was committed is unknown."""


class StoreFull(StoreUnavailable):
    """The store has no space left: nothing was written. It recovers once there is space."""


class UnknownOutcome(StoreUnavailable):
    """A transaction or its answer was lost; the store is available, so the next call can find out."""


class NotLeader(StoreUnavailable):
    """Another process leads what this one wanted to change, or there is no leader yet. Nothing was applied.

    For a process of an ended term the store is permanently unavailable.
    """


class StoreDistrusted(StoreUnavailable):
    """The store is not the one that was written: nothing is written until an operator decides."""

    reason = "STORE_DISTRUSTED"
    remedy = "put the right data back, or run `cotenant store accept-regression`, which lists what is lost and asks"


class StoreRegressed(StoreDistrusted):
    """The store has regressed: it lacks acknowledged writes."""

    reason = "STORE_REGRESSED"


class StoreReplaced(StoreDistrusted):
    """Another store answers in place of the one that was written."""

    reason = "STORE_REPLACED"


class LeaseLost(Exception):
    """The lease has expired or was revoked; its keys are deleted."""


class StoreInUse(Exception):
    """Another process, or another store in this one, has the file open; the message names the file."""


@runtime_checkable
class Store(Protocol):
    """The contract of every adapter; one test suite checks all of them.

    All methods raise `StoreUnavailable` while the store is unavailable or once it is closed, except `watch`, which
    waits for it to return. Reads retry until their deadline; a transaction is never retried. Keys are text, not empty;
    an empty store is at revision 1.
    """

    async def get(self, key: str) -> Entry | None:
        """Read one key, linearizably."""

    async def list(self, prefix: str) -> Listing:
        """Read all keys with a prefix, at one revision, sorted by key."""

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Apply all operations if all comparisons hold, else none.

        A transaction that changes nothing raises no revision. Raises `ValueError` if a key is written twice, a key is
        empty, a value exceeds `VALUE_BYTES_MAX`, or the transaction is too large for the adapter's server (etcd: 128
        operations or comparisons and 1.5 MiB by default). Raises `LeaseLost` if the comparisons hold and a put names a
        lease that is gone. Nothing is applied then.
        """

    def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[Changes | Relisted]:
        """Yield what is committed under `prefix` after a revision, in order, each transaction exactly once.

        The iterator survives restarts of the store. If its position in history has been compacted it yields one
        `Relisted` and continues from there. It ends when the store or the iterator is closed.
        """

    async def grant(self, ttl_seconds: float) -> Lease:
        """Grant a lease, which the caller must renew with `keep_alive` before it expires.

        The lease has the granted time: a store may round up, and a restart of the store restarts it.
        """

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Restart the lease's time to live. Raises `LeaseLost` if it is gone.

        A remote store keeps renewing it for `for_seconds`, unless the lease is revoked or the store closed: for a
        caller that may be too busy to renew it in time.
        """

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease and delete its keys, at one revision. Revoking a lease that is gone is no error."""

    async def compact(self, revision: int) -> None:
        """Compact the history up to and including `revision`; present values stay.

        Compacting twice is no error; a revision in the future is a `ValueError`.
        """

    async def close(self) -> None:
        """End all watches and close the store. Closing twice is no error."""
