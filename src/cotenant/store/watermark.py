"""The highest revisions that answers of a store have shown, and the condition that every write puts on them.

An answer to a linearizable request is never older than one that had come before the request was sent: one that is
shows that the store went back in time. And each write compares the revision of the progress key, which it also puts:
a store that lacks the last write of the mesh refuses the next one, so nothing is ever added to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.store.port import StoreRegressed

OPERATIONS_MAX = 127  # with the progress key etcd takes 128, unless told otherwise
COMPARES_MAX = 128


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

    def check(self, revision: int, since: int) -> None:
        """Take the revision of an answer in; `since` is what `revision` was when the request was sent.

        Raises:
            StoreRegressed: the answer is older than one before it.
        """
        if not self.armed:
            return
        if revision < since:
            raise StoreRegressed(f"the store is at revision {revision}; this process has seen revision {since}")
        self.revision = max(self.revision, revision)

    def set(self, revision: int, progress: int) -> None:
        """Begin to check, from a state that is believed."""
        self.revision, self.progress, self.armed = revision, progress, True

    def set_era(self, value: bytes, written: int) -> None:
        """Take in which era it is; every write compares that from now on."""
        self.era, self.era_written = value, written

    def written(self, revision: int) -> None:
        """Take in that the progress key was put at a revision."""
        self.progress = max(self.progress, revision)
