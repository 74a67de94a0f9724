"""Warns before the certificate of this process expires.

Manual renewal is easily forgotten, and then a mesh fails at one moment: every new connection is refused. So each
process measures the remaining time, and logs a warning once the certificate is due for renewal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from cotenant import telemetry
from cotenant.security.grpc_tls import WatchedTlsFiles
from cotenant.security.validity import Validity
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

LOOK_SECONDS = 60.0
REPORT_SECONDS = 6 * 3600.0  # between two log lines about the same certificate

REMAINING = telemetry.gauge(
    "cotenant.certificate.left", "s", "Time until the process's certificate expires; negative once it has expired."
)


class CertificateExpiry:
    """Checks once a minute the certificate that this process shows, also without calls."""

    def __init__(
        self,
        watched: WatchedTlsFiles,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched, self._now, self._clock = watched, now, clock
        self._logged: tuple[bool, Validity] | None = None
        self._logged_seconds = 0.0

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Measure the remaining time, and log a warning if the certificate is due for renewal."""
        self._watched.look()  # also reloads changed files
        material, now = self._watched.material, self._now()
        validity = material.validity
        if validity is None:
            return  # the process shows a token, not a certificate
        REMAINING.set((validity.ends - now).total_seconds(), subject=material.subject)
        told = (now > validity.ends, validity)
        if not validity.is_due(now) or (told == self._logged and self._clock() - self._logged_seconds < REPORT_SECONDS):
            return
        self._logged, self._logged_seconds = told, self._clock()
        tell = log.error if now > validity.ends else log.warning
        tell(
            "certificate_expires",
            subject=material.subject,
            cert=str(self._watched.files.cert),
            ends=validity.ends.isoformat(),
            told=validity.in_words(now),
            remedy="replace it with a new one; no restart is needed",
        )
