"""Images for tests, made from a static busybox: a root file system, and what can run it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cotenant.node_agent.containers.container_runtime import find_runtime

APPLETS = ("cat", "chmod", "env", "grep", "id", "kill", "ls", "mkdir", "pwd", "sed", "sh", "sleep", "touch", "wc")


def need_containers() -> None:
    """Skip the test, with the reason, if no container can be run here."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if find_runtime() is None:
        pytest.skip("needs crun: apt-get install crun")
    static_busybox()


def static_busybox() -> Path:
    """Return a busybox that needs no library; skip the test if there is none."""
    found = shutil.which("busybox")
    if found is None:
        pytest.skip("needs a busybox: apt-get install busybox-static")
    linked = subprocess.run(["ldd", found], capture_output=True, text=True, check=False)
    if linked.returncode == 0 and "statically" not in linked.stdout:
        pytest.skip("needs a static busybox: apt-get install busybox-static")
    return Path(found)


def make_root(path: Path) -> Path:
    """Make a root file system with a shell and a few commands."""
    (path / "bin").mkdir(parents=True)
    path.chmod(0o755)
    shutil.copy(static_busybox(), path / "bin/busybox")
    for name in APPLETS:
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc").mkdir()
    (path / "etc/issue").write_text("made for a test\n")
    return path
