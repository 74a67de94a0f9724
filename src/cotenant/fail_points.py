"""Named places beside commits at which a test may cut a process off, as gofail and fail-rs have them for etcd and TiKV.

What is lost by a crash depends on the moment: between a commit and what follows from it lies a state that is hardly
ever met by chance. Nothing happens at these places unless one is armed: by the simulation of the control plane, through
`on_reach`, or in a process of its own by the variable COTENANT_FAIL_POINTS.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

VARIABLE = "COTENANT_FAIL_POINTS"

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "election.won": "the leadership key is written, and nothing is read yet",
        "queue.committing": "a change of a job is about to be committed",
        "queue.committed": "it is committed, and nobody knows",
        "queue.planning": "a plan is about to be asked for",
        "queue.planned": "a plan is answered, and nothing of the answer is taken in",
        "queue.end_kept": "the end of an attempt is kept, and placement may not forget it yet",
        "placement.loading": "a new term has begun, and nothing is read under it yet",
        "placement.committing": "a group of writes is about to be committed",
        "placement.committed": "it is committed, and nobody knows",
        "placement.started": "a start is committed, and neither the queue nor an agent knows",
        "placement.forgotten": "the record of an attempt is gone, and placement still knows the attempt",
        "agent.fenced": "the epoch of an assignment is on the agent's disk, and nothing is started",
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

    Raises:
        ValueError: naming everything that is wrong in it.
    """
    global _on_reach
    wanted, wrong = {}, []
    for word in filter(None, (word.strip() for word in text.split(","))):
        point, _, action = word.partition("=")
        action, _, times = action.partition("@")
        if point not in POINTS:
            wrong.append(f"there is no fail point {point!r}")
        elif action not in SIGNALS or not (times or "1").isdecimal() or int(times or 1) < 1:
            wrong.append(f"{word!r} is none of {point}=kill, {point}=stop and {point}=kill@N")
        else:
            wanted[point] = [SIGNALS[action], int(times or 1)]
    if wrong:
        raise ValueError(f"{VARIABLE}: {'; '.join(wrong)}; points are {', '.join(POINTS)}")

    async def signal_when_due(point: str) -> None:
        if point in wanted:
            wanted[point][1] -= 1
            if not wanted[point][1]:
                os.kill(os.getpid(), wanted[point][0])

    _on_reach = signal_when_due if wanted else None
