"""Runs a function over items as one array of jobs: workers that take items from a shared folder until none is left.

The folder is made in the current one, and nodes have to see it: they are this machine, or share a file system with it.
Workers claim one item after the other, so as many run at once as the cluster has room for, and short items cost no job
of their own. Results are read from the files that the workers append to; the queue tells which workers have ended.
"""

from __future__ import annotations

import atexit
import json
import pickle
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cotenant.cli.connection import Mesh
from cotenant.cli.jobs.follow import watch_until_ended
from cotenant.client import loop
from cotenant.client import map_worker as worker
from cotenant.client.aio import AsyncClient, AsyncJob, AsyncJobArray
from cotenant.client.errors import BadField, CotenantError, InvalidArgument
from cotenant.client.function_pickling import pickled_call, pickled_function
from cotenant.v1.job_pb2 import Job as JobMessage

WORKERS_DEFAULT = 100
ITEMS_MAX = 1_000_000
RESULT_BYTES_MAX = 64 * 2**20
LEASE_SECONDS, BEAT_SECONDS = 60.0, 5.0
POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.005, 0.25
END_SECONDS_MAX = 1.0  # workers that find no item left
STOP_SECONDS_MAX = 15.0
NOT_OF_A_MAP = ("array", "roles", "replicas", "replicas_min", "replicas_max", "role")
SCRIPT = (
    'test -r "$1/plan.json" || { echo "cotenant: this node does not see the folder $1: submit from one that is shared '
    f'with the nodes"; exit {worker.UNSEEN_FOLDER}; }}; exec "$2" "$1/worker.py" "$1"'
)

Call = tuple[tuple[Any, ...], Mapping[str, Any]]
OnExit = Literal["cancel", "keep"]


class RemoteTraceback(Exception):
    """The traceback of an exception in the process that raised it; the cause of the exception raised here."""

    def __str__(self) -> str:
        """Return the traceback."""
        return f'\n"""\n{self.args[0]}"""'


class ResultTooLarge(CotenantError):
    """A function returned more than a map passes on."""


class RemoteError(CotenantError):
    """A function raised an exception that cannot be pickled; its type and text are in the message."""


@dataclass(frozen=True, slots=True)
class MapOptions:
    """How a map runs. `python` is the interpreter on the nodes; `on_exit` says what happens if this process ends."""

    workers: int = WORKERS_DEFAULT
    on_exit: OnExit = "cancel"
    python: str = sys.executable
    result_bytes_max: int = RESULT_BYTES_MAX


def start_map(
    client: AsyncClient,
    function: Callable[..., Any],
    calls: Sequence[Call],
    options: MapOptions,
    fields: Mapping[str, Any],
) -> list[Future[Any]]:
    """Start calls of a function as jobs, and return their futures in order.

    Raises:
        InvalidArgument: names every bad field.
        CannotPickle: the function or an argument cannot be pickled.
    """
    _check(len(calls), options, fields)
    if not calls:
        return []
    pickles = [pickled_call(number, *call) for number, call in enumerate(calls)]
    folder = Path(tempfile.mkdtemp(prefix=".cotenant-map-", dir=Path.cwd()))
    try:
        _write(folder, pickled_function(function), pickles, options)
        count = min(len(calls), options.workers)
        named = {"name": getattr(function, "__name__", "map"), **fields}
        command = ["sh", "-c", SCRIPT, "cotenant-map", str(folder), options.python]
        array = loop.run(client.submit(command, array=range(count), **named))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Map(client, array, folder, len(calls), options.on_exit).futures


def _check(count: int, options: MapOptions, fields: Mapping[str, Any]) -> None:
    bad = [
        BadField(name, "not allowed for a function, which runs in single processes")
        for name in NOT_OF_A_MAP
        if name in fields
    ]
    if options.workers < 1:
        bad.append(BadField("workers", f"must be at least 1, not {options.workers}"))
    if options.on_exit not in ("cancel", "keep"):
        bad.append(BadField("on_exit", f"must be cancel or keep, not {options.on_exit!r}"))
    if count > ITEMS_MAX:
        bad.append(BadField("items", f"must be at most {ITEMS_MAX:,}, not {count:,}"))
    if bad:
        raise InvalidArgument("; ".join(map(str, bad)), fields=tuple(bad))


def _write(folder: Path, function: bytes, pickles: Sequence[bytes], options: MapOptions) -> None:
    """Write what the workers read; the plan comes last."""
    (folder / worker.CLAIMS).mkdir()
    (folder / worker.FUNCTION).write_bytes(function)
    (folder / worker.ALIVE).touch()
    shutil.copyfile(worker.__file__, folder / "worker.py")
    ends, end = [], 0
    with (folder / worker.ITEMS).open("wb") as file:
        for one in pickles:
            file.write(one)
            ends.append(end := end + len(one))
    plan = {
        "ends": ends,
        "python": sys.version_info[:2],
        "path": [path for path in sys.path if path],
        "result_bytes_max": options.result_bytes_max,
        "lease_seconds": LEASE_SECONDS if options.on_exit == "cancel" else 0,
    }
    (folder / worker.PLAN).write_text(json.dumps(plan))


class Map:
    """A map that runs: a thread reads results and sets the futures."""

    def __init__(self, client: AsyncClient, array: AsyncJobArray, folder: Path, count: int, on_exit: OnExit) -> None:
        self.client, self._array, self._folder = client, array, folder
        self._on_exit = on_exit
        self.futures: list[Future[Any]] = [Future() for _ in range(count)]
        self._left = set(range(count))
        self._read: dict[str, int] = {}  # by file of results: the bytes that were read
        self._ended: deque[tuple[int, Exception | None]] = deque()  # workers that have ended, and why they failed
        self._failure: Exception | None = None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"cotenant-map-{array.id}", daemon=True)
        _live.add(self)
        self._thread.start()

    def _run(self) -> None:
        watching = loop.start(self._watch())
        try:
            self._follow(watching)
        except Exception as error:  # such as a folder that was removed; nobody else would set the futures
            self._fail(set(self._left), error)
        self._clean(watching)

    def _follow(self, watching: Future[None]) -> None:
        """Set the futures as results come, until none is left."""
        pause = POLL_SECONDS_MIN
        while self._left:
            over = watching.done()
            if self._read_results() or self._fail_ended():
                pause = POLL_SECONDS_MIN
                continue
            self._drop_cancelled()
            if over:
                self._fail(self._left, self._failure or watching.exception() or CotenantError("no worker computed it"))
                break
            self._show_life()
            wait([watching], timeout=pause)
            pause = min(2 * pause, POLL_SECONDS_MAX)

    async def _watch(self) -> None:
        """Note the workers that end, until all have."""
        jobs = {job.id: number for number, job in enumerate(await self._array.jobs())}

        async def until_ended(mesh: Mesh) -> None:
            async for message in watch_until_ended(mesh, list(jobs), lambda job: None):
                self._ended.append((jobs[message.id], await self._error_of(message)))

        await self.client._call(until_ended)

    async def _error_of(self, message: JobMessage) -> Exception | None:
        job = AsyncJob(self.client, message)
        try:
            status = job.last_status
            return None if status.succeeded else await job._failure(status)
        except CotenantError as error:
            return error

    def _read_results(self) -> bool:
        """Set the futures of new results; return whether there were any."""
        found = False
        for path in self._folder.glob("results-*"):
            start = self._read.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            for item, kind, pickled, end in worker.records(data):
                self._read[path.name] = start + end
                self._set(item, kind, pickled)
                found = True
        return found

    def _set(self, item: int, kind: int, pickled: bytes) -> None:
        if item not in self._left:
            return
        self._left.discard(item)
        future = self.futures[item]
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = pickle.loads(pickled)
        except Exception as error:  # a class that only the node has
            future.set_exception(error)
            return
        if kind == worker.RETURNED:
            future.set_result(result)
        elif kind == worker.TOO_LARGE:
            future.set_exception(_too_large(*result))
        else:
            future.set_exception(_remote_error(*result))

    def _fail_ended(self) -> bool:
        """Fail what ended workers have claimed and not finished; return whether there was any."""
        found = False
        while self._ended:
            number, error = self._ended.popleft()
            self._read_results()
            claimed = self._left.intersection(worker.claims_of(self._folder, number))
            if error:
                self._failure = self._failure or error
                self._fail(claimed, error)
                found |= bool(claimed)
        return found

    def _fail(self, items: set[int], error: BaseException) -> None:
        for item in sorted(items):
            if self.futures[item].set_running_or_notify_cancel():
                self.futures[item].set_exception(error)
        self._left -= items

    def _drop_cancelled(self) -> None:
        """Claim cancelled items, so that no worker computes them."""
        for item in [item for item in self._left if self.futures[item].cancelled()]:
            worker.claim(self._folder, item, -1)
            self.futures[item].set_running_or_notify_cancel()
            self._left.discard(item)

    def _show_life(self) -> None:
        if time.monotonic() > self._beat + BEAT_SECONDS:
            self._beat = time.monotonic()
            (self._folder / worker.ALIVE).touch()

    def _clean(self, watching: Future[None]) -> None:
        """Cancel the workers that do not end by themselves, and remove the folder once all have ended."""
        try:
            wait([watching], timeout=END_SECONDS_MAX)
            if not watching.done():
                loop.run(self._array.cancel())
                wait([watching], timeout=STOP_SECONDS_MAX)
        except (CotenantError, CancelledError):
            pass  # the results are there; workers without a folder end by themselves
        shutil.rmtree(self._folder, ignore_errors=True)
        _live.discard(self)

    def end(self) -> None:
        """Wait for the end of a finished map; cancel an unfinished one, or leave its jobs alone if they are kept."""
        if not self._left:
            self._thread.join(STOP_SECONDS_MAX)
            return
        if self._on_exit == "keep":
            _live.discard(self)
            return
        for future in self.futures:
            future.cancel()  # the thread then stops the workers
        self._thread.join(STOP_SECONDS_MAX)


def end_maps(client: AsyncClient | None = None) -> None:
    """End the maps of a client, or of all."""
    for one in list(_live):
        if client in (None, one.client):
            one.end()


def _remote_error(error: BaseException | None, name: str, text: str, shown: str) -> BaseException:
    """Return the exception of a function, caused by its remote traceback."""
    raised = error if error is not None else RemoteError(f"{name}: {text}", reason="REMOTE_ERROR")
    raised.__cause__ = RemoteTraceback(shown)
    return raised


def _too_large(item: int, size: int, most: int) -> ResultTooLarge:
    return ResultTooLarge(
        f"item {item} returned {size:,} bytes, pickled; at most {most:,} are passed on",
        reason="RESULT_TOO_LARGE",
        hint="write it to a file and return its path, or raise result_bytes_max",
    )


_live: weakref.WeakSet[Map] = weakref.WeakSet()


atexit.register(end_maps)
