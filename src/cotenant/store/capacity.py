"""How full a store is, and when it stops accepting new jobs.

A store without free space refuses every write: no job can end, be cancelled or be deleted. So new jobs are refused well
before that, and the remaining space is for the existing jobs.

etcd compares the size of its database file with its quota. The file does not shrink when keys are deleted or history is
compacted: unused pages are fragmentation, which only defragmenting a member releases. An SQLite file is limited by the
free space of its file system, which other programs use as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

ADMIT_SHARE_MAX = 0.8  # of an etcd's quota: beyond it no new job is admitted
PRESSED_SHARE = 0.5  # beyond it history is compacted sooner, and files are defragmented
FRAGMENTED_SHARE = 0.2  # of a file: beyond it defragmenting is worthwhile while space is short
QUOTA_BYTES_DEFAULT = 2 * 1024**3  # etcd's own
RESERVE_BYTES_DEFAULT = 128 * 1024**2
RESERVE_SHARE_MAX = 0.1  # of a file system: a small one has a smaller reserve
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """An operator's limits of a store. A quota of 0 is read from etcd, or else is etcd's default."""

    quota_bytes: int = 0
    reserve_bytes: int = RESERVE_BYTES_DEFAULT


NO_LIMITS = StoreLimits()


@dataclass(frozen=True, slots=True)
class Capacity:
    """How full a store is, in bytes. `admits_below_bytes` is the size from which on new jobs are refused."""

    size_bytes: int
    in_use_bytes: int  # of the size; the rest is fragmentation
    limit_bytes: int
    admits_below_bytes: int
    limited_by: str  # such as "etcd's quota"
    full: str = ""  # why nothing can be written now, "" if it can
    revision: int = 0  # the newest, in the store's own count
    endpoints: tuple[str, ...] = ()  # URLs of an etcd's members
    flags: tuple[str, ...] = ()  # with which etcdctl reaches them
    path: str = ""  # of a store that is a file

    @property
    def pressed(self) -> bool:
        """Whether space is so short that it should be freed early."""
        return bool(self.full) or self.size_bytes > PRESSED_SHARE * self.limit_bytes

    @property
    def fragmented_bytes(self) -> int:
        """The bytes that defragmenting would release, if that is worthwhile; else 0."""
        loose = self.size_bytes - self.in_use_bytes
        return loose if loose >= FRAGMENTED_SHARE * self.size_bytes else 0

    def why_stopped(self, more_bytes: int = 0) -> str:
        """Return why no job that needs `more_bytes` is admitted; "" if one is.

        >>> etcd_capacity(3 * MIB, 3 * MIB, 4 * MIB).why_stopped()
        ''
        >>> print(etcd_capacity(3 * MIB, 1 * MIB, 4 * MIB).why_stopped(MIB).replace("; ", ";\\n"))
        the store has 3.0 of 4.0 MiB of etcd's quota in use, 2.0 MiB of it fragmented;
        new jobs are admitted below 3.2 MiB
        """
        if self.full:
            return f"the store is full: {self.full}"
        if self.size_bytes + more_bytes < self.admits_below_bytes:
            return ""
        loose = f", {self.fragmented_bytes / MIB:.1f} MiB of it fragmented" if self.fragmented_bytes else ""
        return (
            f"the store has {self.size_bytes / MIB:.1f} of {self.limit_bytes / MIB:.1f} MiB of {self.limited_by} in use"
            f"{loose}; new jobs are admitted below {self.admits_below_bytes / MIB:.1f} MiB"
        )


@runtime_checkable
class HasCapacity(Protocol):
    """A store that knows how full it is."""

    async def capacity(self) -> Capacity | None:
        """Return how full it is; None if it has no limit. Raises `StoreUnavailable`."""


async def capacity_of(store: object) -> Capacity | None:
    """Return how full a store is; None if it has no limit or does not know."""
    return await store.capacity() if isinstance(store, HasCapacity) else None


def etcd_capacity(size_bytes: int, in_use_bytes: int, quota_bytes: int, full: str = "") -> Capacity:
    """Return the capacity of an etcd cluster, by its largest member."""
    admits_below = int(ADMIT_SHARE_MAX * quota_bytes)
    return Capacity(size_bytes, in_use_bytes, quota_bytes, admits_below, "etcd's quota", full)


def disk_capacity(
    size_bytes: int, free_bytes: int, total_bytes: int, reserve_bytes: int, path: str, full: str = ""
) -> Capacity:
    """Return the capacity of a file on a file system with a reserve.

    >>> disk_capacity(10 * MIB, 50 * MIB, 1000 * MIB, 128 * MIB, "/var/x").why_stopped()
    'only 50.0 MiB are free on the file system of /var/x; new jobs are admitted above 100.0 MiB'
    """
    limit = size_bytes + free_bytes
    reserve = effective_reserve(reserve_bytes, total_bytes)
    return _DiskCapacity(size_bytes, size_bytes, limit, limit - reserve, "its file system", full, path=path)


def effective_reserve(reserve_bytes: int, total_bytes: int) -> int:
    """Return how many bytes of a file system are reserved: as configured, but at most a tenth of it."""
    return min(reserve_bytes, int(RESERVE_SHARE_MAX * total_bytes))


class _DiskCapacity(Capacity):
    __slots__ = ()

    @property
    def pressed(self) -> bool:
        """Whether the reserve has been entered."""
        return bool(self.full) or self.size_bytes >= self.admits_below_bytes

    def why_stopped(self, more_bytes: int = 0) -> str:
        """Return why no job that needs `more_bytes` is admitted; "" if one is."""
        if self.full:
            return f"the store is full: {self.full}"
        if self.size_bytes + more_bytes < self.admits_below_bytes:
            return ""
        free, reserve = self.limit_bytes - self.size_bytes, self.limit_bytes - self.admits_below_bytes
        return (
            f"only {free / MIB:.1f} MiB are free on the file system of {self.path}; "
            f"new jobs are admitted above {reserve / MIB:.1f} MiB"
        )
