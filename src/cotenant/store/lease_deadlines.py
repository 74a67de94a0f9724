"""Deadlines of leases. They are not persisted: after a restart each lease has its full time to live again."""

from __future__ import annotations

from collections.abc import Callable, Collection

from cotenant.store.port import Lease


class LeaseDeadlines:
    """The live leases and their deadlines.

    >>> clock = iter([0.0, 4.0, 6.0]).__next__
    >>> deadlines = LeaseDeadlines(clock)
    >>> deadlines.start(Lease(7, ttl_seconds=5.0))
    >>> deadlines.take_over()
    []
    >>> deadlines.take_over()
    [Lease(id=7, ttl_seconds=5.0)]
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._at: dict[int, tuple[float, Lease]] = {}

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._at

    def start(self, lease: Lease) -> None:
        """Start a lease's full time to live."""
        self._at[lease.id] = (self._now() + lease.ttl_seconds, lease)

    def drop(self, lease_ids: Collection[int]) -> None:
        """Remove leases that ended for another reason."""
        for lease_id in lease_ids:
            self._at.pop(lease_id, None)

    def take_over(self) -> list[Lease]:
        """Remove and return the expired leases, the lowest ID first."""
        now = self._now()
        over = [lease for _, (at, lease) in sorted(self._at.items()) if at <= now]
        self.drop([lease.id for lease in over])
        return over

    def seconds_to_next(self) -> float | None:
        """Return how long until the next lease expires, or None if there is none."""
        if not self._at:
            return None
        return max(0.0, min(at for at, _ in self._at.values()) - self._now())
