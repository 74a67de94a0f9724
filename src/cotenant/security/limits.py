"""Limits per caller: calls per second, processing time, open streams; and concurrent calls of all callers.

Operators, agents and services are not limited: their work is bounded elsewhere, and a mesh that refuses its own calls
helps nobody. A forwarded call was counted where it arrived; its processing time is charged where it is served.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cotenant.codec import errors
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role

CALLERS_KEPT_MAX = 10_000
TOO_MANY_CALLS = "TOO_MANY_CALLS"
TOO_MUCH_PROCESSING = "TOO_MUCH_PROCESSING"
TOO_MANY_CONCURRENT = "TOO_MANY_CALLS_AT_ONCE"
WAIT_SECONDS_MIN = 0.1
UNCOUNTED = frozenset({Role.OPERATOR, Role.AGENT, Role.SERVICE})


@dataclass(frozen=True, slots=True)
class LimitRules:
    """The limits; 0 means no limit.

    `calls_per_second` is each user's long-term rate, `calls_at_once` the size of a burst, and `streams` how many
    watches and logs a user may hold open. `processing_seconds` is how many seconds of CPU time a user's calls may use
    in a burst of a process, `processing_per_second` how many become available again each second.
    """

    calls_per_second: float = 50.0
    calls_at_once: int = 500
    streams: int = 100
    processing_per_second: float = 0.25
    processing_seconds: float = 30.0


LIMITS = LimitRules()


class Buckets:
    """Token buckets by caller (RFC 2697's committed rate); the least recently used are dropped, as they are full."""

    def __init__(self, rate: float, most: float, now: Callable[[], float]) -> None:
        self.rate, self._most, self._now = rate, most, now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and at what time

    def left(self, name: str) -> float:
        """Return how many tokens a caller has left; negative if it was charged for more than it had."""
        left, since = self._left.get(name, (self._most, self._now()))
        return min(self._most, left + (self._now() - since) * self.rate)

    def take(self, name: str, count: float) -> None:
        """Take tokens; the balance may become negative."""
        left = self.left(name)
        self._left.pop(name, None)
        self._left[name] = left - count, self._now()
        if len(self._left) > CALLERS_KEPT_MAX:
            self._left.popitem(last=False)


class Limits:
    """Counts what each user consumes: token buckets for calls and for processing time, and a stream counter.

    >>> limits, eve = Limits(LimitRules(1, 2, 1), now=lambda: 0.0), Identity("eve", frozenset({Role.USER}))
    >>> limits.take(eve), limits.take(eve)
    (None, None)
    >>> limits.take(eve)
    Traceback (most recent call last):
    cotenant.codec.errors.Problem: eve makes more than 1 calls per second; try again in 1.0 s
    """

    def __init__(self, rules: LimitRules = LIMITS, now: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._calls = Buckets(rules.calls_per_second, float(rules.calls_at_once), now)
        self._processing = Buckets(rules.processing_per_second, rules.processing_seconds, now)
        self._streams: dict[str, int] = {}

    def take(self, identity: Identity) -> None:
        """Count a call.

        Raises:
            Problem: RESOURCE_EXHAUSTED, with a retry delay.
        """
        rate, name = self._calls.rate, identity.name
        if not rate or identity.via or not UNCOUNTED.isdisjoint(identity.roles):
            return
        left = self._calls.left(name)
        if left >= 1:
            self._calls.take(name, 1)
            return
        wait = (1 - left) / rate
        message = f"{name} makes more than {rate:g} calls per second; try again in {wait:.1f} s"
        raise errors.exhausted(TOO_MANY_CALLS, message, wait, limit=f"{rate:g}")

    def check_processing(self, identity: Identity) -> None:
        """Reject a caller whose calls have used up its processing time.

        Raises:
            Problem: RESOURCE_EXHAUSTED, with a retry delay.
        """
        rate, name = self._processing.rate, identity.name
        if not rate or not UNCOUNTED.isdisjoint(identity.roles) or (left := self._processing.left(name)) > 0:
            return
        wait = max(WAIT_SECONDS_MIN, -left / rate)
        message = f"calls of {name} take more than {rate:g} s of processing per second; try again in {wait:.1f} s"
        raise errors.exhausted(TOO_MUCH_PROCESSING, message, wait, limit=f"{rate:g}")

    def charge(self, identity: Identity, cpu_seconds: float) -> None:
        """Charge a caller for the processing time of a call."""
        if self._processing.rate and UNCOUNTED.isdisjoint(identity.roles):
            self._processing.take(identity.name, cpu_seconds)

    @contextmanager
    def stream(self, identity: Identity) -> Iterator[None]:
        """Count a stream for as long as it is open.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        most, name = self._rules.streams, identity.name
        if not most or identity.via or not UNCOUNTED.isdisjoint(identity.roles):
            yield
            return
        if self._streams.get(name, 0) >= most:
            raise errors.exhausted(
                "TOO_MANY_STREAMS", f"{name} has {most} streams open; end one of them first", 1.0, limit=str(most)
            )
        self._streams[name] = self._streams.get(name, 0) + 1
        try:
            yield
        finally:
            self._streams[name] -= 1
            if not self._streams[name]:
                del self._streams[name]


class CallsAtOnce:
    """Limits the number of calls in progress on a server, over all callers.

    gRPC's own `maximum_concurrent_rpcs` decrements its count for a rejected call once too often: after each rejection
    one more call is admitted.

    >>> calls = CallsAtOnce(1)
    >>> with calls.hold():
    ...     with calls.hold():
    ...         pass
    Traceback (most recent call last):
    cotenant.codec.errors.Problem: this server is at its limit of 1 concurrent calls
    >>> calls.count
    0
    """

    def __init__(self, most: int) -> None:
        self._most, self.count = most, 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count a call for as long as it is in progress.

        Raises:
            Problem: RESOURCE_EXHAUSTED.
        """
        if self.count >= self._most:
            message = f"this server is at its limit of {self._most} concurrent calls"
            raise errors.exhausted(TOO_MANY_CONCURRENT, message, 1.0, limit=str(self._most))
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
