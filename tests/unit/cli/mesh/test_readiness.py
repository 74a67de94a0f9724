"""A service tells systemd once it serves, and whoever it starts is told nothing of how."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cotenant.cli.mesh.readiness import VARIABLE, tell_ready


@pytest.mark.parametrize("abstract", [False, True])
def test_it_is_told_once(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@cotenant-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(10)
        monkeypatch.setenv(VARIABLE, name)
        tell_ready()
        assert manager.recv(100) == b"READY=1"
        assert VARIABLE not in os.environ
        tell_ready()
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_one_that_cannot_be_told_is_no_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    tell_ready()
    assert "systemd could not be told" in capsys.readouterr().err
