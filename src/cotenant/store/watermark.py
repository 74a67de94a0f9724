"""The highest revisions seen in responses of a store, and the conditions that every write derives from them.

A response to a linearizable request is never older than one that arrived before the request was sent: if it is, the
store has regressed. And each write compares the revision of the progress key, which it also writes: a store that lacks
the last write of the mesh rejects the next one, so nothing is ever added to it.

Requests overlap, so a response is checked against what was known when its request was sent (`Sent`), not when the
response arrives. A response to a request from before the store was last distrusted or trusted again proves nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cotenant.store.port import StoreRegressed, StoreUnavailable

OPERATIONS_MAX = 127  # with the progress key 128, etcd's default limit
COMPARES_MAX = 128


@dataclass(frozen=True, slots=True)
class Sent:
    """What was known of the store when a request was sent. A revision of 0 is unknown, or is not compared."""

    turn: int
    since: int  # the highest revision
    progress: int = 0  # the revision of the last write of the mesh
    era: bytes = b""
    era_written: int = 0
    puts: bool = False  # the request writes the progress key


@dataclass(slots=True)
class Watermark:
    """What was seen of one store, in its own revisions. Nothing is checked unless it is `armed`."""

    progress_key: str
    revision: int = 0
    progress: int = 0  # the revision of the last change of the progress key
    armed: bool = False
    era_key: str = ""
    era: bytes = b""  # the value of the era key when last read, and its revision
    era_written: int = 0
    proven: tuple[bytes, int] = (b"", 0)  # a value of the era key, and a revision in this era
    turn: int = 0  # how often the store was distrusted or trusted again
    on_new_era: Callable[[int], Awaitable[None]] | None = None  # checks a store whose era began at this revision

    def sent(self) -> Sent:
        """Return what is known now, for a request that is about to be sent."""
        return Sent(self.turn, self.revision)

    def check(self, revision: int, sent: Sent) -> None:
        """Record the revision of a response.

        Raises:
            StoreRegressed: the response is older than one before its request.
            StoreUnavailable: the store was distrusted or trusted again in between.
        """
        if sent.turn != self.turn:
            raise StoreUnavailable("the store was checked again during a request; its outcome is unknown")
        if not self.armed:
            return
        if revision < sent.since:
            raise StoreRegressed(f"the store is at revision {revision}; this process has seen revision {sent.since}")
        self.revision = max(self.revision, revision)

    def set(self, revision: int, progress: int, era: bytes, era_written: int) -> None:
        """Start checking, from a trusted state."""
        self.turn += 1
        self.revision, self.progress, self.armed = revision, progress, True
        self.era, self.era_written = era, era_written
        self.proven = (era, progress) if era else (b"", 0)

    def advance(self, revision: int, progress: int, era: bytes, era_written: int) -> None:
        """Record a later trusted state; every write compares it from now on."""
        self.revision, self.progress = max(self.revision, revision), max(self.progress, progress)
        if era_written > self.era_written:
            self.era, self.era_written = era, era_written
        if era and era_written == self.era_written and progress > self.proven[1]:
            self.proven = (era, progress)

    def disarm(self) -> None:
        """Stop checking: the store is distrusted."""
        self.turn += 1
        self.armed = False

    def begun(self, era: bytes, revision: int) -> None:
        """Record that this process began an era."""
        if revision > self.era_written:
            self.era, self.era_written = era, revision
        if revision > self.proven[1]:
            self.proven = (era, revision)

    def written(self, revision: int, sent: Sent) -> None:
        """Record that a request wrote the progress key at a revision."""
        self.progress = max(self.progress, revision)
        if sent.era and revision > self.proven[1]:
            self.proven = (sent.era, revision)
