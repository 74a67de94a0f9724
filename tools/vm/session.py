"""Packs the uppermost layer of a machine: the tests and the command to run. Built for each run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.vm.host import find, run
from tools.vm.layers import ROOT, pack

SOURCES = Path("srv/cotenant")
TESTS = SOURCES / "tests"
UNITS = Path("etc/systemd/system")
UNIT = """\
[Unit]
Description=The command to run on this machine
After=multi-user.target

[Service]
Type=exec
ExecStart=/bin/sh /session/run
"""
NVML = TESTS / "unit/node_agent/libnvidia-ml.so.1"  # where tests/unit/node_agent/fake_driver.py looks for it


def session(place: Path, script: str, tests: Sequence[str]) -> Path:
    """Build the layer with the tests, compiled helpers, deploy/ and the command to run; return its image.

    `tests` are paths and options for pytest: the tests that it will collect are compiled here.
    """
    tree = place / "tree"
    shutil.copytree(ROOT / "tests", tree / TESTS, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "deploy", tree / SOURCES / "deploy", ignore=shutil.ignore_patterns("secrets"))
    shutil.copy(ROOT / "pyproject.toml", tree / SOURCES)
    if gcc := find("gcc"):
        run(gcc, "-shared", "-fPIC", "-o", tree / NVML, ROOT / "tests/unit/node_agent/fake_nvml.c")
    _compile(tree / SOURCES, tests)
    (tree / "session").mkdir()
    (tree / "session" / "run").write_text(script)
    _begin_by_systemd(tree)
    pack(tree, place / "image", "-all-root")
    shutil.rmtree(tree)
    return place / "image"


def _begin_by_systemd(tree: Path) -> None:
    """Under systemd, run the command as the last unit, and give the machine a name."""
    wanted = tree / UNITS / "multi-user.target.wants"
    wanted.mkdir(parents=True)
    (tree / UNITS / "session.service").write_text(UNIT)
    (wanted / "session.service").symlink_to("../session.service")
    (tree / "etc/hostname").write_text("cotenant-vm\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 cotenant-vm\n")


def _compile(root: Path, tests: Sequence[str]) -> None:
    """Let pytest rewrite the tests on this computer: the machine reuses them if the versions are the same.

    This saves an emulated processor half of the time until the first test; if it fails here, it is done there.
    """
    words = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(words, cwd=root, env=environment, capture_output=True, check=False)
