"""The one port through which state is kept: keys, revisions, transactions, watches, leases.

The model is etcd's, for it is the one that makes fencing possible: the store has one revision, which every
committed transaction that writes anything raises by exactly 1; each key remembers the revision that made it and the
one that changed it last. A transaction compares such revisions and then writes all or nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

VALUE_BYTES_MAX = 1024 * 1024  # of one value; what is larger does not belong in the store


@dataclass(frozen=True, slots=True)
class Entry:
    """A key as it is at some revision."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries under a prefix, by key, and the store's revision at which that was so."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds while the key was last changed at `mod_revision`; 0 holds while there is no such key."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value. A key put under a lease goes when the lease does."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; removing what is not there is no error and, alone, raises no revision."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Committed:
    """All comparisons held and all operations were done, at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A comparison failed and nothing was done; the store is at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Change:
    """A key was put, or deleted where `value` is None."""

    key: str
    value: bytes | None
    mod_revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What one transaction changed under a watched prefix."""

    revision: int
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Relisted:
    """The history that a watch asked for has been compacted away: this is the whole prefix instead."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-limited promise to which keys may be bound."""

    id: int
    ttl_seconds: float


class StoreUnavailable(Exception):
    """The store did not answer. Whether a transaction under way was committed is unknown."""


class StoreFull(StoreUnavailable):
    """The store has no space left: nothing was written. It goes on by itself once there is space."""


class Unanswered(StoreUnavailable):
    """A transaction was lost on its way, or its answer was; the store is there, so that the next call is answered."""


class NotLeader(StoreUnavailable):
    """Another process leads what this one wanted to change, or nobody does yet. Nothing was done.

    To whoever wrote under the old leadership the store is away for good.
    """


class StoreDistrusted(StoreUnavailable):
    """The store is not the one that was written: nothing is written there before an operator has decided."""

    reason = "STORE_DISTRUSTED"
    remedy = "put the right data back, or run `cotenant store accept-regression`, which lists what is lost and asks"


class StoreRegressed(StoreDistrusted):
    """The store went back in time: it lacks what was acknowledged."""

    reason = "STORE_REGRESSED"


class StoreReplaced(StoreDistrusted):
    """Another store answers in place of the one that was written."""

    reason = "STORE_REPLACED"


class LeaseLost(Exception):
    """The lease has run out or was revoked; its keys are gone."""


class StoreInUse(Exception):
    """Another process, or another store in this one, has the file open; the message names it."""


@runtime_checkable
class Store(Protocol):
    """What every adapter promises; one suite holds all of them to it.

    All methods raise `StoreUnavailable` while the store is away or once it is closed, except `watch`, which waits for
    it to return. Reads repeat themselves until then or until their deadline; a transaction is never repeated.
    Keys are text, not empty; a store that holds nothing is at revision 1.
    """

    async def get(self, key: str) -> Entry | None:
        """Read one key, linearizably."""

    async def list(self, prefix: str) -> Listing:
        """Read all keys that begin with `prefix`, at one revision, sorted by key."""

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Committed | Conflict:
        """Do all operations if all comparisons hold, else nothing.

        What changes nothing raises no revision. `ValueError` where a key is written twice, a key is empty, a value is
        above `VALUE_BYTES_MAX`, or the adapter's server takes no transaction so large (etcd: 128 operations or
        comparisons and 1.5 MiB, unless told otherwise). `LeaseLost` where the comparisons hold and a put names a lease
        that is gone. Nothing is done then.
        """

    def watch(self, prefix: str, *, after_revision: int) -> AsyncIterator[Changes | Relisted]:
        """Yield what is committed under `prefix` after a revision, in order, each transaction exactly once.

        The iterator goes on through restarts of the store. Where its place in history has been compacted away it
        yields one `Relisted` and goes on from there. It ends when the store is closed or the iterator is.
        """

    async def grant(self, ttl_seconds: float) -> Lease:
        """Make a lease, which the caller must `keep_alive` before its time is over.

        The lease says what time it was given: a store may round up, and a restart of it starts the time anew.
        """

    async def keep_alive(self, lease: Lease, *, for_seconds: float = 0.0) -> None:
        """Start the lease's time anew. Raises `LeaseLost` where it is gone.

        A store on other machines goes on doing so by itself `for_seconds`, unless the lease is revoked or the store
        closed: for a caller that may be too busy to come again in time.
        """

    async def revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys, at one revision. Revoking a lease that is gone is no error."""

    async def compact(self, revision: int) -> None:
        """Forget the history up to and including `revision`; present values stay.

        What is forgotten already is no error; a revision that is not reached yet is a `ValueError`.
        """

    async def close(self) -> None:
        """End all watches and let go of the store. Closing twice is no error."""
