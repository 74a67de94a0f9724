"""Work that goes on beside whoever asked for it, and whose failures are never silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import structlog

from cotenant.codec.errors import Problem
from cotenant.rpc.task_cancellation import end
from cotenant.store.port import StoreUnavailable

log = structlog.get_logger()

RESTART_SECONDS = 1.0

Result = TypeVar("Result")


class Background:
    """Tasks that are ended together. `refusals` are errors for callers alone, beside those of every service."""

    def __init__(self, *refusals: type[Exception]) -> None:
        self._refusals = (Problem, StoreUnavailable, *refusals)
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin something that nobody waits for; what it fails of is told."""
        task = self._hold(asyncio.create_task(work))
        task.add_done_callback(_tell)
        return task

    def forever(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Keep something going; where it fails that is told, and it begins anew."""
        self._hold(asyncio.create_task(_forever(name, work), name=name))

    async def finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do something to its end, even where the caller goes away meanwhile."""
        task = self._hold(asyncio.create_task(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._tell_but_refusals)
            raise

    def _hold(self, task: asyncio.Task[Result]) -> asyncio.Task[Result]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell_but_refusals(self, task: asyncio.Task[Any]) -> None:
        """A refusal was for the caller, who has gone."""
        if not task.cancelled() and not isinstance(task.exception(), self._refusals):
            _tell(task)

    async def close(self) -> None:
        """Cancel everything and wait for its end."""
        await end(*self._tasks)


def _tell(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("background_failed", exc_info=error)


async def _forever(name: str, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await work()
        except Exception:  # whatever it is, the work must go on
            log.exception("background_failed", task=name)
        await asyncio.sleep(RESTART_SECONDS)
