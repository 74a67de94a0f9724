"""The event loop of the blocking client, in a thread: all clients of a process share it, and a fork gets its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class _LoopThread:
    """An event loop that runs in a thread of its own, until the process ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="cotenant-client", daemon=True).start()


_lock = threading.Lock()
_running: _LoopThread | None = None


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine on the loop of this process."""
    global _running
    with _lock:
        if _running is None or _running.pid != os.getpid():
            _running = _LoopThread()
        return asyncio.run_coroutine_threadsafe(work, _running.loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns on the loop; an interruption cancels it."""
    running = start(work)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise
