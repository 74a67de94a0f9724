"""Finds what runs containers on this node: a program if the agent is root, otherwise the kernel's own means.

Each runtime has a name in the node's inventory, and the words that call it. A runtime without words is the supervisor
itself, which makes containers in the namespaces of its jobs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger()

PROGRAM = "crun"
VERSION = re.compile(r"crun version (\S+)")
VERSION_SECONDS_MAX = 10.0
ROOTLESS = Path(__file__).parents[1] / "supervisor" / "rootless.py"
# The job's process stays in the control group that it is in: the enforcement hooks have limited that one.
OPTIONS = ("--cgroup-manager=disabled",)


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """The program of a node that runs containers, and its version."""

    path: str
    version: str

    def __str__(self) -> str:
        """Return the runtime as a node's inventory names it."""
        return f"{PROGRAM} {self.version}"

    def command(self, state: str) -> list[str]:
        """Return how it is called; `state` is the directory in which it keeps what it knows of containers."""
        return [self.path, *OPTIONS, "--root", state]


@dataclass(frozen=True, slots=True)
class RootlessRuntime:
    """The runtime of an agent that is not root: the supervisor mounts the image in the job's own namespaces."""

    def __str__(self) -> str:
        """Return the runtime as a node's inventory names it."""
        return "rootless"

    def command(self, state: str) -> list[str]:
        """Return how it is called: there is no program."""
        del state
        return []


Runtime = ContainerRuntime | RootlessRuntime


def find_runtime(
    *,
    look_up: Callable[[str], str | None] = shutil.which,
    own_uid: int | None = None,
    isolated: bool = False,
    try_mounts: Callable[[], str] | None = None,
) -> Runtime | None:
    """Return the node's container runtime; None if there is none that the agent can use. Blocks for a moment.

    `isolated`: jobs have namespaces of their own. `try_mounts` tries to mount an image in such, and returns why that
    does not work.
    """
    if (os.geteuid() if own_uid is None else own_uid) == 0:
        return _find_crun(look_up)
    if not isolated:
        return None
    if why := (try_mounts or why_no_mounts)():
        log.warning("container_runtime_unusable", path="", error=why)
        return None
    return RootlessRuntime()


def why_no_mounts() -> str:
    """Try to mount an image without root, as a job would; return why that does not work, "" if it does. Blocks."""
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", str(ROOTLESS)],
            capture_output=True, text=True, errors="replace", timeout=VERSION_SECONDS_MAX, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.returncode == 0:
        return tried.stdout
    return (tried.stderr.strip().splitlines() or [f"the trial exited with {tried.returncode}"])[-1]


def _find_crun(look_up: Callable[[str], str | None]) -> ContainerRuntime | None:
    path = look_up(PROGRAM)
    if path is None:
        return None
    try:
        tried = subprocess.run([path, "--version"], capture_output=True, timeout=VERSION_SECONDS_MAX, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("container_runtime_unusable", path=path, error=str(error))
        return None
    found = VERSION.search(tried.stdout.decode(errors="replace"))
    return ContainerRuntime(os.path.realpath(path), found[1] if found else "unknown")
