"""A leadership term: the leader key and the revision of its last write, used as a fencing token.

Theory of operation. The leader of a service is the process that last wrote its leader key. The revision of that write
is the leader's term: store revisions only rise, so it rises with every change of leader. Every write by a leader
compares the key's revision with its term, so a replaced leader can write nothing, no matter how long it was paused. A
leader that must be sure that none of its own earlier writes is still in flight writes the key again: everything that it
sent under the old term is then rejected.
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

from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Compare, Conflict, Entry, Lease, LeaseLost, NotLeader, Put, Store

SCHEMA_VERSION = 1
_PREDECESSOR = re.compile(rb"[0-9a-f]{16}")  # written by versions without elections: a name, no lease


@dataclass(frozen=True, slots=True)
class Leader:
    """The leader of a service: the address at which it serves, and its term."""

    address: str
    identity: str
    term: int


def leader_of(entry: Entry) -> Leader | None:
    """Decode a leader key; return None for the mark of a version without elections, or for no valid mark."""
    if _PREDECESSOR.fullmatch(entry.value):
        return None
    try:
        stored = records_pb2.StoredLeader.FromString(entry.value)
    except DecodeError:
        return None
    return Leader(stored.address, stored.identity, entry.mod_revision) if stored.identity else None


def new_identity() -> str:
    """Return a name that no other process has."""
    return secrets.token_hex(8)


class LeadershipTerm(Protocol):
    """A leader's own view of its term."""

    @property
    def identity(self) -> str:
        """The unique name of the process that holds the term."""

    @property
    def fence(self) -> Compare:
        """The comparison in every transaction, which fails once another process leads."""

    @property
    def valid_until_seconds(self) -> float:
        """Until when, on the monotonic clock, no other process can have been elected, as far as is known."""

    async def renew(self) -> int:
        """Begin a new term and return it: everything sent under the old term is rejected from now on.

        Raises:
            NotLeader: another process leads.
            StoreUnavailable: it is unknown whether a new term began; the next call finds out.
        """

    def lose(self, why: str) -> None:
        """Record that another process leads."""


class HeldTerm:
    """A term that this process holds: the last writer of the key leads until another process writes it."""

    def __init__(self, store: Store, key: str, address: str = "", *, lease: Lease | None = None, term: int = 0) -> None:
        self.key, self.term = key, term
        self.identity = new_identity()
        self.lost = ""  # the reason, once it is lost
        self.over = asyncio.Event()
        self.lease = lease
        self.valid_until_seconds = 0.0 if lease else math.inf
        self._store = store
        self._value = records_pb2.StoredLeader(
            schema_version=SCHEMA_VERSION, address=address, identity=self.identity
        ).SerializeToString()

    def extend(self, since_seconds: float) -> None:
        """Record that the lease was renewed at `since_seconds` on the monotonic clock, or later."""
        if self.lease:
            self.valid_until_seconds = since_seconds + self.lease.ttl_seconds

    @property
    def fence(self) -> Compare:
        """The comparison in every transaction."""
        return Compare(self.key, self.term)

    async def take(self, compares: Sequence[Compare]) -> bool:
        """Write the key if the comparisons hold; return whether they did."""
        try:
            result = await self._store.transact(
                compares, [Put(self.key, self._value, self.lease.id if self.lease else 0)]
            )
        except LeaseLost as error:
            raise NotLeader(f"the lease of {self.key} expired") from error
        if isinstance(result, Conflict):
            return False
        self.term = result.revision
        return True

    async def renew(self) -> int:
        """Begin a new term. The first one ignores the previous leader, unless it was won in an election."""
        while not self.lost:
            if await self.take([self.fence] if self.term else []):
                return self.term
            entry = await self._store.get(self.key)
            leader = leader_of(entry) if entry else None
            if leader is None or leader.identity != self.identity:
                self.lose(f"the key {self.key} was taken by another process after term {self.term}")
            else:
                self.term = leader.term  # our own write, whose answer was lost
        raise NotLeader(f"another process leads now: {self.lost}")

    def lose(self, why: str) -> None:
        """Record that another process leads."""
        self.lost = self.lost or why
        self.over.set()
