"""The wheel, and environments with it, made once for all workers of a test run."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.paths import ROOT

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "dist", "build", "__pycache__", ".*_cache", ".hypothesis")
STUBS = set(re.findall(r"^/src/cotenant/(\w+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE))


def _ignored(directory: str, names: list[str]) -> set[str]:
    """Ignore what git ignores: caches, environments, and the stubs, which the build must generate."""
    return set(NOT_COPIED(directory, names)) | (STUBS if Path(directory) == ROOT / "src" / "cotenant" else set())


@contextmanager
def made_once(factory: pytest.TempPathFactory, name: str) -> Iterator[tuple[Path, bool]]:
    """Yield a directory that all workers share, and whether it is already made; the others wait meanwhile."""
    own = factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = place.with_suffix(".done")
        yield place, done.exists()
        done.touch()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist and a wheel from a copy of the tree, because the build writes stubs into it."""
    with made_once(tmp_path_factory, "build") as (place, is_made):
        if not is_made:
            shutil.copytree(ROOT, place / "tree", symlinks=True, ignore=_ignored)
            words = [sys.executable, "-m", "build", "--quiet", str(place / "tree")]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return place / "tree" / "dist"


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """Return the wheel."""
    (wheel,) = built.glob("*.whl")
    return wheel


def _install(requirement: str, environment: Path, *, compiled: bool) -> None:
    """Install a requirement into a new environment: with uv where `make setup` uses it, as pip takes longer."""
    python = str(environment / "bin" / "python")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv:
        commands = [
            [uv, "venv", "--quiet", "--python", sys.executable, str(environment)],
            [uv, "pip", "install", "--quiet", "--python", python, *["--compile-bytecode"] * compiled, requirement],
        ]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(environment)],
            [python, "-m", "pip", "install", "--quiet", *["--no-compile"] * (not compiled), requirement],
        ]
    for command in commands:
        done = subprocess.run(
            command, env={"UV_SYSTEM_CERTS": "true", **os.environ}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that installs the wheel with an extra, or with none, and returns the directory of commands."""

    def install(extra: str) -> Path:
        with made_once(tmp_path_factory, f"venv-{extra or 'plain'}") as (place, is_made):
            if not is_made:
                # only a plain installation is measured
                _install(f"{wheel}[{extra}]" if extra else str(wheel), place, compiled=not extra)
        return place / "bin"

    return install
