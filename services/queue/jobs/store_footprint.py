"""How many bytes of the store each tenant's jobs take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cotenant.services.queue.jobs.job_record import Record

KEYS_BYTES = 512  # of one job: its key, its request ids, its record in placement, and the store's overhead


def kept_bytes(record: Record) -> int:
    """Return how many bytes the store keeps for a job. Shared parts of large specs count for each job."""
    return len(record.packed) + KEYS_BYTES


class StoreFootprint:
    """Bytes by tenant: of stored jobs, and of jobs that are being created.

    Each job counts with the size of its last commit until it is deleted, so the sums always match the known jobs.
    """

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()
        self._counted: dict[str, tuple[int, int]] = {}  # by job: the revision at which it was counted, and its bytes

    def count(self, record: Record) -> None:
        """Count a job at its present size."""
        revision, before = self._counted.get(record.id, (-1, 0))
        if revision != record.revision:
            size = kept_bytes(record)
            self._counted[record.id] = record.revision, size
            self._kept[record.spec.tenant] += size - before

    def forget(self, record: Record) -> int:
        """Remove a job; return its size."""
        _, size = self._counted.pop(record.id, (0, 0))
        self._kept[record.spec.tenant] -= size
        if not self._kept[record.spec.tenant]:
            del self._kept[record.spec.tenant]
        return size

    def of(self, tenants: Iterable[str]) -> int:
        """Return the bytes of some tenants' jobs, including those being created."""
        return sum(self._kept[one] + self._reserved[one] for one in tenants)

    def by_tenant(self) -> dict[str, int]:
        """Return the bytes of each tenant's jobs."""
        return dict(self._kept)

    def reserve(self, tenant: str, size: int) -> None:
        """Count jobs that are being created."""
        self._reserved[tenant] += size

    def release(self, tenant: str, size: int) -> None:
        """Undo `reserve`: the jobs were created, or were not."""
        self._reserved[tenant] -= size
        if not self._reserved[tenant]:
            del self._reserved[tenant]
