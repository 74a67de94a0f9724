"""An older version of Cotenant, installed apart from this one, to be upgraded from."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.commands import COTENANT

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Version:
    """Where a version's command is, and what it is."""

    command: str
    description: str


NEWEST = Version(COTENANT, "this version")


@contextmanager
def installed_version(revision: str | None) -> Iterator[Version]:
    """Check a git revision out and install it, in a place of its own; without one, it is the version at hand.

    Raises:
        SystemExit: there is no such revision, or it cannot be installed.
    """
    if revision is None:
        yield NEWEST
        return
    found = _git("rev-parse", "--verify", f"{revision}^{{commit}}")
    description = _git("log", "-1", "--format=the mesh was started with the version of %cs (`%h`)", found)
    commits = _git("rev-list", "--count", f"{found}..HEAD")
    place = Path(tempfile.mkdtemp(prefix="older-"))
    try:
        _git("worktree", "add", "--quiet", "--detach", str(place / "tree"), found)
        print(f"   installing the version of {revision}, {commits} commits ago", file=sys.stderr)
        done = subprocess.run(["make", "setup"], cwd=place / "tree", capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the version of {revision} cannot be installed:\n{done.stdout}{done.stderr}")
        command = place / "tree" / ".venv" / "bin" / "cotenant"
        yield Version(str(command), f"{description}, {commits} commits before this one")
    finally:
        shutil.rmtree(place, ignore_errors=True)
        _git("worktree", "prune")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()
