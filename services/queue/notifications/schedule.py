"""Which notification is tried next: back-off, rates and concurrency. No IO and no clock.

A receiver that is slow or fails holds at most its own places: messages to other hosts overtake those to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cotenant.core.model.notification import Due, host_of, retry_seconds

AT_ONCE_MAX = 16
OF_HOST_MAX = 2
OF_TENANT_MAX = 8
BURST = 20
RATES_KEPT_MAX = 10_000


@dataclass(slots=True, eq=False)
class Message:
    """A notification that is due, about a job or an array."""

    about: str
    tenant: str
    due: Due
    target: str
    tries: int = 0
    not_before: float = 0.0

    @property
    def id(self) -> str:
        """The same at each try and for each target, so that receivers can drop repeats.

        >>> from cotenant.core.model.notification import Trigger
        >>> Message("0t6czcnzd6ed", "vision", Due(Trigger.FAILED, 0.0, 1), "https://example.org").id
        '0t6czcnzd6ed.failed'
        """
        return f"{self.about}.{self.due.trigger}"

    @property
    def host(self) -> str:
        """The only part of the target that is ever shown."""
        return host_of(self.target)


class RateLimit:
    """At most so many per minute for each key, after a burst."""

    def __init__(self, per_minute: int, burst: int = BURST) -> None:
        self._interval = 60.0 / per_minute
        self._ahead = self._interval * burst
        self._next: dict[str, float] = {}

    def free_at(self, key: str) -> float:
        """Return the earliest time of the next one."""
        return self._next.get(key, 0.0) - self._ahead

    def count(self, key: str, now: float) -> None:
        """Count one."""
        self._next[key] = max(now, self._next.get(key, 0.0)) + self._interval
        if len(self._next) > RATES_KEPT_MAX:
            self._next = {one: at for one, at in self._next.items() if at > now}


class Schedule:
    """The pending notifications, in the order in which they became due."""

    def __init__(self, per_minute: int, pending_max: int) -> None:
        self._pending: dict[tuple[str, str], Message] = {}
        self._in_flight: set[tuple[str, str]] = set()
        self._of_tenant: Counter[str] = Counter()  # pending
        self._places: Counter[str] = Counter()  # in flight, by `host HOST` and `tenant ID`
        self._rate, self._pending_max = RateLimit(per_minute), pending_max

    def __len__(self) -> int:
        """The number of pending notifications."""
        return len(self._pending)

    def knows(self, message: Message) -> bool:
        """Return whether a notification is pending."""
        return (message.about, message.due.key) in self._pending

    def add(self, message: Message) -> bool:
        """Add a notification; False if its tenant has too many pending ones."""
        if self._of_tenant[message.tenant] >= self._pending_max:
            return False
        self._pending[message.about, message.due.key] = message
        self._of_tenant[message.tenant] += 1
        return True

    def take(self, now: float) -> Message | None:
        """Return the next notification to try now, which is in flight then; None if there is none."""
        if len(self._in_flight) >= AT_ONCE_MAX:
            return None
        for key, message in self._pending.items():
            if key not in self._in_flight and self._has_place(message) and self._free_at(message) <= now:
                self._in_flight.add(key)
                for name in _keys(message):
                    self._places[name] += 1
                    self._rate.count(name, now)
                return message
        return None

    def wake_at(self) -> float | None:
        """Return when to call `take` again if nothing is added and nothing comes back; None if there is no need."""
        return min(
            (self._free_at(message) for key, message in self._pending.items() if key not in self._in_flight),
            default=None,
        )

    def retry(self, message: Message, now: float, draw: float) -> None:
        """Take back a notification whose try has failed."""
        self._land(message)
        message.tries += 1
        message.not_before = now + retry_seconds(message.tries, draw)

    def finish(self, message: Message) -> None:
        """Remove a notification that was sent or given up."""
        self._land(message)
        if self._pending.pop((message.about, message.due.key), None):
            self._of_tenant[message.tenant] -= 1
            if not self._of_tenant[message.tenant]:
                del self._of_tenant[message.tenant]

    def _land(self, message: Message) -> None:
        key = (message.about, message.due.key)
        if key in self._in_flight:
            self._in_flight.remove(key)
            self._places.subtract(_keys(message))
            self._places = +self._places

    def _has_place(self, message: Message) -> bool:
        host, tenant = _keys(message)
        return self._places[host] < OF_HOST_MAX and self._places[tenant] < OF_TENANT_MAX

    def _free_at(self, message: Message) -> float:
        return max(message.not_before, *(self._rate.free_at(name) for name in _keys(message)))


def _keys(message: Message) -> tuple[str, str]:
    return f"host {message.host}", f"tenant {message.tenant}"
