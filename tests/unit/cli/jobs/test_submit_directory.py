"""Jobs are submitted with the current folder and what finds programs there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import Standin

from cotenant.cli.jobs.submit_directory import VALUE_LENGTH_MAX, current_directory


def test_the_folder_has_the_shells_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    found = current_directory({"PWD": str(tmp_path / "link"), "PATH": "/bin", "SECRET": "x", "VIRTUAL_ENV": "/venv"})
    assert found
    assert (found.path, found.inode) == (str(tmp_path / "link"), (tmp_path / "real").stat().st_ino)
    assert (found.owner_uid, found.environment) == (os.getuid(), (("PATH", "/bin"), ("VIRTUAL_ENV", "/venv")))
    stale = current_directory({"PWD": str(tmp_path), "PATH": "x" * (VALUE_LENGTH_MAX + 1)})
    assert stale
    assert (stale.path, stale.environment) == (str(tmp_path / "real"), ())


def test_a_folder_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert current_directory({"PWD": str(tmp_path / "gone")}) is None


def test_submit_sends_the_folder_unless_an_empty_one_is_asked_for(
    shell: Shell, standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell("submit", "--", "true")
    shell("submit", "--empty-workdir", "--", "true")
    sent, empty = (job.spec for job in standin.jobs.jobs.values())
    assert sent.submit_directory.path == str(tmp_path)
    assert not empty.HasField("submit_directory")
    shown = shell("show", next(iter(standin.jobs.jobs))).out
    assert ["submitted", "from", str(tmp_path)] in [line.split() for line in shown.splitlines()]
