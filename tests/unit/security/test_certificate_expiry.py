"""A process warns before its certificate expires."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cotenant.security import certificate_expiry, tls_files
from cotenant.security.certificate_expiry import REPORT_SECONDS, CertificateExpiry
from cotenant.security.certificates import Authority
from cotenant.security.grpc_tls import TlsFiles, WatchedTlsFiles
from cotenant.security.subjects import Subject

BEARER = Subject.parse("agent/gpu1")


class Clock:
    """A clock set by the test."""

    def __init__(self) -> None:
        self.begin, self.days, self.seconds = datetime.now(UTC), 0.0, 0.0

    def now(self) -> datetime:
        return self.begin + timedelta(days=self.days)

    def monotonic(self) -> float:
        return self.seconds


class Gauge:
    """Records its values."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def set(self, value: float, *, subject: str) -> None:
        assert subject == "CN=agent/gpu1"
        self.values.append(value)


def test_expiry_is_logged_every_six_hours_until_the_certificate_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, clock = Gauge(), Clock()
    monkeypatch.setattr(certificate_expiry, "REMAINING", gauge)
    monkeypatch.setattr(tls_files, "LOOK_SECONDS", 0.0)
    lab = Authority(tmp_path)
    lab.create()
    made = lab.issue(BEARER, days=90)
    own = CertificateExpiry(
        WatchedTlsFiles(TlsFiles(lab.cert_path, made.path, made.key_path)), clock.now, clock.monotonic
    )

    def said() -> list[dict[str, Any]]:
        with capture_logs() as logs:
            own.look()
        return [dict(one) for one in logs if one["event"] == "certificate_expires"]

    assert said() == []
    assert gauge.values[-1] == pytest.approx(90 * 86_400, abs=5)
    clock.days = 61
    (line,) = said()
    assert (line["log_level"], line["told"]) == ("warning", "expires in 28 days")
    clock.seconds = REPORT_SECONDS - 1
    assert said() == []
    clock.seconds = REPORT_SECONDS
    assert len(said()) == 1
    clock.days = 91
    (line,) = said()  # at once: it is another certificate
    assert line["log_level"] == "error"
    assert gauge.values[-1] < 0
    clock.days = 0
    lab.issue(BEARER, days=180)
    clock.days = 91
    assert said() == []
    assert gauge.values[-1] == pytest.approx(89 * 86_400, abs=5)


def test_a_process_with_a_token_logs_no_expiry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge()
    monkeypatch.setattr(certificate_expiry, "REMAINING", gauge)
    lab = Authority(tmp_path)
    lab.create()
    CertificateExpiry(WatchedTlsFiles(TlsFiles(lab.cert_path))).look()
    assert gauge.values == []
