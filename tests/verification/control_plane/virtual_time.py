"""An event loop with a virtual clock, and processes: groups of tasks that can be killed and paused."""

from __future__ import annotations

import asyncio
import heapq
import secrets
import selectors
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from itertools import count
from random import Random
from typing import Any, ClassVar
from unittest import mock

from google.protobuf.internal import well_known_types

from cotenant.rpc.slices import Slices

BEGIN_UNIX_SECONDS = 1_700_000_000.0
TASKS_KEPT_MIN = 64
SLICE_STEPS = 8  # on average, of long work between two yields to the loop
BOUND: Any = asyncio.mixins._LoopBoundMixin  # private, like those below
ONE_TURN = asyncio.sleep
ALL_TASKS: Any = asyncio.tasks._all_tasks  # type: ignore[attr-defined]  # private


NOWHERE = Context()  # for timers without a context


class Deadlock(Exception):
    """All tasks wait, and no timer is set: the loop would never continue."""


class _Handle:
    """The used subset of asyncio's handles, without debugging support."""

    __slots__ = ("_when", "args", "callback", "context")

    def __init__(self, callback: Any, args: Any, context: Context, when: float = 0.0) -> None:
        self.callback, self.args, self.context, self._when = callback, args, context, when

    def call(self) -> None:
        """Run the callback, unless it was cancelled."""
        if self.callback is not None:
            self.callback(*self.args)

    def cancel(self) -> None:
        """Cancel the callback."""
        self.callback = self.args = None

    def done(self) -> bool:
        """Return whether the callback is cancelled; an awaited future can replace a handle."""
        return self.callback is None

    cancelled = done

    def when(self) -> float:
        """Return the scheduled time."""
        return self._when


_Turn = tuple[Callable[..., Any], tuple[Any, ...], Context]
_Timer = tuple[float, int, "_Handle | asyncio.Future[Any]", Any]  # a future gets the last element as its result


class _Task(asyncio.Task[Any]):
    """A task whose position in sets does not depend on its address."""

    numbers: ClassVar[Iterator[int]] = count()

    number: int

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """A lean event loop without I/O: each seed takes thousands of iterations. Work for threads is done at once."""

    _ready: deque[_Turn]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now, self._numbers = 1.0, count()
        self._timers: list[_Timer] = []  # timers of the same time fire in the order of creation
        # Hot paths of futures and tasks, without extra frames.
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]  # for speed
        self.get_debug = bool  # type: ignore[method-assign]  # which is False
        self.call_soon = _calling_soon(self._ready.append)  # type: ignore[assignment, method-assign]  # for speed
        self.call_soon_threadsafe = self.call_soon  # type: ignore[method-assign]  # there is one thread

    def time(self) -> float:
        """Return the seconds since the loop began."""
        return self._now

    def call_at(  # type: ignore[override]  # any arguments
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> _Handle:
        """Schedule a callback at a time."""
        timer = _Handle(callback, args, copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._numbers), timer, None))
        return timer

    def call_later(  # type: ignore[override]  # any arguments, as above
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> _Handle:
        """Schedule a callback after a delay."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def sleep(self, delay: float, result: Any = None) -> Awaitable[Any]:
        """Return a future that has this result after a delay, as asyncio does, unless it is cancelled before."""
        if delay <= 0:
            return ONE_TURN(0, result)
        future: asyncio.Future[Any] = self.create_future()
        heapq.heappush(self._timers, (self._now + delay, next(self._numbers), future, result))
        return future

    def create_task(  # type: ignore[override]  # names are words
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> _Task:
        """Create a task of the current process."""
        task = _Task(coro, loop=self, name=name or "task", context=context)
        task.number = next(_Task.numbers)
        if (owner := _process.get() if context is None else context.get(_process)) is not None:
            owner.tasks.append(task)
            if len(owner.tasks) > owner.tasks_max:
                owner.release()
        return task

    def _run_once(self) -> None:
        """Run iterations until the loop is stopped; without ready work, jump to the next timer."""
        ready, timers, take, come = self._ready, self._timers, self._ready.popleft, heapq.heappop
        while not self._stopping:
            if not ready:
                self._jump()
                continue
            while timers and timers[0][0] <= self._now:
                ready.append(_turn(come(timers)))
            for _ in range(len(ready)):
                callback, args, context = take()
                try:
                    context.run(callback, *args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"exception in {callback}", "exception": error})

    def _jump(self) -> None:
        """Advance to the next timer, and fire all timers of that time."""
        timers, come = self._timers, heapq.heappop
        while timers and timers[0][2].done():
            come(timers)
        if not timers:
            raise Deadlock
        due = [come(timers)]
        if due[0][0] > self._now:
            self._now = due[0][0]
        while timers and timers[0][0] <= self._now:
            due.append(come(timers))
        for timer in due:
            _, _, comes, result = timer
            if not isinstance(comes, _Handle):
                _wake(comes, result)
                continue
            try:
                comes.context.run(comes.call)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"exception in {comes.callback}", "exception": error})

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # any work is done in the same way
        """Run it at once."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def _calling_soon(append: Callable[[_Turn], None]) -> Callable[..., _Handle | None]:
    """Return a `call_soon`; with an explicit context, as from futures, it keeps no handle."""

    def call_soon(callback: Any, *args: Any, context: Context | None = None) -> _Handle | None:
        if context is not None:
            append((callback, args, context))
            return None
        handle = _Handle(callback, args, copy_context())
        append((handle.call, (), handle.context))
        return handle

    return call_soon


def _turn(timer: _Timer) -> _Turn:
    _, _, comes, result = timer
    if isinstance(comes, _Handle):
        return comes.call, (), comes.context
    return _wake, (comes, result), NOWHERE


def _wake(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


_process: ContextVar[Process | None] = ContextVar("process", default=None)


def current_process() -> Process | None:
    """Return the process of the running task."""
    return _process.get()


class Dead(Exception):
    """The process was killed."""


class Process:
    """A running program: its tasks, and whether it is scheduled at all."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.goes = True  # neither paused nor dead: no wait at the gate
        self.identity = ""  # of its leadership, or last candidacy
        self.clock_seconds = 0.0  # offset of its wall clock
        self._going = asyncio.Event()
        self._going.set()
        self.tasks: list[_Task] = []  # including running ones
        self.tasks_max = TASKS_KEPT_MIN
        self._context = copy_context()
        self._context.run(_process.set, self)

    def release(self) -> None:
        """Forget finished tasks."""
        self.tasks = [one for one in self.tasks if not one.done()]
        self.tasks_max = TASKS_KEPT_MIN + 2 * len(self.tasks)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start work in this process."""
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    def pause(self) -> None:
        """Pause it: it sends and receives nothing."""
        self._going.clear()
        self.goes = False

    def resume(self) -> None:
        """Resume it."""
        self._going.set()
        self.goes = not self.dead

    async def gate(self) -> None:
        """Wait while it is paused."""
        if self.dead:
            raise Dead(self.name)
        await self._going.wait()
        if self.dead:
            raise Dead(self.name)

    def cut(self) -> None:
        """Disconnect it from everything, from this moment on."""
        self.dead, self.goes = True, False
        self._going.set()

    async def halt(self) -> None:
        """Block while it is paused, and forever once it was cut."""
        if self.dead:
            await asyncio.get_running_loop().create_future()
        await self._going.wait()

    async def kill(self) -> None:
        """Kill it: the cleanup of its tasks has no effect outside."""
        self.cut()
        while tasks := [task for task in self.tasks if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)


@contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """Run a loop, with all clocks and random sources of services bound to it and to a seed."""
    loop, rng, slices = VirtualLoop(), Random(f"chance {seed}"), Random(f"slices {seed}")
    _Task.numbers = count()

    def now(self: Any) -> None:
        self.FromNanoseconds(time.time_ns())

    def unix() -> float:
        process = _process.get()
        return BEGIN_UNIX_SECONDS + loop.time() + (process.clock_seconds if process is not None else 0.0)

    def unix_ns() -> int:
        return int(unix() * 1e9)

    def token(size: int = 32) -> str:
        return rng.randbytes(size).hex()

    def only(_: Any) -> VirtualLoop:
        return loop

    def due(_: Slices) -> bool:
        return slices.random() * SLICE_STEPS < 1  # how far real work gets in a slice depends on the machine

    def drawn() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128))

    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter", loop.time),
        mock.patch.object(time, "thread_time", loop.time),
        mock.patch.object(Slices, "due", due),
        mock.patch.object(time, "time", unix),
        mock.patch.object(time, "time_ns", unix_ns),
        mock.patch.object(secrets, "randbits", rng.getrandbits),
        mock.patch.object(secrets, "token_hex", token),
        mock.patch.object(uuid, "uuid4", drawn),
        mock.patch.object(well_known_types.Timestamp, "GetCurrentTime", now),
        mock.patch.object(ALL_TASKS, "add", create=True, new=bool),  # never queried
        mock.patch.object(asyncio, "sleep", loop.sleep),
        mock.patch.object(BOUND, "_get_loop", only),
    ):
        asyncio.set_event_loop(loop)
        try:
            yield loop
        finally:
            asyncio.set_event_loop(None)
            loop.close()
