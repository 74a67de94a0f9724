"""A process tells of its certificate's end before it has come."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cotenant.security import certificate_expiry, tls_files
from cotenant.security.certificate_expiry import TELL_SECONDS, Expiry
from cotenant.security.certificates import Authority
from cotenant.security.grpc_tls import TlsFiles, Watched
from cotenant.security.subjects import Bearer

BEARER = Bearer.parse("agent/gpu1")


class Clock:
    """Time as the test has it."""

    def __init__(self) -> None:
        self.begin, self.days, self.seconds = datetime.now(UTC), 0.0, 0.0

    def now(self) -> datetime:
        return self.begin + timedelta(days=self.days)

    def monotonic(self) -> float:
        return self.seconds


class Gauge:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def set(self, value: float, *, subject: str) -> None:
        assert subject == "CN=agent/gpu1"
        self.values.append(value)


def test_the_end_is_told_once_in_six_hours_until_there_is_a_new_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, clock = Gauge(), Clock()
    monkeypatch.setattr(certificate_expiry, "LEFT", gauge)
    monkeypatch.setattr(tls_files, "LOOK_SECONDS", 0.0)
    lab = Authority(tmp_path)
    lab.create()
    made = lab.issue(BEARER, days=90)
    own = Expiry(Watched(TlsFiles(lab.cert_path, made.path, made.key_path)), clock.now, clock.monotonic)

    def said() -> list[dict[str, Any]]:
        with capture_logs() as logs:
            own.look()
        return [dict(one) for one in logs if one["event"] == "certificate_runs_out"]

    assert said() == []
    assert gauge.values[-1] == pytest.approx(90 * 86_400, abs=5)
    clock.days = 61
    (line,) = said()
    assert (line["log_level"], line["told"]) == ("warning", "runs out in 28 days")
    clock.seconds = TELL_SECONDS - 1
    assert said() == []
    clock.seconds = TELL_SECONDS
    assert len(said()) == 1
    clock.days = 91
    (line,) = said()  # at once: it is another matter
    assert line["log_level"] == "error"
    assert gauge.values[-1] < 0
    clock.days = 0
    lab.issue(BEARER, days=180)
    clock.days = 91
    assert said() == []
    assert gauge.values[-1] == pytest.approx(89 * 86_400, abs=5)


def test_where_a_token_is_shown_nothing_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge()
    monkeypatch.setattr(certificate_expiry, "LEFT", gauge)
    lab = Authority(tmp_path)
    lab.create()
    Expiry(Watched(TlsFiles(lab.cert_path))).look()
    assert gauge.values == []
