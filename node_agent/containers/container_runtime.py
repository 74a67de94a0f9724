"""Finds the program that runs containers on this node."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

PROGRAM = "crun"
VERSION = re.compile(r"crun version (\S+)")
VERSION_SECONDS_MAX = 10.0
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


def find_runtime(
    *, look_up: Callable[[str], str | None] = shutil.which, own_uid: int | None = None
) -> ContainerRuntime | None:
    """Return the node's container runtime; None if there is none that the agent can use. Blocks for a moment."""
    if (os.geteuid() if own_uid is None else own_uid) != 0:
        return None  # mounting an image needs root
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
