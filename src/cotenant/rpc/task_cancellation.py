"""Ending tasks for certain, and saying of which that could not be said at once."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

log = structlog.get_logger()

AGAIN_SECONDS = 2.0  # for what a task still has to do once it is cancelled
TIMES_MAX = 5


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait for their end.

    A cancel can be lost: `asyncio.wait_for` takes one that comes together with what it waits for as its own (until
    Python 3.12), as do streams of gRPC's that end at that moment. So a task that goes on is told of and cancelled
    again, `TIMES_MAX` times; one that goes on even then is left behind, with an error that says where it stands.
    """
    left = {task for task in tasks if not task.done()}
    for _ in range(TIMES_MAX):
        if not left:
            break
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        for task in left:
            log.warning("task_goes_on", task=task.get_name(), at=_standing(task))
    for task in left:
        log.error("task_left_behind", task=task.get_name(), at=_standing(task))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # it was told of where that matters, and is of no concern at the end


def _standing(task: asyncio.Task[Any]) -> str:
    """Say where a task waits."""
    stack = task.get_stack(limit=1)
    return f"{stack[-1].f_code.co_qualname}:{stack[-1].f_lineno}" if stack else repr(task.get_coro())
