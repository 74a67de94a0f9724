"""The blocking client: the asynchronous one, driven on an event loop in a thread.

So there is one implementation of calls, retries and streams, and it also works in notebooks, whose thread already runs
a loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import PurePath
from typing import Any, Self, TypeVar, Unpack, cast, overload

from cotenant.client.aio import AsyncClient, AsyncJob, AsyncJobArray, AsyncSchedule, Command, Explanation, JobList
from cotenant.client.errors import WaitTimeout
from cotenant.client.job_fields import JobFields
from cotenant.client.loop import run
from cotenant.client.mapping import RESULT_BYTES_MAX, WORKERS_DEFAULT, MapOptions, OnExit, end_maps, start_map
from cotenant.client.schedules import Overlap, ScheduleStatus
from cotenant.client.secrets import Secret
from cotenant.client.status import JobStatus

T = TypeVar("T")
R = TypeVar("R")


def _within(work: Coroutine[Any, Any, T], seconds: float | None, waited_for: str) -> T:
    """Return what a coroutine returns, which waits for a job or an array.

    Raises:
        WaitTimeout: it took longer.
    """

    async def limited() -> T:
        async with asyncio.timeout(seconds):
            return await work

    try:
        return run(limited())
    except TimeoutError:
        raise WaitTimeout(f"{waited_for} has not ended after {seconds:g} s; it keeps running") from None


class Client:
    """A client of a mesh, found as commands find it: arguments, environment, configuration file, state folder.

    >>> def main() -> None:
    ...     with Client() as client:
    ...         job = client.submit(["python3", "train.py"], gpus=1, cpus="auto")
    ...         print(job.result())
    """

    def __init__(
        self,
        endpoint: str = "",
        *,
        token: str = "",
        state_dir: str | PurePath = "",
        tls_ca: str | PurePath = "",
        tls_cert: str | PurePath = "",
        tls_key: str | PurePath = "",
    ) -> None:
        self._client = AsyncClient(
            endpoint, token=token, state_dir=state_dir, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end unfinished maps as if this process ended. Other jobs are not affected."""
        end_maps(self._client)
        run(self._client.close())

    @overload
    def submit(
        self,
        command: Command,
        *,
        array: str | Iterable[int],
        request_id: str = "",
        empty_workdir: bool = False,
        **fields: Unpack[JobFields],
    ) -> JobArray: ...
    @overload
    def submit(
        self,
        command: Command,
        *,
        array: None = None,
        request_id: str = "",
        empty_workdir: bool = False,
        **fields: Unpack[JobFields],
    ) -> Job: ...
    def submit(
        self,
        command: Command,
        *,
        array: str | Iterable[int] | None = None,
        request_id: str = "",
        empty_workdir: bool = False,
        **fields: Unpack[JobFields],
    ) -> Job | JobArray:
        """Submit a job, or with `array` a job for each index, and return it.

        A command of several words runs as is, a text by the shell. The fields are those of job files. Without `workdir`
        a job starts in the current folder on the nodes that have it. `request_id` makes a retry idempotent.

        Raises:
            InvalidArgument: names every invalid field.
        """
        own: dict[str, Any] = {"array": array, "request_id": request_id, "empty_workdir": empty_workdir}
        return _blocking(run(self._client.submit(command, **own, **fields)))

    def validate(
        self, command: Command, *, array: str | Iterable[int] | None = None, **fields: Unpack[JobFields]
    ) -> None:
        """Check whether a job would be accepted, without submitting it.

        Raises:
            InvalidArgument: names every invalid field.
        """
        run(self._client.validate(command, array=array, **fields))

    def job(self, id_or_name: str) -> Job:
        """Return the job with this id or name, a unique part of its id, or `@last`.

        Raises:
            NotFound: there is none.
            InvalidArgument: several match, or it is an array.
        """
        return Job(run(self._client.job(id_or_name)))

    def find(self, id_or_name: str) -> Job | JobArray:
        """Return the job or array with this id or name.

        Raises:
            NotFound: there is none.
        """
        return _blocking(run(self._client.find(id_or_name)))

    def jobs(
        self,
        *,
        all: bool = False,
        phase: str | Sequence[str] = (),
        tenant: str = "",
        queue: str = "",
        name: str = "",
        labels: dict[str, str] | None = None,
        mine: bool = False,
        limit: int | None = None,
    ) -> JobList[Job]:
        """Return the matching jobs, newest first: those that have not ended, unless `all` or `phase` says otherwise."""
        found = run(
            self._client.jobs(
                all=all, phase=phase, tenant=tenant, queue=queue, name=name, labels=labels, mine=mine, limit=limit
            )
        )
        return JobList(Job(one) for one in found)

    def create_schedule(
        self,
        command: Command,
        *,
        every: str,
        time_zone: str = "",
        overlap: Overlap = "skip",
        request_id: str = "",
        **fields: Unpack[JobFields],
    ) -> Schedule:
        """Create a schedule that submits this job again and again, and return it.

        `every` is five fields of cron, a name such as "@daily", or a period such as "6h"; `time_zone` is that of the
        five fields. `overlap` says what happens while an earlier job has not ended: "skip" submits nothing, "queue"
        lets the job wait, "replace" cancels the earlier one. `request_id` makes a retry idempotent.

        Raises:
            InvalidArgument: names every invalid field.
        """
        own: dict[str, Any] = {"every": every, "time_zone": time_zone, "overlap": overlap, "request_id": request_id}
        return Schedule(run(self._client.create_schedule(command, **own, **fields)))

    def schedule(self, id: str) -> Schedule:
        """Return the schedule with this id.

        Raises:
            NotFound: there is none.
        """
        return Schedule(run(self._client.schedule(id)))

    def schedules(self) -> list[Schedule]:
        """Return the schedules of the caller's tenants, by id."""
        return [Schedule(one) for one in run(self._client.schedules())]

    def set_secret(self, name: str, value: str | bytes, *, tenant: str = "") -> Secret:
        """Set a secret: create it, or replace its value for attempts that start from now on.

        Raises:
            InvalidArgument: names every invalid field, without anything of the value.
        """
        return run(self._client.set_secret(name, value, tenant=tenant))

    def secrets(self, *, tenant: str = "") -> list[Secret]:
        """Return the secrets of a tenant, or of all tenants of the caller, without their values."""
        return run(self._client.secrets(tenant=tenant))

    def delete_secret(self, name: str, *, tenant: str = "") -> None:
        """Delete a secret. Jobs that name it and have not started wait until it is set again.

        Raises:
            NotFound: there is none.
        """
        run(self._client.delete_secret(name, tenant=tenant))

    def map(
        self,
        function: Callable[..., R],
        /,
        *iterables: Iterable[Any],
        workers: int = WORKERS_DEFAULT,
        on_exit: OnExit = "cancel",
        python: str = sys.executable,
        result_bytes_max: int = RESULT_BYTES_MAX,
        **fields: Unpack[JobFields],
    ) -> list[Future[R]]:
        """Call a function with each item, in jobs, and return a future for each, in order.

        At most `workers` jobs, which form one array, take the items one after the other. Several iterables are read in
        parallel, as by the built-in `map`. The current folder has to be visible to the nodes. If the client is closed
        early, or this process ends, the jobs are cancelled, or with `on_exit="keep"` continue. `python` is the
        interpreter on the nodes.

        Raises:
            InvalidArgument: names every bad field.
            CannotPickle: names what cannot be pickled.
        """
        calls = [(args, dict[str, Any]()) for args in zip(*iterables, strict=False)]
        options = MapOptions(workers, on_exit, python, result_bytes_max)
        return start_map(self._client, function, calls, options, cast("dict[str, Any]", fields))

    def call(
        self,
        function: Callable[..., R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        on_exit: OnExit = "cancel",
        python: str = sys.executable,
        result_bytes_max: int = RESULT_BYTES_MAX,
        **fields: Unpack[JobFields],
    ) -> Future[R]:
        """Call a function once, in a job, and return the future of its result; see `map`."""
        options = MapOptions(1, on_exit, python, result_bytes_max)
        calls = [(tuple(args), kwargs or {})]
        return start_map(self._client, function, calls, options, cast("dict[str, Any]", fields))[0]


def _blocking(found: AsyncJob | AsyncJobArray) -> Job | JobArray:
    return Job(found) if isinstance(found, AsyncJob) else JobArray(found)


class Job:
    """A job that the queue has accepted."""

    def __init__(self, job: AsyncJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return repr(self._job).replace("AsyncJob", "Job", 1)

    def _repr_html_(self) -> str:
        return self._job._repr_html_()

    @property
    def id(self) -> str:
        """Its id."""
        return self._job.id

    @property
    def name(self) -> str:
        """Its name; "" without one."""
        return self._job.name

    @property
    def last_status(self) -> JobStatus:
        """Its state when it was last read."""
        return self._job.last_status

    @property
    def phase(self) -> str:
        """Its present phase, such as `running`; read from the queue."""
        return self.status().phase

    def status(self) -> JobStatus:
        """Return its present state."""
        return run(self._job.status())

    def wait(self, timeout: float | None = None) -> JobStatus:
        """Wait until the job has ended, whatever the outcome; also through a restart of the mesh.

        Raises:
            WaitTimeout: it has not ended after so many seconds; it keeps running.
        """
        return _within(self._job.wait(), timeout, self.id)

    def result(self, timeout: float | None = None) -> str:
        """Wait for the job's success, and return its output: the last MiB of it.

        Raises:
            JobFailed: it failed, with its exit code and the last lines of its output; JobCancelled: it was cancelled.
            WaitTimeout: it has not ended after so many seconds.
        """
        return _within(self._job.result(), timeout, self.id)

    def output(self, *, tail_bytes: int = 0, rank: int | None = None, attempt: int = 0) -> str:
        """Return what its processes have written so far, or the last bytes of it; "" before it starts."""
        return run(self._job.output(tail_bytes=tail_bytes, rank=rank, attempt=attempt))

    def logs(self, *, follow: bool = True, rank: int | None = None, tail_bytes: int = 0) -> Iterator[str]:
        """Yield the lines of its output: of all attempts until the job has ended, or with `follow=False` so far."""
        lines = self._job.logs(follow=follow, rank=rank, tail_bytes=tail_bytes)
        try:
            while (line := run(_next(lines))) is not None:
                yield line
        finally:
            run(lines.aclose())

    def explain(self) -> Explanation:
        """Return why the job is in its state, what would change it, and when it will probably start."""
        return run(self._job.explain())

    def cancel(self) -> JobStatus:
        """Cancel the job; this changes nothing if it has ended. Its processes get their grace."""
        return run(self._job.cancel())

    def suspend(self) -> JobStatus:
        """Suspend the job until `resume`; if it runs, its processes are warned and stopped first."""
        return run(self._job.suspend())

    def resume(self) -> JobStatus:
        """Requeue a suspended job, or one that was submitted with `hold`."""
        return run(self._job.resume())

    def rerun(self) -> Job | JobArray:
        """Submit it again as a new job, and return that; a task of an array becomes an array of its index.

        What belonged to that submission is dropped: dependencies, begin time, `hold`, and a deadline that has passed.
        """
        return _blocking(run(self._job.rerun()))

    def fetch(self, path: str = "", to: str | PurePath = ".", *, rank: int = 0, attempt: int = 0) -> int:
        """Copy a file or folder of its working directory to this machine, as `cotenant cp`; return how many files.

        Into `to` if that is a folder, else as `to`; without a path, all of it into `to`. `attempt` 0 is the last.

        Raises:
            CotenantError: with the reason NOT_ALL_COPIED if some of it could not be copied.
        """
        return run(self._job.fetch(path, to, rank=rank, attempt=attempt))


async def _next(lines: AsyncIterator[str]) -> str | None:
    return await anext(lines, None)


class JobArray:
    """An array: a job for each index."""

    def __init__(self, array: AsyncJobArray) -> None:
        self._array = array

    def __repr__(self) -> str:
        return repr(self._array).replace("AsyncJobArray", "JobArray", 1)

    @property
    def id(self) -> str:
        """Its id."""
        return self._array.id

    @property
    def counts(self) -> dict[str, int]:
        """The number of its jobs in each phase when it was last read."""
        return self._array.counts

    def status(self) -> dict[str, int]:
        """Return the number of its jobs in each phase now."""
        return run(self._array.status())

    def jobs(self) -> JobList[Job]:
        """Return its jobs, by index."""
        return JobList(Job(one) for one in run(self._array.jobs()))

    def wait(self, timeout: float | None = None) -> JobList[Job]:
        """Wait until all of its jobs have ended, and return them by index.

        Raises:
            WaitTimeout: some have not ended after so many seconds.
        """
        return JobList(Job(one) for one in _within(self._array.wait(), timeout, self.id))

    def result(self, timeout: float | None = None) -> list[str]:
        """Wait for the success of all jobs, and return their output by index.

        Raises:
            JobFailed: the first job, by index, that did not succeed.
        """
        return _within(self._array.result(), timeout, self.id)

    def cancel(self) -> dict[str, int]:
        """Cancel its jobs that have not ended, and return the number of jobs in each phase."""
        return run(self._array.cancel())


class Schedule:
    """A schedule: at each of its due times, a job is submitted."""

    def __init__(self, schedule: AsyncSchedule) -> None:
        self._schedule = schedule

    def __repr__(self) -> str:
        return repr(self._schedule).replace("AsyncSchedule", "Schedule", 1)

    @property
    def id(self) -> str:
        """Its id."""
        return self._schedule.id

    @property
    def last_status(self) -> ScheduleStatus:
        """Its state when it was last read."""
        return self._schedule.last_status

    def status(self) -> ScheduleStatus:
        """Return its present state."""
        return run(self._schedule.status())

    def pause(self) -> ScheduleStatus:
        """Submit nothing until `resume`. Jobs that were submitted continue."""
        return run(self._schedule.pause())

    def resume(self) -> ScheduleStatus:
        """Submit again, from the next due time on."""
        return run(self._schedule.resume())

    def run(self) -> Job:
        """Submit its job now, also if it is paused, and return that; the due times stay as they are."""
        return Job(run(self._schedule.run()))

    def delete(self) -> None:
        """Delete the schedule. Jobs that were submitted continue."""
        run(self._schedule.delete())
