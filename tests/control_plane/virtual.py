"""A loop whose clock jumps to whatever comes next, and processes: groups of tasks that can be killed and paused."""

from __future__ import annotations

import asyncio
import heapq
import secrets
import selectors
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import Any, ClassVar
from unittest import mock

from google.protobuf.internal import well_known_types

BEGIN_UNIX_SECONDS = 1_700_000_000.0


class NothingComes(Exception):
    """All wait, and nothing is planned: it would never go on."""


class _Handle(asyncio.Handle):
    """As asyncio's own, without what is for debugging."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _Timer(asyncio.TimerHandle):
    """As asyncio's own; of those that are due at the same moment the first that was asked for comes first."""

    __slots__ = ("_number",)

    def __init__(self, when: float, number: int, callback: Any, args: Any, loop: Any, context: Context | None) -> None:
        self._when, self._number, self._scheduled = when, number, True
        self._context = copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def __lt__(self, other: Any) -> bool:
        if self._when == other._when:
            return bool(self._number < other._number)
        return bool(self._when < other._when)


class _Task(asyncio.Task[Any]):
    """A task whose place in sets does not depend on its address."""

    numbers: ClassVar[Iterator[int]] = count()

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.number = next(self.numbers)
        super().__init__(*args, **fields)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without IO, and lean: half of a seed's time is spent here. Threads' work is done at once."""

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now, self._numbers = 1.0, count()
        self._timers: list[_Timer] = []
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Seconds since the loop began."""
        return self._now

    def call_soon(  # type: ignore[override]  # any arguments
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call it in the next turn."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]  # any arguments, as above
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call it once it is that late."""
        timer = _Timer(when, next(self._numbers), callback, args, self, context)
        heapq.heappush(self._timers, timer)
        return timer

    def call_later(  # type: ignore[override]  # any arguments, as above
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call it after a while."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def _run_once(self) -> None:
        """Take one turn; where nothing is to be done now, it is at once as late as it has to be."""
        ready, timers = self._ready, self._timers
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)
        if not ready and not self._stopping:
            if not timers:
                raise NothingComes
            self._now = max(self._now, timers[0]._when)
        while timers and timers[0]._when <= self._now:
            timer = heapq.heappop(timers)
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # any work is done in the same way
        """Do it at once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


_process: ContextVar[Process | None] = ContextVar("process", default=None)


def _make_task(loop: Any, coro: Any, context: Context | None = None, **fields: Any) -> _Task:
    owner = context.get(_process) if context is not None else _process.get()
    task = _Task(coro, loop=loop, context=context, **fields)
    if owner is not None:
        owner.hold(task)
    return task


def current_process() -> Process | None:
    """The process to which the running task belongs."""
    return _process.get()


class Dead(Exception):
    """The process was killed."""


class Process:
    """A program that runs: its tasks, and whether it gets any time of the processor's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.identity = ""  # under which it leads, or last tried to
        self._goes = asyncio.Event()
        self._goes.set()
        self._tasks: dict[int, _Task] = {}
        self._context = copy_context()
        self._context.run(_process.set, self)

    def hold(self, task: _Task) -> None:
        """Take a task as this process's own."""
        self._tasks[task.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(task.number, None))

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something in this process."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def pause(self) -> None:
        """Give it no time: nothing of it reaches anybody, and nothing reaches it."""
        self._goes.clear()

    def resume(self) -> None:
        """Let it go on, as if nothing had happened."""
        self._goes.set()

    async def gate(self) -> None:
        """Wait while it is paused."""
        if self.dead:
            raise Dead(self.name)
        await self._goes.wait()
        if self.dead:
            raise Dead(self.name)

    def cut(self) -> None:
        """Let nothing of it reach anybody from this moment on."""
        self.dead = True
        self._goes.set()

    async def halt(self) -> None:
        """Go no further here while it is paused, and never once it was cut."""
        if self.dead:
            await asyncio.get_running_loop().create_future()
        await self._goes.wait()

    async def kill(self) -> None:
        """End it: what it does on its way out reaches nobody."""
        self.cut()
        while self._tasks:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)


@contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """A loop, and all clocks and sources of chance that services use bound to it and to a seed."""
    loop, rng = VirtualLoop(), Random(f"chance {seed}")
    _Task.numbers = count()

    def now(self: Any) -> None:
        self.FromNanoseconds(time.time_ns())

    def unix() -> float:
        return BEGIN_UNIX_SECONDS + loop.time()

    def unix_ns() -> int:
        return int(unix() * 1e9)

    def token(size: int = 32) -> str:
        return rng.randbytes(size).hex()

    def drawn() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128))

    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "time", unix),
        mock.patch.object(time, "time_ns", unix_ns),
        mock.patch.object(secrets, "randbits", rng.getrandbits),
        mock.patch.object(secrets, "token_hex", token),
        mock.patch.object(uuid, "uuid4", drawn),
        mock.patch.object(well_known_types.Timestamp, "GetCurrentTime", now),
    ):
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()
