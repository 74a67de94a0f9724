"""The options of `cotenant pilots slurm`."""

from __future__ import annotations

import pytest
from tests.unit.cli.conftest import Shell

from cotenant.cli.outcome import ExitCode


def test_every_invalid_option_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTENANT_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("COTENANT_TOKEN", "t")
    options = "--max", "1", "--min", "2", "--time", "x", "--idle", "0", "--pool", "A", "--memory", "much"
    ended = shell("pilots", "slurm", *options)
    assert ended.code == ExitCode.USAGE
    named = [line.split()[0] for line in ended.err.splitlines()[1:]]
    assert named == ["--min", "--pool", "--time", "--idle", "--memory"]


def test_without_a_mesh_the_error_says_how_one_is_found(shell: Shell) -> None:
    ended = shell("pilots", "slurm", "--max", "1", "--time", "1h")
    assert ended.code == ExitCode.UNREACHABLE
    assert "cotenant up" in ended.err
