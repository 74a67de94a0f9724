"""Work spread over processes, which stops early on request."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event as Flag
from typing import Any, TypeVar

Task = TypeVar("Task")
Answer = TypeVar("Answer")
Stopped = Callable[[], bool]
Work = Callable[[Task, Stopped], Answer]
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process of a task ended before it answered; the reason is a guess."""

    why: str = "its process ended; perhaps it ran out of memory"


@contextmanager
def workers(
    work: Work[Task, Answer], processes: int, stopped: Stopped
) -> Iterator[Callable[[deque[Task]], Iterator[tuple[Task, Answer | WorkerDied]]]]:
    """Yield a function that answers tasks, including tasks added meanwhile: in this process, or in several others.

    `work` is a module-level function, and is told when to stop. Answers come as they are ready.
    """
    if processes == 1:
        yield lambda tasks: _in_this_process(work, tasks, stopped)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks held by other threads
    flag = context.Event()
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(flag,))
    try:
        yield lambda tasks: _in_pool(pool, work, processes, tasks, flag, stopped)
    finally:
        flag.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _in_this_process(
    work: Work[Task, Answer], tasks: deque[Task], stopped: Stopped
) -> Iterator[tuple[Task, Answer | WorkerDied]]:
    while tasks and not stopped():
        task = tasks.popleft()
        yield task, work(task, stopped)


def _in_pool(
    pool: ProcessPoolExecutor,
    work: Work[Task, Answer],
    processes: int,
    tasks: deque[Task],
    flag: Flag,
    stopped: Stopped,
) -> Iterator[tuple[Task, Answer | WorkerDied]]:
    waiting: dict[Future[Answer], tuple[int, Task]] = {}
    given = 0
    while (tasks and not stopped()) or waiting:
        while tasks and len(waiting) < processes and not stopped():
            task, given = tasks.popleft(), given + 1
            waiting[_submitted(pool, work, task)] = given, task
        done, _ = wait(waiting, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        if stopped():
            flag.set()
        for future in sorted(done, key=lambda future: waiting[future][0]):
            _, task = waiting.pop(future)
            try:
                yield task, future.result()
            except BrokenProcessPool:
                yield task, WorkerDied()


def _submitted(pool: ProcessPoolExecutor, work: Work[Task, Answer], task: Task) -> Future[Answer]:
    """Submit a task, which may start processes; those ignore Ctrl-C, which a terminal sends to the whole group."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return pool.submit(_answer, work, task)
    finally:
        signal.signal(signal.SIGINT, before)


_flag: Flag | None = None  # in a worker process: set when it is to stop


def _begin(flag: Flag) -> None:
    global _flag
    _flag = flag


def _answer(work: Work[Any, Answer], task: Any) -> Answer:
    assert _flag is not None
    return work(task, _flag.is_set)
