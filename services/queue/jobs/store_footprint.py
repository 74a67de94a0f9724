"""How many bytes of the store each tenant's jobs take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cotenant.services.queue.jobs.job_record import Record

KEYS_BYTES = 512  # of one job: its key, its request ids, its record in placement, and what a store adds to them


def kept_bytes(record: Record) -> int:
    """Return what the store keeps of a job. Large parts of a spec count for each job that has them."""
    return len(record.packed) + KEYS_BYTES


class Footprint:
    """Bytes by tenant: those of jobs that are there, and of those that are being taken in.

    Each job is counted by what was last committed of it, and is forgotten with it, so that the sums are always those of
    the jobs that are known.
    """

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._coming: Counter[str] = Counter()
        self._counted: dict[str, tuple[int, int]] = {}  # by job: the revision at which it was counted, and its bytes

    def count(self, record: Record) -> None:
        """Count a job as it is now."""
        revision, before = self._counted.get(record.id, (-1, 0))
        if revision != record.revision:
            size = kept_bytes(record)
            self._counted[record.id] = record.revision, size
            self._kept[record.spec.tenant] += size - before

    def forget(self, record: Record) -> int:
        """Count a job no more; return what it took."""
        _, size = self._counted.pop(record.id, (0, 0))
        self._kept[record.spec.tenant] -= size
        if not self._kept[record.spec.tenant]:
            del self._kept[record.spec.tenant]
        return size

    def of(self, tenants: Iterable[str]) -> int:
        """Return what some tenants' jobs take, with those that are being taken in."""
        return sum(self._kept[one] + self._coming[one] for one in tenants)

    def by_tenant(self) -> dict[str, int]:
        """Return what each tenant's jobs take."""
        return dict(self._kept)

    def expect(self, tenant: str, size: int) -> None:
        """Count jobs that are being taken in."""
        self._coming[tenant] += size

    def expect_no_more(self, tenant: str, size: int) -> None:
        """They were taken in, or were not."""
        self._coming[tenant] -= size
        if not self._coming[tenant]:
            del self._coming[tenant]
