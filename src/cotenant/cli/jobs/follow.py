"""Following jobs: their output, their phases and their ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from cotenant.cli import views
from cotenant.cli.connection import Mesh, command_error
from cotenant.cli.control_characters import Neutralizer
from cotenant.cli.jobs.job_lines import phase_line
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import CommandError, note
from cotenant.cli.stream_retry import StreamRetry
from cotenant.cli.watch import job_changes
from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import ENDED, AttemptState, Phase
from cotenant.deferred import asyncio, grpc
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import GetJobRequest, GetJobResponse, ReadLogsRequest, ReadLogsResponse

LINE_BYTES_MAX = 2**16
DRAIN_SECONDS_MAX = 10.0  # for output still in flight when an attempt ends


class Sink(Protocol):
    """What output is written to."""

    def write(self, data: bytes, /) -> object:
        """Write a piece of output."""

    def flush(self) -> None:
        """Pass on what was written."""


class Output:
    """Writes the output of jobs to a stream: with each line prefixed by its rank if `marked`, else as it is.

    With a label, such as the index of an array's task, each line is prefixed by the label as well. If `neutral`,
    control characters are shown instead of passed on.
    """

    def __init__(self, stream: Sink, *, marked: bool, neutral: bool = False, label: str = "") -> None:
        self._stream = stream
        self._marked, self._neutral, self._label = marked, neutral, label
        self._begun: dict[int, bytes] = {}  # by rank: the incomplete line
        self._neutralizers: dict[int, Neutralizer] = {}  # by rank

    def write(self, rank: int, data: bytes) -> None:
        """Write a piece of output."""
        if self._neutral:
            data = self._neutralizers.setdefault(rank, Neutralizer()).feed(data)
        self._write(rank, data)

    def _write(self, rank: int, data: bytes) -> None:
        if not (self._marked or self._label):
            self._stream.write(data)
        else:
            *lines, begun = (self._begun.get(rank, b"") + data).split(b"\n")
            if len(begun) > LINE_BYTES_MAX:
                lines, begun = [*lines, begun], b""
            self._begun[rank] = begun
            self._stream.write(b"".join(self._prefixed(rank, line) for line in lines))
        self._stream.flush()

    def finish(self) -> None:
        """Write the incomplete lines."""
        for rank, neutralizer in sorted(self._neutralizers.items()):
            self._write(rank, neutralizer.end())
        rest = [self._prefixed(rank, line) for rank, line in sorted(self._begun.items()) if line]
        self._begun.clear()
        self._stream.write(b"".join(rest))
        self._stream.flush()

    def _prefixed(self, rank: int, line: bytes) -> bytes:
        names = [*filter(None, [self._label]), *([str(rank)] if self._marked else [])]
        return b"[%s] %s\n" % ("/".join(names).encode(), line)


def is_gang(job: Job) -> bool:
    """Return whether a job has several replicas, so that output lines need their rank."""
    return sum(role.replicas for role in job.spec.roles) > 1


async def copy_output(mesh: Mesh, request: ReadLogsRequest, output: Output, *, resumable: bool) -> None:
    """Print the output of one attempt, to its end if `follow` is set; resume an interrupted stream if `resumable`."""
    async for piece in _pieces(mesh, request, resumable and not request.tail_bytes):
        if piece.truncated:
            mesh.report(f"older output of rank {piece.rank} has been discarded")
        output.write(piece.rank, piece.data)
    output.finish()


async def _pieces(mesh: Mesh, request: ReadLogsRequest, resumable: bool) -> AsyncIterator[ReadLogsResponse]:
    """Yield pieces of output; after an interruption, resume behind the bytes received so far."""
    received: Counter[int] = Counter()  # bytes by rank
    retry = StreamRetry(mesh, "lost the output stream")
    while True:
        again = Counter(received)
        try:
            async for piece in mesh.jobs.ReadLogs(request):
                if piece.truncated:
                    again[piece.rank] = (
                        0  # the beginning is gone, so offsets no longer match: repeat rather than lose output
                    )
                known = min(again[piece.rank], len(piece.data))
                again[piece.rank] -= known
                received[piece.rank] += len(piece.data) - known
                if known < len(piece.data) or piece.truncated:
                    retry.reset()
                    yield ReadLogsResponse(rank=piece.rank, data=piece.data[known:], truncated=piece.truncated)
            return
        except grpc.aio.AioRpcError as error:
            if not resumable:
                raise
            await retry.wait(error)


async def follow(
    mesh: Mesh, job_id: str, request: ReadLogsRequest, output: Output, on_change: Callable[[Job], None]
) -> Job:
    """Print the output of a job's attempts as they run, until the job has ended; return the job."""
    started: asyncio.Queue[int | None] = asyncio.Queue()

    async def watch() -> Job:
        last, seen = Job(id=job_id), 0
        async for job in job_changes(mesh, [job_id]):
            last = job
            on_change(job)
            if job.attempt.number > seen and views.state_of(job.attempt) != AttemptState.ASSIGNED:
                seen = job.attempt.number
                started.put_nowait(seen)
        started.put_nowait(None)
        return last

    watching = asyncio.ensure_future(watch())
    printing = asyncio.ensure_future(_print_attempts(mesh, started, request, output))
    try:
        done, _ = await asyncio.wait({watching, printing}, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        return watching.result()
    finally:
        watching.cancel()
        printing.cancel()


async def _print_attempts(
    mesh: Mesh, started: asyncio.Queue[int | None], request: ReadLogsRequest, output: Output
) -> None:
    """Print the attempts in order; once the next attempt starts, the previous one gets a limited time to finish."""
    number = await started.get()
    while number is not None:
        wanted = ReadLogsRequest()
        wanted.CopyFrom(request)
        wanted.attempt, wanted.follow = number, True
        copying = asyncio.ensure_future(try_copy_output(mesh, wanted, output))
        upcoming = asyncio.ensure_future(started.get())
        await asyncio.wait({copying, upcoming}, return_when=asyncio.FIRST_COMPLETED)
        if not copying.done():
            await asyncio.wait({copying}, timeout=DRAIN_SECONDS_MAX)
        if copying.done():
            copying.result()
        else:
            copying.cancel()
            mesh.report(f"output of attempt {number} is incomplete; `cotenant logs` may show more")
        number = await upcoming


async def try_copy_output(mesh: Mesh, request: ReadLogsRequest, output: Output) -> None:
    """Print output; if it cannot be read, print a note: the job itself is not affected."""
    try:
        await copy_output(mesh, request, output, resumable=True)
    except grpc.aio.AioRpcError as error:
        mesh.report(f"cannot read the output of {request.id}: {command_error(from_error(error)).message}")


async def watch_until_ended(mesh: Mesh, job_ids: list[str], on_change: Callable[[Job], None]) -> AsyncIterator[Job]:
    """Yield each job when it ends."""
    left = set(job_ids)
    async for job in job_changes(mesh, job_ids):
        on_change(job)
        if phase_of(job) in ENDED and job.id in left:
            left.remove(job.id)
            yield job
    for job_id in sorted(left):  # it was archived while the connection was lost
        found: GetJobResponse = await mesh.jobs.GetJob(GetJobRequest(id=job_id))
        if phase_of(found.job) not in ENDED:
            raise CommandError(f"the queue no longer reports {job_id}")
        yield found.job


class PhasePrinter:
    """Prints each new phase of jobs once, on stderr, except failed and cancelled: the command's error reports those."""

    def __init__(self) -> None:
        self._printed: dict[str, str] = {}

    def __call__(self, job: Job) -> None:
        """Print a job's phase if it has changed."""
        words = phase_line(job)
        if phase_of(job) in (Phase.FAILED, Phase.CANCELLED):
            return
        if self._printed.get(job.id) != words:
            self._printed[job.id] = words
            note(f"{job.id} {words}")
