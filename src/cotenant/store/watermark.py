"""The highest revisions that answers of a store have shown, and the condition that every write puts on them.

An answer to a linearizable request is never older than one that had come before the request was sent: one that is
shows that the store went back in time. And each write compares the revision of the progress key, which it also puts:
a store that lacks the last write of the mesh refuses the next one, so nothing is ever added to it.

Requests overlap, so an answer is judged by what was known when its request was sent (`Sent`), not by what is known when
the answer arrives. An answer that was requested before the store was last distrusted or trusted again proves nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cotenant.store.port import StoreRegressed, StoreUnavailable

OPERATIONS_MAX = 127  # with the progress key etcd takes 128, unless told otherwise
COMPARES_MAX = 128


@dataclass(frozen=True, slots=True)
class Sent:
    """What was known of the store when a request was sent. A revision of 0 was not known, or is not compared."""

    turn: int
    since: int  # the highest revision
    progress: int = 0  # the revision of the last write of the mesh
    era: bytes = b""
    era_written: int = 0
    puts: bool = False  # the request puts the progress key


@dataclass(slots=True)
class Watermark:
    """What was seen of one store, in its own revisions. Nothing is checked while it is not `armed`."""

    progress_key: str
    revision: int = 0
    progress: int = 0  # the revision at which the progress key was changed last
    armed: bool = False
    era_key: str = ""
    era: bytes = b""  # what the era key held when it was read last, and the revision at which it was written
    era_written: int = 0
    proven: tuple[bytes, int] = (b"", 0)  # a value of the era key, and a revision that is of this era
    turn: int = 0  # how often the store was distrusted or trusted again
    on_new_era: Callable[[int], Awaitable[None]] | None = None  # judges the store whose era began at this revision

    def sent(self) -> Sent:
        """Return what is known now, for a request that is about to be sent."""
        return Sent(self.turn, self.revision)

    def check(self, revision: int, sent: Sent) -> None:
        """Take the revision of an answer in.

        Raises:
            StoreRegressed: the answer is older than one before its request.
            StoreUnavailable: the store was distrusted or trusted again in between.
        """
        if sent.turn != self.turn:
            raise StoreUnavailable("the store was judged again while a request was under way; its outcome is unknown")
        if not self.armed:
            return
        if revision < sent.since:
            raise StoreRegressed(f"the store is at revision {revision}; this process has seen revision {sent.since}")
        self.revision = max(self.revision, revision)

    def set(self, revision: int, progress: int, era: bytes, era_written: int) -> None:
        """Begin to check, from a state that is believed."""
        self.turn += 1
        self.revision, self.progress, self.armed = revision, progress, True
        self.era, self.era_written = era, era_written
        self.proven = (era, progress) if era else (b"", 0)

    def advance(self, revision: int, progress: int, era: bytes, era_written: int) -> None:
        """Take in a later state that is believed; every write compares it from now on."""
        self.revision, self.progress = max(self.revision, revision), max(self.progress, progress)
        if era_written > self.era_written:
            self.era, self.era_written = era, era_written
        if era and era_written == self.era_written and progress > self.proven[1]:
            self.proven = (era, progress)

    def disarm(self) -> None:
        """Check nothing more: the store is distrusted."""
        self.turn += 1
        self.armed = False

    def begun(self, era: bytes, revision: int) -> None:
        """Take in that this process began an era."""
        if revision > self.era_written:
            self.era, self.era_written = era, revision
        if revision > self.proven[1]:
            self.proven = (era, revision)

    def written(self, revision: int, sent: Sent) -> None:
        """Take in that a request put the progress key at a revision."""
        self.progress = max(self.progress, revision)
        if sent.era and revision > self.proven[1]:
            self.proven = (sent.era, revision)
