"""Scratch space: a directory for each task that requests it, on the file system that the node was given.

A job finds it in COTENANT_SCRATCH, and in TMPDIR unless it sets that: PBS, Grid Engine and HTCondor set TMPDIR to
a job's own directory, and what programs write to the shared directory instead would count for no job and survive it.

The directory is removed at the attempt's end. That may take long, so it is renamed at once and removed by a thread;
what an agent that is killed leaves over, the next one removes.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import structlog

from cotenant.core.model.lifecycle import LaunchCause
from cotenant.node_agent.enforcement import project_quota
from cotenant.node_agent.enforcement.hook import EnforcedNode, EnforcementHook, NewAttempt
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.v1 import resources_pb2

log = structlog.get_logger()

NOT_LIMITED = "the size of scratch directories is not limited: their file system has no project quota"
REMOVED = ".removed-"  # begins the names of directories that are being removed


def _in_background(work: Callable[[], None]) -> None:
    Thread(target=work, name="scratch-removal", daemon=True).start()


class ScratchDirectory(EnforcementHook):
    """Gives each task its scratch directory, and limits its size where the file system can."""

    launch_cause = LaunchCause.DIRECTORY

    def __init__(self, start: Callable[[Callable[[], None]], None] = _in_background) -> None:
        self._start, self._limited = start, False
        self._root: Path | None = None

    def open(self, node: EnforcedNode) -> Sequence[str]:
        """Make the directory of all attempts; return why scratch space is not usable, or not limited."""
        self._root = None
        if not node.inventory.scratch_bytes:
            return ()
        root = Path(node.settings.scratch_directory).absolute() / node.id
        try:
            _make(root, 0o711)
            for left in root.glob(f"{REMOVED}*"):
                self._start(partial(_remove, left))
        except OSError as error:
            return [f"scratch space is not usable: {error}"]
        self._root, self._limited = root, project_quota.enforced(root)
        return [] if self._limited else [NOT_LIMITED]

    def prepare(self, attempt: NewAttempt) -> None:
        """Remove what a launch that never started has left."""
        self.end(attempt.name)

    def prepare_task(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation, group: Group) -> None:
        """Make a task's directory, which belongs to its user."""
        if not task.scratch_bytes:
            return
        directory = self._path(attempt, task)
        _make(directory.parent, 0o711)
        _make(directory, 0o700)
        if self._limited:
            project_quota.limit(directory, task.scratch_bytes)
        if attempt.owner:
            os.chown(directory, *attempt.owner)

    def environment(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> Mapping[str, str]:
        """Return where a task's directory is."""
        if not task.scratch_bytes:
            return {}
        path = str(self._path(attempt, task))
        temporary = {} if "TMPDIR" in attempt.assignment.spec.environment else {"TMPDIR": path}
        return {"COTENANT_SCRATCH": path, **temporary}

    def end(self, attempt: str) -> None:
        """Remove the directories of an attempt."""
        if self._root is None or not (self._root / attempt).is_dir():
            return
        left = self._root / f"{REMOVED}{attempt}-{time.monotonic_ns()}"
        (self._root / attempt).rename(left)
        self._start(partial(_remove, left))

    def _path(self, attempt: NewAttempt, task: resources_pb2.TaskAllocation) -> Path:
        if self._root is None:
            raise OSError("the node has no usable scratch directory")
        return self._root / attempt.name / f"task-{task.rank}"


def _make(path: Path, mode: int) -> None:
    """Make a directory of the agent's, whatever its umask. Raises `OSError` if somebody else has made it."""
    path.mkdir(exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(f"{path} is not a directory of the agent's user")
    path.chmod(mode)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.error("scratch_removal_failed", directory=str(path), error=str(error))
