"""Fail points: named places beside commits at which a test may stop a process.

etcd and TiKV have the same as gofail and fail-rs. What a crash loses depends on the moment: between a commit and its
consequences lies a state that chance hardly ever hits. Nothing happens at these places unless one is armed: by the
simulation of the control plane, through `on_reach`, or in separate processes by the variable COTENANT_FAIL_POINTS: with
a list of points from the start, or, while processes run, with files in the directory that it names.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

VARIABLE = "COTENANT_FAIL_POINTS"
PASSED = "passed"  # a subdirectory: how often processes reached each point

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "election.won": "the leadership key is written, nothing is read yet",
        "queue.committing": "a change of a job is about to be committed",
        "queue.committed": "the change is committed, but not yet known",
        "queue.planning": "a plan is about to be requested",
        "queue.planned": "a plan has arrived, nothing of it is applied yet",
        "queue.resizing": "a resize of elastic jobs is about to be requested",
        "queue.resized": "elastic jobs are being resized, the queue does not know yet",
        "queue.end_kept": "the end of an attempt is recorded, placement may not forget it yet",
        "queue.usage": "the decayed usage of tenants is about to be recorded",
        "array.begun": "jobs of an array are recorded, the array itself is not yet",
        "array.kept": "the array is recorded, but this is not yet known",
        "array.changed": "some jobs of an array are changed, the request is not recorded yet",
        "tenant.kept": "a change of a tenant is committed, but not yet known",
        "upkeep.archived": "ended jobs are in the archive, and still in the store",
        "upkeep.forgetting": "the requests that made ended jobs are deleted, the jobs are not yet",
        "upkeep.compacted": "old history is compacted, its disk space is not released yet",
        "placement.loading": "a new term has begun, nothing is read under it yet",
        "placement.committing": "a group of writes is about to be committed",
        "placement.committed": "the writes are committed, but this is not yet known",
        "placement.started": "a start is committed, neither the queue nor an agent knows",
        "placement.forgotten": "the record of an attempt is deleted, placement still knows the attempt",
        "predictor.keeping": "learned state is about to be committed",
        "predictor.kept": "learned state is committed, the predictor does not know",
        "agent.fenced": "the epoch of an assignment is on the agent's disk, nothing is started",
        "agent.launched": "an attempt is running, its agent does not know yet",
        "agent.resized": "cores are changed and recorded, this is not reported yet",
        "agent.acknowledged": "placement has recorded an end, the attempt's files still exist",
        "restore.filling": "a store being filled by restore or migrate holds some keys, and is marked incomplete",
        "restore.filled": "the store holds all keys, and is still marked incomplete",
    }
)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

OnReach = Callable[[str], Awaitable[None]]
_on_reach: OnReach | None = None


async def reach(point: str) -> None:
    """Record that a process has reached a fail point."""
    if _on_reach is not None:
        await _on_reach(point)


@contextmanager
def armed(on_reach: OnReach) -> Iterator[None]:
    """Call `on_reach` for each point that is reached, in any process simulated here."""
    global _on_reach
    before, _on_reach = _on_reach, on_reach
    try:
        yield
    finally:
        _on_reach = before


def arm(text: str) -> None:
    """Arm points of this process: a list such as `queue.committed=kill,placement.started=stop@3`.

    `kill` ends the process and `stop` halts it until it gets SIGCONT; with `@N`, the Nth time the point is reached.
    Each happens once.

    A directory instead, recognized by a slash, arms a point as long as it has a file of that name, which contains the
    action: `stop@3`. The first process with this directory that gets there takes the file, by appending `.PID` to its
    name. If the directory has a subdirectory `passed`, a file there, named like the point, grows by one byte whenever a
    process gets there, armed or not.

    Raises:
        ValueError: names everything that is invalid.
    """
    global _on_reach
    if os.sep in text:
        _on_reach = _Directory(Path(text)).on_reach
        return
    wanted, wrong = {}, []
    for word in filter(None, (word.strip() for word in text.split(","))):
        point, _, action = word.partition("=")
        if point not in POINTS:
            wrong.append(f"there is no fail point {point!r}")
        elif (read := _action(action)) is None:
            wrong.append(f"{word!r} must be {point}=kill, {point}=stop or {point}=kill@N")
        else:
            wanted[point] = [*read]
    if wrong:
        raise ValueError(f"{VARIABLE}: {'; '.join(wrong)}; points are {', '.join(POINTS)}")

    async def signal_when_due(point: str) -> None:
        if point in wanted:
            wanted[point][1] -= 1
            if not wanted[point][1]:
                os.kill(os.getpid(), wanted[point][0])

    _on_reach = signal_when_due if wanted else None


def _action(text: str) -> tuple[signal.Signals, int] | None:
    """Return the action and its count; None if the text is not an action.

    >>> _action("kill@3")
    (<Signals.SIGKILL: 9>, 3)
    """
    action, _, times = text.strip().partition("@")
    if action not in SIGNALS or not (times or "1").isdecimal() or int(times or 1) < 1:
        return None
    return SIGNALS[action], int(times or 1)


class _Directory:
    """Points that are armed by files while processes run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reached: dict[tuple[str, int], int] = {}  # by point and inode: how often

    async def on_reach(self, point: str) -> None:
        """Carry out the point's action if it is armed and this process is first."""
        self._count(point)
        file = self._path / point
        try:
            which, action = (point, file.stat().st_ino), _action(file.read_text())
        except OSError:
            return  # it is not armed
        self._reached[which] = self._reached.get(which, 0) + 1
        if action is None or self._reached[which] < action[1]:
            return
        try:
            file.rename(f"{file}.{os.getpid()}")
        except OSError:
            return  # another process was first
        os.kill(os.getpid(), action[0])

    def _count(self, point: str) -> None:
        with suppress(OSError):  # counting is off, or the disk is full
            file = os.open(self._path / PASSED / point, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, b".")
            finally:
                os.close(file)
