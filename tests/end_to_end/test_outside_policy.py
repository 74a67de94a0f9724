"""A policy package in an environment of its own, by the commands of the tutorial: new, pip install, laws, simulate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT

SECONDS_MAX = 1200.0  # pip builds Cotenant and downloads its libraries

pytestmark = [pytest.mark.deep, pytest.mark.timeout(SECONDS_MAX)]


def run(folder: Path, *words: str | Path) -> str:
    """Run a command of a fresh environment, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{folder / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    environment["HOME"] = str(folder)
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_outside_package_is_made_installed_held_to_the_laws_and_used(tmp_path: Path) -> None:
    run(tmp_path, sys.executable, "-m", "venv", "venv")
    commands = tmp_path / "venv" / "bin"
    run(tmp_path, commands / "pip", "install", "-q", f"cotenant[research,conformance] @ {ROOT.as_uri()}")
    run(tmp_path, commands / "cotenant", "policies", "new", "queue", "small-first")
    run(tmp_path, commands / "pip", "install", "-q", "./small-first[test]")
    assert "passed" in run(tmp_path, commands / "pytest", "-q", "small-first")
    laws = run(tmp_path, commands / "pytest", "-q", "--pyargs", "cotenant.conformance", "--policy", "small-first")
    assert " passed" in laws
    sample = ("--trace", "sample", "--cluster", "2x8")
    assert "small-first" in run(tmp_path, commands / "cotenant", "simulate", *sample, "--queue", "small-first")
    compared = run(tmp_path, commands / "cotenant", "compare", *sample, "--arms", "fifo,small-first")
    assert "small-first" in compared
