"""Background tasks whose failures are always logged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from cotenant.codec.errors import Problem
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.store.port import StoreUnavailable
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

RESTART_SECONDS = 1.0

Result = TypeVar("Result")


class BackgroundTasks:
    """Tasks that are cancelled together. `refusals` are further errors meant for callers only, and not logged."""

    def __init__(self, *refusals: type[Exception]) -> None:
        self._refusals = (Problem, StoreUnavailable, *refusals)
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that nobody awaits; a failure is logged."""
        task = self._track(asyncio.create_task(work))
        task.add_done_callback(_log_failure)
        return task

    def forever(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Keep a task running; a failure is logged, and the task restarts."""
        self._track(asyncio.create_task(_run_forever(name, work), name=name))

    async def finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Complete some work even if the caller is cancelled."""
        task = self._track(asyncio.create_task(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._log_unless_refusal)
            raise

    def _track(self, task: asyncio.Task[Result]) -> asyncio.Task[Result]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _log_unless_refusal(self, task: asyncio.Task[Any]) -> None:
        """Log a failure, unless it is a refusal for the caller, which is gone."""
        if not task.cancelled() and not isinstance(task.exception(), self._refusals):
            _log_failure(task)

    async def close(self) -> None:
        """Cancel all tasks and wait until they end."""
        await cancel_and_wait(*self._tasks)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("background_task_failed", exc_info=error)


async def _run_forever(name: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:  # after any failure the work must continue
            log.exception("background_task_failed", task=name)
        await asyncio.sleep(RESTART_SECONDS)
