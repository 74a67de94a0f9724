"""An older version of Cotenant, installed separately, as the start of an upgrade."""

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
    """The command of a version and its description."""

    command: str
    description: str


NEWEST = Version(COTENANT, "this version")


@contextmanager
def installed_version(revision: str | None) -> Iterator[Version]:
    """Check out and install a git revision in a temporary directory; without a revision, yield this version.

    Raises:
        SystemExit: the revision does not exist or cannot be installed.
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
            raise SystemExit(f"error: cannot install the version of {revision}:\n{done.stdout}{done.stderr}")
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
