"""A process that tells of its own certificate's end before it is too late.

Who renews certificates by hand forgets it, and then a mesh falls apart at one moment: every connection that is opened
after it is refused. So each process measures what is left, and says so in its log from when it is time for a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from cotenant import telemetry
from cotenant.security.grpc_tls import Watched
from cotenant.security.validity import Validity

log = structlog.get_logger()

LOOK_SECONDS = 60.0
TELL_SECONDS = 6 * 3600.0  # between two lines of the log about the same thing

LEFT = telemetry.gauge(
    "cotenant.certificate.left", "s", "Time until the certificate that a process shows expires; below 0 once it has."
)


class Expiry:
    """Looks once a minute at the certificate that this process shows, also while nobody calls."""

    def __init__(
        self,
        watched: Watched,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched, self._now, self._clock = watched, now, clock
        self._told: tuple[bool, Validity] | None = None
        self._told_seconds = 0.0

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Measure what is left, and tell of it where it is time for a new certificate."""
        self._watched.look()  # new files are taken here too
        material, now = self._watched.material, self._now()
        validity = material.validity
        if validity is None:
            return  # a token is shown, and no certificate
        LEFT.set((validity.ends - now).total_seconds(), subject=material.subject)
        told = (now > validity.ends, validity)
        if not validity.is_due(now) or (told == self._told and self._clock() - self._told_seconds < TELL_SECONDS):
            return
        self._told, self._told_seconds = told, self._clock()
        tell = log.error if now > validity.ends else log.warning
        tell(
            "certificate_runs_out",
            subject=material.subject,
            cert=str(self._watched.files.cert),
            ends=validity.ends.isoformat(),
            told=validity.in_words(now),
            remedy="put a new one in its place; nothing need be restarted",
        )
