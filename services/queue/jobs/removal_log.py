"""The removal log: which jobs were deleted at which revision, so that a resumed watch can be told.

A batch of removals is written in the transaction that deletes the jobs. The newest batches are kept. Each carries the
floor: the revision of the newest batch that was dropped. A watch that resumes at the floor or before could miss a
removal, and is refused.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cotenant.services.queue.jobs.transitions import SCHEMA_VERSION
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Delete, Entry, Operation, Put

REMOVALS = "queue/removals/"
KEPT_MAX = 10_000  # jobs
DROPPED_AT_ONCE_MAX = 8  # batches: etcd accepts 128 operations per transaction, most of which delete jobs

Removal = tuple[str, str]  # a job and its tenant


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """Jobs that were deleted together; `number` orders batches."""

    number: int
    revision: int
    removed: Sequence[Removal]
    floor: int


class RemovalLog:
    """The batches in the store, as far as they are known to be there."""

    def __init__(self, kept_max: int = KEPT_MAX) -> None:
        self.floor = 0
        self._batches: list[Batch] = []
        self._kept_max = kept_max
        self._next = 1

    def load(self, entries: Iterable[Entry]) -> None:
        """Read all batches.

        Raises:
            NewerSchema: a newer version wrote one of them.
            BadRecord: one of them is damaged.
        """
        for entry in entries:
            self.add(read_batch(entry))

    def begin(self, removed: Sequence[Removal]) -> tuple[Batch, list[Operation]]:
        """Return a batch without its revision, and the operations that write it and drop the oldest ones."""
        left = sum(len(batch.removed) for batch in self._batches) + len(removed)
        dropped: list[Batch] = []
        for batch in self._batches[:DROPPED_AT_ONCE_MAX]:
            if left <= self._kept_max:
                break
            dropped.append(batch)
            left -= len(batch.removed)
        floor = max([self.floor, *(batch.revision for batch in dropped)])
        batch = Batch(self._next, 0, tuple(removed), floor)
        self._next += 1
        stored = records_pb2.StoredRemovals(schema_version=SCHEMA_VERSION, floor=floor)
        for job_id, tenant in removed:
            stored.jobs.add(id=job_id, tenant=tenant)
        drops = [Delete(_key(one.number)) for one in dropped]
        return batch, [Put(_key(batch.number), stored.SerializeToString()), *drops]

    def add(self, batch: Batch) -> None:
        """Add a batch that is committed; those up to its floor are dropped."""
        self._next = max(self._next, batch.number + 1)
        self.floor = max(self.floor, batch.floor)
        if all(batch.number != known.number for known in self._batches):
            insort(self._batches, batch)
        self._batches = [one for one in self._batches if one.revision > self.floor]

    def since(self, revision: int) -> Iterator[Removal]:
        """Yield what was removed after a revision, in order."""
        for batch in self._batches:
            if batch.revision > revision:
                yield from batch.removed


def key_of(batch: Batch) -> str:
    """Return the key of a batch in the store."""
    return _key(batch.number)


def _key(number: int) -> str:
    return f"{REMOVALS}{number:016d}"


def read_batch(entry: Entry) -> Batch:
    """Return a batch from the store.

    Raises:
        NewerSchema: a newer version wrote it.
        BadRecord: it is damaged.
    """
    stored = schema.read(records_pb2.StoredRemovals, entry)
    with schema.reading(entry):
        number = int(entry.key.removeprefix(REMOVALS))
        if not 0 <= stored.floor < entry.mod_revision:
            raise ValueError(f"its floor is {stored.floor}")
    return Batch(number, entry.mod_revision, tuple((one.id, one.tenant) for one in stored.jobs), stored.floor)
