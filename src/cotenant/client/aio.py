"""The asynchronous client: submits jobs, finds them, follows them and reads their output.

It reads jobs, resolves names and resumes streams with the code of the commands, and calls through the same channels:
the method table says what is retried and how long a call may take. `Client` drives it from a thread.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from pathlib import PurePath
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, Unpack, overload

import grpc
import grpc.aio

from cotenant.cli.arrays import counts
from cotenant.cli.connection import Mesh, is_unreachable
from cotenant.cli.jobs.earlier_job import draft_like
from cotenant.cli.jobs.explain import explanation_view
from cotenant.cli.jobs.folder_download import Download, target_of
from cotenant.cli.jobs.follow import Output, copy_output, follow, is_gang, watch_until_ended
from cotenant.cli.jobs.job_file import BadJobs, Draft
from cotenant.cli.jobs.job_lines import outcome_line
from cotenant.cli.jobs.schedules import all_schedules
from cotenant.cli.jobs.secrets import all_secrets
from cotenant.cli.jobs.submit import create, resolve_ids
from cotenant.cli.jobs.submit_order import Step
from cotenant.cli.jobs.work_files import Wanted, clean_path, read_parts
from cotenant.cli.name_lookup import all_jobs, find_job, find_job_or_array, phase_of, read_tasks
from cotenant.cli.source_positions import MapNode, SourcePosition
from cotenant.client.errors import CotenantError, JobCancelled, JobFailed, as_api_errors
from cotenant.client.job_fields import JobFields, draft_of
from cotenant.client.schedules import Overlap, ScheduleStatus, check_overlap, create_schedule, schedule_status
from cotenant.client.secrets import Secret, secret_of, set_request
from cotenant.client.status import JobStatus, html_table, status_of
from cotenant.codec.errors import from_error
from cotenant.codec.specs import PHASES
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.rpc.access import NO_TLS, Access, expand_home, find
from cotenant.v1.array_service_pb2 import Array as ArrayMessage
from cotenant.v1.array_service_pb2 import CancelArrayRequest, GetArrayRequest
from cotenant.v1.job_pb2 import Job as JobMessage
from cotenant.v1.job_service_pb2 import (
    JOB_VIEW_BASIC,
    CancelJobRequest,
    ExplainJobRequest,
    GetJobRequest,
    JobFilter,
    ReadLogsRequest,
    ResumeJobRequest,
    SuspendJobRequest,
)
from cotenant.v1.schedule_service_pb2 import (
    DeleteScheduleRequest,
    GetScheduleRequest,
    PauseScheduleRequest,
    ResumeScheduleRequest,
    RunScheduleRequest,
)
from cotenant.v1.schedule_service_pb2 import Schedule as ScheduleMessage
from cotenant.v1.secret_service_pb2 import DeleteSecretRequest

T = TypeVar("T")
Command = str | PurePath | Sequence[str | PurePath]
TAIL_LINES = 20  # of the output, in the error of a failed job
TAIL_BYTES = 16 * 2**10
RESULT_BYTES_MAX = 2**20
PROBLEMS_MAX = 10  # of a copy, in its error

log = logging.getLogger("cotenant")


class Settings(NamedTuple):
    """Connection settings; what is empty is found as commands find it."""

    endpoint: str = ""
    token: str = ""
    state_dir: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    def access(self) -> Access:
        """Return where the services are, and the credentials.

        Raises:
            AccessError: nothing names the services, or the settings cannot be read.
        """
        directory = expand_home(self.state_dir, "state_dir") if self.state_dir else None
        tls = (self.tls_ca, self.tls_cert, self.tls_key)
        return find(directory, os.environ, endpoint=self.endpoint, token=self.token, tls=tls if any(tls) else NO_TLS)


class AsyncClient:
    """A client for asyncio. Nothing is sent before the first call.

    >>> async def main() -> None:
    ...     async with AsyncClient() as client:
    ...         job = await client.submit(["python3", "train.py"], gpus=1, cpus="auto")
    ...         print(await job.result())
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
        settings = Settings(endpoint, token, str(state_dir), str(tls_ca), str(tls_cert), str(tls_key))
        with as_api_errors():
            self._mesh = Mesh(settings.access, report=log.warning)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Jobs are not affected."""
        await self._mesh.close()

    @overload
    async def submit(
        self,
        command: Command,
        *,
        array: str | Iterable[int],
        request_id: str = "",
        empty_workdir: bool = False,
        **fields: Unpack[JobFields],
    ) -> AsyncJobArray: ...
    @overload
    async def submit(
        self,
        command: Command,
        *,
        array: None = None,
        request_id: str = "",
        empty_workdir: bool = False,
        **fields: Unpack[JobFields],
    ) -> AsyncJob: ...
    async def submit(
        self,
        command: Command,
        *,
        array: str | Iterable[int] | None = None,
        request_id: str = "",
        empty_workdir: bool = False,
        **fields: Unpack[JobFields],
    ) -> AsyncJob | AsyncJobArray:
        """Submit a job, or with `array` a job for each index, and return it.

        A command of several words runs as is, a text by the shell. The fields are those of job files. Without `workdir`
        a job starts in the current folder on the nodes that have it. `request_id` makes a retry idempotent.

        Raises:
            InvalidArgument: names every invalid field.
        """
        with as_api_errors():
            draft = draft_of(command, fields, array=array, empty_workdir=empty_workdir)
        request_id = request_id or uuid.uuid4().hex
        return self._of(await self._call(lambda mesh: _create(mesh, draft, request_id)))

    @overload
    async def validate(self, command: Command, *, array: str | Iterable[int], **fields: Unpack[JobFields]) -> None: ...
    @overload
    async def validate(self, command: Command, *, array: None = None, **fields: Unpack[JobFields]) -> None: ...
    async def validate(
        self, command: Command, *, array: str | Iterable[int] | None = None, **fields: Unpack[JobFields]
    ) -> None:
        """Check whether a job would be accepted, without submitting it.

        Raises:
            InvalidArgument: names every invalid field.
        """
        with as_api_errors():
            draft = draft_of(command, fields, array=array)
        await self._call(lambda mesh: _create(mesh, draft, "", validate_only=True))

    async def job(self, id_or_name: str) -> AsyncJob:
        """Return the job with this id or name, a unique part of its id, or `@last`.

        Raises:
            NotFound: there is none.
            InvalidArgument: several match, or it is an array.
        """
        return AsyncJob(self, await self._call(lambda mesh: find_job(mesh, id_or_name)))

    async def find(self, id_or_name: str) -> AsyncJob | AsyncJobArray:
        """Return the job or array with this id or name.

        Raises:
            NotFound: there is none.
        """
        return self._of(await self._call(lambda mesh: find_job_or_array(mesh, id_or_name)))

    async def jobs(
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
    ) -> JobList[AsyncJob]:
        """Return the matching jobs, newest first: those that have not ended, unless `all` or `phase` says otherwise."""
        phases = [Phase(one) for one in ([phase] if isinstance(phase, str) else phase)]
        if not phases and not all:
            phases = [one for one in Phase if one not in ENDED]
        wanted = JobFilter(
            phases=map(PHASES.to_wire, phases), tenant=tenant, queue=queue, name=name, labels=labels, own_only=mine
        )

        async def read(mesh: Mesh) -> list[JobMessage]:
            found: list[JobMessage] = []
            async for job in all_jobs(mesh, wanted, view=JOB_VIEW_BASIC):
                if limit is not None and len(found) >= limit:
                    break
                found.append(job)
            return found

        return JobList(AsyncJob(self, job) for job in await self._call(read))

    async def create_schedule(
        self,
        command: Command,
        *,
        every: str,
        time_zone: str = "",
        overlap: Overlap = "skip",
        request_id: str = "",
        **fields: Unpack[JobFields],
    ) -> AsyncSchedule:
        """Create a schedule that submits this job again and again, and return it.

        `every` is five fields of cron, a name such as "@daily", or a period such as "6h"; `time_zone` is that of the
        five fields. `overlap` says what happens while an earlier job has not ended: "skip" submits nothing, "queue"
        lets the job wait, "replace" cancels the earlier one. `request_id` makes a retry idempotent.

        Raises:
            InvalidArgument: names every invalid field.
        """
        check_overlap(overlap)
        with as_api_errors():
            draft = draft_of(command, fields)
        key = request_id or uuid.uuid4().hex
        made = await self._call(lambda mesh: create_schedule(mesh, draft, every, time_zone, overlap, key))
        return AsyncSchedule(self, made)

    async def schedule(self, id: str) -> AsyncSchedule:
        """Return the schedule with this id.

        Raises:
            NotFound: there is none.
        """
        request = GetScheduleRequest(id=id)
        return AsyncSchedule(self, (await self._call(lambda mesh: mesh.schedules.GetSchedule(request))).schedule)

    async def schedules(self) -> list[AsyncSchedule]:
        """Return the schedules of the caller's tenants, by id."""

        async def read(mesh: Mesh) -> list[AsyncSchedule]:
            return [AsyncSchedule(self, one) async for one in all_schedules(mesh)]

        return await self._call(read)

    async def set_secret(self, name: str, value: str | bytes, *, tenant: str = "") -> Secret:
        """Set a secret: create it, or replace its value for attempts that start from now on.

        Raises:
            InvalidArgument: names every invalid field, without anything of the value.
        """
        request = set_request(name, value, tenant)
        return secret_of((await self._call(lambda mesh: mesh.secrets.SetSecret(request))).secret)

    async def secrets(self, *, tenant: str = "") -> list[Secret]:
        """Return the secrets of a tenant, or of all tenants of the caller, without their values."""

        async def read(mesh: Mesh) -> list[Secret]:
            return [secret_of(one) async for one in all_secrets(mesh, tenant)]

        return await self._call(read)

    async def delete_secret(self, name: str, *, tenant: str = "") -> None:
        """Delete a secret. Jobs that name it and have not started wait until it is set again.

        Raises:
            NotFound: there is none.
        """
        request = DeleteSecretRequest(tenant=tenant, name=name)
        await self._call(lambda mesh: mesh.secrets.DeleteSecret(request))

    def _of(self, found: JobMessage | ArrayMessage) -> AsyncJob | AsyncJobArray:
        return AsyncJobArray(self, found) if isinstance(found, ArrayMessage) else AsyncJob(self, found)

    async def _call(self, work: Callable[[Mesh], Awaitable[T]]) -> T:
        """Return what `work` returns, with errors as those of the API; try a restarted mesh at its new address once."""
        with as_api_errors():
            try:
                return await work(self._mesh)
            except grpc.aio.AioRpcError as error:
                if not is_unreachable(error.code()):
                    raise
                await self._mesh.find_again()
                return await work(self._mesh)


async def _upload(mesh: Mesh, draft: Draft, validate_only: bool) -> Draft:
    """Upload the folder that a job takes along, and return the job with its id."""
    from cotenant.cli.jobs.folder_choice import choose, unchosen
    from cotenant.cli.jobs.folder_upload import Uploads  # most jobs have none

    [draft] = unchosen([draft]) if validate_only else await choose(mesh, [draft])
    uploads = await asyncio.to_thread(Uploads, [draft])
    [uploaded] = uploads.dry([draft]) if validate_only else await uploads.upload(mesh, [draft])
    return uploaded


async def _create(
    mesh: Mesh, draft: Draft, request_id: str, *, validate_only: bool = False
) -> JobMessage | ArrayMessage:
    """Create a job with its dependencies resolved; a refusal names the fields as the caller wrote them."""
    if draft.spec.upload:
        draft = await _upload(mesh, draft, validate_only)
    [step] = await resolve_ids(mesh, [Step(draft, 0)])
    try:
        spec = draft.to_wire(step.spec({}))
        return await create(mesh, spec, request_id=request_id, validate_only=validate_only)
    except grpc.aio.AioRpcError as error:
        violations = from_error(error).violations
        if not violations:
            raise
        raise BadJobs("the job", [draft.mistake(one.field, one.description) for one in violations]) from error


class AsyncJob:
    """A job that the queue has accepted."""

    def __init__(self, client: AsyncClient, message: JobMessage) -> None:
        self._client = client
        self._message = message

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {phase_of(self._message)}>"

    def _repr_html_(self) -> str:
        return self.last_status._repr_html_()

    @property
    def id(self) -> str:
        """Its id."""
        return self._message.id

    @property
    def name(self) -> str:
        """Its name; "" without one."""
        return self._message.spec.name

    @property
    def last_status(self) -> JobStatus:
        """Its state when it was last read."""
        return status_of(self._message, time.time())

    async def status(self) -> JobStatus:
        """Return its present state."""
        answer = await self._client._call(lambda mesh: mesh.jobs.GetJob(GetJobRequest(id=self.id)))
        self._message = answer.job
        return self.last_status

    async def wait(self) -> JobStatus:
        """Wait until the job has ended, whatever the outcome; also through a restart of the mesh.

        `asyncio.timeout` limits the wait; the job keeps running.
        """

        def on_change(job: JobMessage) -> None:
            self._message = job

        async def until_ended(mesh: Mesh) -> None:
            async for job in watch_until_ended(mesh, [self.id], on_change):
                self._message = job

        if phase_of(self._message) not in ENDED:
            await self._client._call(until_ended)
        return self.last_status

    async def result(self) -> str:
        """Wait for the job's success, and return its output: the last MiB of it.

        Raises:
            JobFailed: it failed, with its exit code and the last lines of its output; JobCancelled: it was cancelled.
        """
        status = await self.wait()
        if status.succeeded:
            return await self.output(tail_bytes=RESULT_BYTES_MAX)
        raise await self._failure(status)

    async def _failure(self, status: JobStatus) -> JobFailed:
        kind = JobCancelled if status.phase == Phase.CANCELLED else JobFailed
        tail = ""
        if self._message.HasField("attempt"):
            try:
                tail = await self.output(tail_bytes=TAIL_BYTES)
            except Exception as error:  # the outcome matters more than its output
                log.warning("cannot read the output of %s: %s", self.id, error)
        lines = "\n".join(tail.splitlines()[-TAIL_LINES:])
        return kind(self.id, outcome_line(self._message), exit_code=status.exit_code, log_tail=lines)

    async def output(self, *, tail_bytes: int = 0, rank: int | None = None, attempt: int = 0) -> str:
        """Return what its processes have written so far, or the last bytes of it; "" before it starts."""
        if not self._message.HasField("attempt"):
            await self.status()
        if not self._message.HasField("attempt"):
            return ""
        request = ReadLogsRequest(id=self.id, tail_bytes=tail_bytes, rank=rank, attempt=attempt)
        written = io.BytesIO()
        output = Output(written, marked=is_gang(self._message) and rank is None)
        await self._client._call(lambda mesh: copy_output(mesh, request, output, resumable=False))
        return written.getvalue().decode(errors="replace")

    async def logs(self, *, follow: bool = True, rank: int | None = None, tail_bytes: int = 0) -> AsyncGenerator[str]:
        """Yield the lines of its output: of all attempts until the job has ended, or with `follow=False` so far."""
        if not follow:
            for line in (await self.output(rank=rank, tail_bytes=tail_bytes)).splitlines():
                yield line
            return
        lines = _Lines()
        request = ReadLogsRequest(id=self.id, rank=rank, tail_bytes=tail_bytes)
        copying = asyncio.ensure_future(self._client._call(lambda mesh: self._copy(mesh, request, lines)))
        copying.add_done_callback(lambda _: lines.end())
        try:
            async for line in lines:
                yield line
            await copying
        finally:
            copying.cancel()

    async def _copy(self, mesh: Mesh, request: ReadLogsRequest, lines: _Lines) -> None:
        output = Output(lines, marked=is_gang(self._message) and not request.HasField("rank"))
        self._message = await follow(mesh, self.id, request, output, lambda job: None)

    async def explain(self) -> Explanation:
        """Return why the job is in its state, what would change it, and when it will probably start."""
        answer = await self._client._call(lambda mesh: mesh.jobs.ExplainJob(ExplainJobRequest(id=self.id)))
        return Explanation(answer.summary, answer.outlook, explanation_view(answer, time.time()))

    async def cancel(self) -> JobStatus:
        """Cancel the job; this changes nothing if it has ended. Its processes get their grace."""
        request = CancelJobRequest(id=self.id, request_id=uuid.uuid4().hex)
        answer = await self._client._call(lambda mesh: mesh.jobs.CancelJob(request))
        self._message = answer.job
        return self.last_status

    async def suspend(self) -> JobStatus:
        """Suspend the job until `resume`; if it runs, its processes are warned and stopped first."""
        request = SuspendJobRequest(id=self.id, request_id=uuid.uuid4().hex)
        answer = await self._client._call(lambda mesh: mesh.jobs.SuspendJob(request))
        self._message = answer.job
        return self.last_status

    async def resume(self) -> JobStatus:
        """Requeue a suspended job, or one that was submitted with `hold`."""
        request = ResumeJobRequest(id=self.id, request_id=uuid.uuid4().hex)
        answer = await self._client._call(lambda mesh: mesh.jobs.ResumeJob(request))
        self._message = answer.job
        return self.last_status

    async def rerun(self) -> AsyncJob | AsyncJobArray:
        """Submit it again as a new job, and return that; a task of an array becomes an array of its index.

        What belonged to that submission is dropped: dependencies, begin time, `hold`, and a deadline that has passed.
        """
        await self.status()
        request_id = uuid.uuid4().hex
        draft = draft_like(self._message, MapNode(SourcePosition("rerun"), ()), time.time())

        async def make(mesh: Mesh) -> JobMessage | ArrayMessage:
            return await create(mesh, draft.to_wire(draft.spec), request_id=request_id, like=draft.like)

        return self._client._of(await self._client._call(make))

    async def fetch(self, path: str = "", to: str | PurePath = ".", *, rank: int = 0, attempt: int = 0) -> int:
        """Copy a file or folder of its working directory to this machine, as `cotenant cp`; return how many files.

        Into `to` if that is a folder, else as `to`; without a path, all of it into `to`. `attempt` 0 is the last.

        Raises:
            CotenantError: with the reason NOT_ALL_COPIED if some of it could not be copied.
        """
        with as_api_errors():
            wanted = Wanted(self.id, clean_path(path), attempt, rank)

        async def copy(mesh: Mesh) -> Download:
            with closing(Download(target_of(wanted.path, str(to)))) as download:
                async for part in read_parts(mesh, wanted):
                    download.take(part)
                download.finish()
            return download

        download = await self._client._call(copy)
        if download.problems:
            raise CotenantError("; ".join(download.problems[:PROBLEMS_MAX]), reason="NOT_ALL_COPIED")
        return download.files


class AsyncJobArray:
    """An array: a job for each index."""

    def __init__(self, client: AsyncClient, message: ArrayMessage) -> None:
        self._client = client
        self._message = message

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.counts}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self._message.id

    @property
    def counts(self) -> dict[str, int]:
        """The number of its jobs in each phase when it was last read."""
        return counts(self._message)

    async def status(self) -> dict[str, int]:
        """Return the number of its jobs in each phase now."""
        answer = await self._client._call(lambda mesh: mesh.arrays.GetArray(GetArrayRequest(id=self.id)))
        self._message = answer.array
        return self.counts

    async def jobs(self) -> JobList[AsyncJob]:
        """Return its jobs, by index."""
        found = await self._client._call(lambda mesh: read_tasks(mesh, self.id))
        return JobList(AsyncJob(self._client, job) for job in found)

    async def wait(self) -> JobList[AsyncJob]:
        """Wait until all of its jobs have ended, and return them by index."""
        jobs = await self.jobs()
        left = [job.id for job in jobs if not job.last_status.ended]

        async def until_ended(mesh: Mesh) -> None:
            async for _ in watch_until_ended(mesh, left, lambda job: None):
                pass

        if left:
            await self._client._call(until_ended)
            jobs = await self.jobs()
        return jobs

    async def result(self) -> list[str]:
        """Wait for the success of all jobs, and return their output by index.

        Raises:
            JobFailed: the first job, by index, that did not succeed.
        """
        jobs = await self.wait()
        return [await job.result() for job in jobs]

    async def cancel(self) -> dict[str, int]:
        """Cancel its jobs that have not ended, and return the number of jobs in each phase."""
        request = CancelArrayRequest(id=self.id, request_id=uuid.uuid4().hex)
        answer = await self._client._call(lambda mesh: mesh.arrays.CancelArray(request))
        self._message = answer.array
        return self.counts


class AsyncSchedule:
    """A schedule: at each of its due times, a job is submitted."""

    def __init__(self, client: AsyncClient, message: ScheduleMessage) -> None:
        self._client = client
        self._message = message

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._message.every}{' paused' if self._message.paused else ''}>"

    @property
    def id(self) -> str:
        """Its id."""
        return self._message.id

    @property
    def last_status(self) -> ScheduleStatus:
        """Its state when it was last read."""
        return schedule_status(self._message)

    async def status(self) -> ScheduleStatus:
        """Return its present state."""
        request = GetScheduleRequest(id=self.id)
        self._message = (await self._client._call(lambda mesh: mesh.schedules.GetSchedule(request))).schedule
        return self.last_status

    async def pause(self) -> ScheduleStatus:
        """Submit nothing until `resume`. Jobs that were submitted continue."""
        request = PauseScheduleRequest(id=self.id)
        self._message = (await self._client._call(lambda mesh: mesh.schedules.PauseSchedule(request))).schedule
        return self.last_status

    async def resume(self) -> ScheduleStatus:
        """Submit again, from the next due time on."""
        request = ResumeScheduleRequest(id=self.id)
        self._message = (await self._client._call(lambda mesh: mesh.schedules.ResumeSchedule(request))).schedule
        return self.last_status

    async def run(self) -> AsyncJob:
        """Submit its job now, also if it is paused, and return that; the due times stay as they are."""
        request = RunScheduleRequest(id=self.id, request_id=uuid.uuid4().hex)
        answer = await self._client._call(lambda mesh: mesh.schedules.RunSchedule(request))
        return AsyncJob(self._client, answer.job)

    async def delete(self) -> None:
        """Delete the schedule. Jobs that were submitted continue."""
        request = DeleteScheduleRequest(id=self.id)
        await self._client._call(lambda mesh: mesh.schedules.DeleteSchedule(request))


class Explanation(NamedTuple):
    """Why a job is in its state. `details` has everything, with the keys of `cotenant explain --json`."""

    summary: str
    outlook: str
    details: dict[str, Any]

    def __str__(self) -> str:
        """Return the summary, and when the job will probably start."""
        return "\n".join(filter(None, (self.summary, self.outlook)))


class HasStatus(Protocol):
    """A job whose state has been read."""

    @property
    def last_status(self) -> JobStatus:
        """Its state when it was last read."""


J = TypeVar("J", bound=HasStatus)


class JobList(list[J], Generic[J]):
    """Jobs, shown as a table in notebooks."""

    def _repr_html_(self) -> str:
        return html_table(job.last_status for job in self)


class _Lines:
    """Output as a stream of lines: bytes go in, texts come out."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()

    def write(self, data: bytes) -> int:
        """Append output; its complete lines can be read at once."""
        *lines, begun = (self._begun + data).split(b"\n")
        self._begun = bytearray(begun)
        for line in lines:
            self._lines.put_nowait(line.decode(errors="replace"))
        return len(data)

    def flush(self) -> None:
        """Do nothing: what was written can be read at once."""

    def end(self) -> None:
        """End the stream with the incomplete line."""
        if self._begun:
            self._lines.put_nowait(self._begun.decode(errors="replace"))
        self._lines.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            yield line
