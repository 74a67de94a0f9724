"""Functions that run as jobs: `@cotenant.job(gpus=1)` and `cotenant.map(f, xs, gpus=1)`, over one client."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

from cotenant.client.blocking import Client
from cotenant.client.job_fields import JobFields
from cotenant.client.mapping import RESULT_BYTES_MAX, WORKERS_DEFAULT, OnExit

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def own_client(process: int) -> Client:
    """Return the client that all functions of a process share."""
    return Client()


def map(
    function: Callable[..., R],
    /,
    *iterables: Iterable[Any],
    workers: int = WORKERS_DEFAULT,
    on_exit: OnExit = "cancel",
    python: str = sys.executable,
    result_bytes_max: int = RESULT_BYTES_MAX,
    **fields: Unpack[JobFields],
) -> list[Future[R]]:
    """Call a function with each item, in jobs, and return a future for each, in order; see `Client.map`."""
    return own_client(os.getpid()).map(
        function,
        *iterables,
        workers=workers,
        on_exit=on_exit,
        python=python,
        result_bytes_max=result_bytes_max,
        **fields,
    )


class RemoteFunction(Generic[P, R]):
    """A function whose calls run as jobs and return futures. `__wrapped__` is the function itself, to call it here."""

    def __init__(self, function: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run the function in a job, and return the future of its result."""
        return own_client(os.getpid()).call(self.__wrapped__, args, kwargs, **self._options)

    def map(self, *iterables: Iterable[Any]) -> list[Future[R]]:
        """Call the function with each item, in jobs, and return a future for each, in order."""
        return map(self.__wrapped__, *iterables, **self._options)


def job(
    *, on_exit: OnExit = "cancel", python: str = sys.executable, **fields: Unpack[JobFields]
) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]:
    """Return a decorator for functions whose calls run as jobs with these fields.

    >>> @job(gpus=1, cpus="auto")
    ... def train(rate: float) -> float: ...
    >>> train.__name__
    'train'
    """

    def decorate(function: Callable[P, R]) -> RemoteFunction[P, R]:
        return RemoteFunction(function, {"on_exit": on_exit, "python": python, **fields})

    return decorate
