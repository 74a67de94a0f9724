"""What one caller may take of a server: calls per second and open streams.

Operators, agents and services are not counted: what they do is bounded elsewhere, and a mesh that refuses itself helps
nobody. A call that a service passes on was counted where it came in.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cotenant.rpc import errors
from cotenant.rpc.identity import Identity
from cotenant.rpc.permissions import Role

CALLERS_KEPT_MAX = 10_000
TOO_MANY_CALLS = "TOO_MANY_CALLS"
UNCOUNTED = frozenset({Role.OPERATOR, Role.AGENT, Role.SERVICE})


@dataclass(frozen=True, slots=True)
class LimitRules:
    """How much is allowed; 0 means without a limit.

    `calls_per_second` is each user's rate in the long run, `calls_at_once` how many calls may come in a burst, and
    `streams` how many watches and logs a user may hold open.
    """

    calls_per_second: float = 50.0
    calls_at_once: int = 500
    streams: int = 100


LIMITS = LimitRules()


class Limits:
    """Counts what each user takes: a token bucket (RFC 2697's committed rate) for calls, a number for streams.

    >>> limits, eve = Limits(LimitRules(1, 2, 1), now=lambda: 0.0), Identity("eve", frozenset({Role.USER}))
    >>> limits.take(eve), limits.take(eve)
    (None, None)
    >>> limits.take(eve)
    Traceback (most recent call last):
    cotenant.rpc.errors.Problem: eve makes more than 1 calls per second; try again in 1.0 s
    """

    def __init__(self, rules: LimitRules = LIMITS, now: Callable[[], float] = time.monotonic) -> None:
        self._rules, self._now = rules, now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # calls left, and when that was so
        self._streams: dict[str, int] = {}

    def take(self, identity: Identity) -> None:
        """Count a call.

        Raises:
            Problem: RESOURCE_EXHAUSTED, with the time after which there is room again.
        """
        rate, most = self._rules.calls_per_second, self._rules.calls_at_once
        if not rate or identity.via or not UNCOUNTED.isdisjoint(identity.roles):
            return
        now = self._now()
        left, since = self._left.pop(identity.name, (float(most), now))
        left = min(float(most), left + (now - since) * rate)
        allowed = left >= 1
        self._left[identity.name] = (left - 1 if allowed else left), now
        if len(self._left) > CALLERS_KEPT_MAX:
            self._left.popitem(last=False)  # who has not called for the longest has a full bucket again
        if not allowed:
            wait = (1 - left) / rate
            message = f"{identity.name} makes more than {rate:g} calls per second; try again in {wait:.1f} s"
            raise errors.exhausted(TOO_MANY_CALLS, message, wait, limit=f"{rate:g}")

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
