"""A time in office: the leadership key, and the revision at which it was last written by whoever leads.

Theory of operation. A service's leader is whoever wrote its leadership key last. The revision of that write is the
leader's term: it rises with every change of leaders, for a store's revisions do. Whatever a leader writes compares the
key's revision with its term, so that a leader that was replaced, however long it slept, writes nothing any more. A
leader that must be sure that nothing of its own is still under way writes the key once more: what it sent under the
old term is refused from then on.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from cotenant.store.port import Compare, Conflict, Entry, Lease, LeaseLost, NotLeader, Put, Store
from cotenant.v1 import records_pb2

SCHEMA_VERSION = 1
_PREDECESSOR = re.compile(rb"[0-9a-f]{16}")  # what versions without elections wrote: a name, under no lease


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads: the address at which it serves, and its term."""

    address: str
    identity: str
    term: int


def leader_of(entry: Entry) -> Leader | None:
    """Read a leadership key; None where it is the mark of a version that knew no elections, or no mark at all."""
    if _PREDECESSOR.fullmatch(entry.value):
        return None
    try:
        stored = records_pb2.StoredLeader.FromString(entry.value)
    except DecodeError:
        return None
    return Leader(stored.address, stored.identity, entry.mod_revision) if stored.identity else None


def new_identity() -> str:
    """Make a name that no other process has."""
    return secrets.token_hex(8)


class Tenure(Protocol):
    """What a leader knows of its office."""

    @property
    def identity(self) -> str:
        """The name of this office's holder, which no other has."""

    @property
    def fence(self) -> Compare:
        """What every transaction compares, so that it is refused once another leads."""

    @property
    def sure_until_seconds(self) -> float:
        """Until when, on the monotonic clock, nobody else can have been elected, as far as has been heard."""

    async def renew(self) -> int:
        """Begin a new term, and return it: whatever was sent under the old one is refused from now on.

        Raises:
            NotLeader: another process leads.
            StoreUnavailable: it is not known whether a new term has begun; the next call finds out.
        """

    def lose(self, why: str) -> None:
        """Note that another process was found to lead."""


class Held:
    """An office taken: the newest to write the key leads, and keeps it until another writes."""

    def __init__(self, store: Store, key: str, address: str = "", *, lease: Lease | None = None, term: int = 0) -> None:
        self.key, self.term = key, term
        self.identity = new_identity()
        self.lost = ""  # why, once it is
        self.over = asyncio.Event()
        self.lease = lease
        self.sure_until_seconds = 0.0 if lease else math.inf
        self._store = store
        self._value = records_pb2.StoredLeader(
            schema_version=SCHEMA_VERSION, address=address, identity=self.identity
        ).SerializeToString()

    def lasts(self, since_seconds: float) -> None:
        """Note that its lease's time began anew, at that time on the monotonic clock or later."""
        if self.lease:
            self.sure_until_seconds = since_seconds + self.lease.ttl_seconds

    @property
    def fence(self) -> Compare:
        """What every transaction compares."""
        return Compare(self.key, self.term)

    async def take(self, compares: Sequence[Compare]) -> bool:
        """Write the key where the comparisons hold; False where they do not."""
        try:
            result = await self._store.transact(
                compares, [Put(self.key, self._value, self.lease.id if self.lease else 0)]
            )
        except LeaseLost as error:
            raise NotLeader(f"the lease of {self.key} ran out") from error
        if isinstance(result, Conflict):
            return False
        self.term = result.revision
        return True

    async def renew(self) -> int:
        """Begin a new term; the first one is begun whoever led before, unless it was won in an election."""
        while not self.lost:
            if await self.take([self.fence] if self.term else []):
                return self.term
            entry = await self._store.get(self.key)
            leader = leader_of(entry) if entry else None
            if leader is None or leader.identity != self.identity:
                self.lose(f"the key {self.key} was taken after term {self.term}")
            else:
                self.term = leader.term  # our own, of which we never heard
        raise NotLeader(f"another process leads now: {self.lost}")

    def lose(self, why: str) -> None:
        """Note that another process was found to lead."""
        self.lost = self.lost or why
        self.over.set()
