"""Named places beside commits at which a test may cut a process off, as gofail and fail-rs have them for etcd and TiKV.

What is lost by a crash depends on the moment: between a commit and what follows from it lies a state that is hardly
ever met by chance. Nothing happens at these places unless one is armed: by the simulation of the control plane, through
`on_reach`, or in processes of their own by the variable COTENANT_FAIL_POINTS: by a list of points from the start on,
or, while processes run, by files in the directory that it names.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

VARIABLE = "COTENANT_FAIL_POINTS"
PASSED = "passed"  # a directory in that of points: how often processes came to each

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "election.won": "the leadership key is written, and nothing is read yet",
        "queue.committing": "a change of a job is about to be committed",
        "queue.committed": "it is committed, and nobody knows",
        "queue.planning": "a plan is about to be asked for",
        "queue.planned": "a plan is answered, and nothing of the answer is taken in",
        "queue.end_kept": "the end of an attempt is kept, and placement may not forget it yet",
        "array.begun": "jobs of an array are kept, and the array itself is not yet",
        "array.kept": "the array is kept, and nobody knows",
        "array.changed": "some jobs of an array are changed, and the request is not kept yet",
        "tenant.kept": "a change of a tenant is committed, and nobody knows",
        "upkeep.archived": "ended jobs are in the archive, and in the store still",
        "upkeep.forgetting": "the requests that made ended jobs are forgotten, and the jobs are not yet",
        "upkeep.compacted": "old history is gone, and its room on the disk is not given back yet",
        "placement.loading": "a new term has begun, and nothing is read under it yet",
        "placement.committing": "a group of writes is about to be committed",
        "placement.committed": "it is committed, and nobody knows",
        "placement.started": "a start is committed, and neither the queue nor an agent knows",
        "placement.forgotten": "the record of an attempt is gone, and placement still knows the attempt",
        "predictor.keeping": "what was learnt is about to be committed",
        "predictor.kept": "it is committed, and the predictor does not know",
        "agent.fenced": "the epoch of an assignment is on the agent's disk, and nothing is started",
        "agent.launched": "an attempt runs, and its agent does not know yet",
        "agent.resized": "cores are changed and recorded, and nobody is told",
        "agent.acknowledged": "placement has kept an end, and the attempt's files are there still",
        "restore.filling": "a store that is filled by restore or migrate holds some keys, and is marked as not whole",
        "restore.filled": "it holds all keys, and the mark still",
    }
)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

OnReach = Callable[[str], Awaitable[None]]
_on_reach: OnReach | None = None


async def reach(point: str) -> None:
    """Note that a process has come to one of the points."""
    if _on_reach is not None:
        await _on_reach(point)


@contextmanager
def armed(on_reach: OnReach) -> Iterator[None]:
    """Have something told of each point that is reached, in whichever process that is simulated here."""
    global _on_reach
    before, _on_reach = _on_reach, on_reach
    try:
        yield
    finally:
        _on_reach = before


def arm(text: str) -> None:
    """Arm points of this process: a list such as `queue.committed=kill,placement.started=stop@3`.

    `kill` ends the process and `stop` halts it, until somebody sends it SIGCONT; with `@N` when it is reached for the
    Nth time. Each happens once.

    A directory instead, which has a slash in it, arms a point for as long as there is a file of its name, with what is
    to happen in it: `stop@3`. Of all processes with this directory the first one that gets there takes the file, by
    giving it the ending `.PID`. Where the directory has one called `passed`, a file there, of each point's name, grows
    by one byte whenever a process gets there, armed or not.

    Raises:
        ValueError: naming everything that is wrong in it.
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
            wrong.append(f"{word!r} is none of {point}=kill, {point}=stop and {point}=kill@N")
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
    """Read what happens, and at which time; None where that is no action.

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
        self._reached: dict[tuple[str, int], int] = {}  # by point and the file's number: how often

    async def on_reach(self, point: str) -> None:
        """Look whether the point is armed, and who comes there first."""
        self._count(point)
        file = self._path / point
        try:
            which, action = (point, file.stat().st_ino), _action(file.read_text())
        except OSError:
            return  # it is not
        self._reached[which] = self._reached.get(which, 0) + 1
        if action is None or self._reached[which] < action[1]:
            return
        try:
            file.rename(f"{file}.{os.getpid()}")
        except OSError:
            return  # somebody else was first
        os.kill(os.getpid(), action[0])

    def _count(self, point: str) -> None:
        with suppress(OSError):  # nobody wants to know, or the disk is full
            file = os.open(self._path / PASSED / point, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, b".")
            finally:
                os.close(file)
