"""An executor of `concurrent.futures` whose calls run as jobs, for libraries that take one."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import ParamSpec, TypeVar, Unpack

from cotenant.client.blocking import Client
from cotenant.client.job_fields import JobFields
from cotenant.client.mapping import RESULT_BYTES_MAX, WORKERS_DEFAULT, OnExit
from cotenant.client.remote_functions import own_client

P = ParamSpec("P")
R = TypeVar("R")


class Executor(concurrent.futures.Executor):
    """Runs calls as jobs with the same fields.

    `submit` makes a job of its own of each call; `map` makes one array of at most `workers` jobs, which take the items
    one after the other. `client` is the connection to use; without one, all executors of a process share one.

    >>> def main() -> None:
    ...     with Executor(gpus=1, cpus="auto") as executor:
    ...         print(list(executor.map(pow, range(10), range(10))))
    """

    def __init__(
        self,
        *,
        client: Client | None = None,
        workers: int = WORKERS_DEFAULT,
        on_exit: OnExit = "cancel",
        python: str = sys.executable,
        result_bytes_max: int = RESULT_BYTES_MAX,
        **fields: Unpack[JobFields],
    ) -> None:
        self._client = client or own_client(os.getpid())
        self._workers, self._on_exit, self._python = workers, on_exit, python
        self._result_bytes_max, self._fields = result_bytes_max, fields
        self._running: set[Future[object]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a call as a job, and return the future of its result.

        Raises:
            RuntimeError: the executor was shut down.
            InvalidArgument: names every bad field.
            CannotPickle: names what cannot be pickled.
        """
        self._check_running()
        return self._kept(
            self._client.call(
                fn,
                args,
                kwargs,
                on_exit=self._on_exit,
                python=self._python,
                result_bytes_max=self._result_bytes_max,
                **self._fields,
            )
        )

    def map(
        self, fn: Callable[..., R], /, *iterables: Iterable[object], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[R]:
        """Call a function with each item in jobs, and return the results in order.

        `chunksize` is ignored: an item costs no job of its own.

        Raises:
            RuntimeError: the executor was shut down.
            TimeoutError: by the iterator: a result is not there `timeout` seconds after this call.
        """
        self._check_running()
        deadline = None if timeout is None else time.monotonic() + timeout
        futures = self._client.map(
            fn,
            *iterables,
            workers=self._workers,
            on_exit=self._on_exit,
            python=self._python,
            result_bytes_max=self._result_bytes_max,
            **self._fields,
        )
        return _results([self._kept(future) for future in futures], deadline)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; `cancel_futures` cancels those that run too, since their jobs can be stopped."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        if cancel_futures:
            for future in running:
                future.cancel()
        if wait:
            concurrent.futures.wait(running)

    def _check_running(self) -> None:
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _kept(self, future: Future[R]) -> Future[R]:
        with self._lock:
            self._running.add(future)  # type: ignore[arg-type]  # a future of anything
        future.add_done_callback(self._running.discard)
        return future


def _results(futures: list[Future[R]], deadline: float | None) -> Iterator[R]:
    """Yield the results; cancel what is left if the iterator is closed early."""
    try:
        futures.reverse()
        while futures:
            result = futures[-1].result(None if deadline is None else deadline - time.monotonic())
            futures.pop()
            yield result
    finally:
        for future in futures:
            future.cancel()
