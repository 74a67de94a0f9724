"""A service notifies systemd once it serves; child processes do not inherit the variable."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cotenant.cli.mesh.readiness import VARIABLE, notify_ready


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified_once(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@cotenant-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(60)
        monkeypatch.setenv(VARIABLE, name)
        notify_ready()
        assert manager.recv(100) == b"READY=1"
        assert VARIABLE not in os.environ
        notify_ready()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_failed_notification_is_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    notify_ready()
    assert "cannot notify systemd" in capsys.readouterr().err
