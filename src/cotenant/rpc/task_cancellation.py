"""Cancels tasks reliably, and logs tasks that do not stop at once."""

from __future__ import annotations

import asyncio
from typing import Any

from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

CANCEL_RETRY_SECONDS = 2.0  # time for a task to clean up before it is cancelled again
CANCELS_MAX = 5


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they end.

    A cancellation can be lost: `asyncio.wait_for` swallows one that arrives together with the awaited result (until
    Python 3.12), as do gRPC streams that end at that moment. So a task that keeps running is logged and cancelled
    again, up to `CANCELS_MAX` times; one that still runs after that is abandoned, and logged with its location.
    """
    left = {task for task in tasks if not task.done()}
    for _ in range(CANCELS_MAX):
        if not left:
            break
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_RETRY_SECONDS)
        for task in left:
            log.warning("task_ignored_cancellation", task=task.get_name(), at=_location(task))
    for task in left:
        log.error("task_abandoned", task=task.get_name(), at=_location(task))
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # mark it as retrieved; errors that matter were logged before


def _location(task: asyncio.Task[Any]) -> str:
    """Return where a task waits."""
    stack = task.get_stack(limit=1)
    return f"{stack[-1].f_code.co_qualname}:{stack[-1].f_lineno}" if stack else repr(task.get_coro())
