"""Jobs while they run: what they print, how they stand, and how they end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

import grpc.aio

from cotenant.cli import units, views
from cotenant.cli.connection import Mesh, told
from cotenant.cli.jobs.list_jobs import where
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import CommandError, note
from cotenant.cli.stream_retry import Patience
from cotenant.cli.watch import changes
from cotenant.codec.errors import from_error
from cotenant.core.model.lifecycle import ENDED, AttemptState, Phase
from cotenant.core.model.refusal import Code
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import JobFilter, ReadLogsRequest, ReadLogsResponse

LINE_BYTES_MAX = 2**16
DRAIN_SECONDS_MAX = 10.0  # for what is still on its way when an attempt has ended


class Output:
    """Writes what jobs printed to a stream, as it is, or with each line's rank before it."""

    def __init__(self, stream: BinaryIO, *, marked: bool) -> None:
        self._stream = stream
        self._marked = marked
        self._begun: dict[int, bytes] = {}  # by rank, the line that has no end yet

    def write(self, rank: int, data: bytes) -> None:
        """Write a piece."""
        if not self._marked:
            self._stream.write(data)
        else:
            *lines, begun = (self._begun.get(rank, b"") + data).split(b"\n")
            if len(begun) > LINE_BYTES_MAX:
                lines, begun = [*lines, begun], b""
            self._begun[rank] = begun
            self._stream.write(b"".join(_marked(rank, line) for line in lines))
        self._stream.flush()

    def finish(self) -> None:
        """Write the lines that never ended."""
        rest = [_marked(rank, line) for rank, line in sorted(self._begun.items()) if line]
        self._begun.clear()
        self._stream.write(b"".join(rest))
        self._stream.flush()


def _marked(rank: int, line: bytes) -> bytes:
    return b"[%d] %s\n" % (rank, line)


def is_gang(job: Job) -> bool:
    """Tell whether lines of output need their rank."""
    return sum(role.replicas for role in job.spec.roles) > 1


async def copy_output(mesh: Mesh, request: ReadLogsRequest, output: Output, *, patient: bool) -> None:
    """Print the output of one attempt, to its end where `follow` is set; take a cut line up again where `patient`."""
    async for piece in _pieces(mesh, request, patient and not request.tail_bytes):
        if piece.truncated:
            note(f"older output of rank {piece.rank} is no longer kept")
        output.write(piece.rank, piece.data)
    output.finish()


async def _pieces(mesh: Mesh, request: ReadLogsRequest, resumable: bool) -> AsyncIterator[ReadLogsResponse]:
    """Yield pieces of output; when the stream is cut, go on after what has come."""
    came: Counter[int] = Counter()  # bytes by rank
    patience = Patience(mesh, "the line to the output was cut")
    while True:
        again = Counter(came)
        try:
            async for piece in mesh.jobs.ReadLogs(request):
                if piece.truncated:
                    again[piece.rank] = 0  # its beginning is gone, so the count is of no use: better twice than never
                known = min(again[piece.rank], len(piece.data))
                again[piece.rank] -= known
                came[piece.rank] += len(piece.data) - known
                if known < len(piece.data) or piece.truncated:
                    patience.renew()
                    yield ReadLogsResponse(rank=piece.rank, data=piece.data[known:], truncated=piece.truncated)
            return
        except grpc.aio.AioRpcError as error:
            if not resumable:
                raise
            await patience.wait(error)


async def follow(
    mesh: Mesh, job_id: str, request: ReadLogsRequest, output: Output, on_change: Callable[[Job], None]
) -> Job:
    """Print the output of a job's attempts as they run, one after the other, until the job has ended."""
    started: asyncio.Queue[int | None] = asyncio.Queue()

    async def watch() -> Job:
        last, seen = Job(id=job_id), 0
        async for job in changes(mesh, JobFilter(ids=[job_id]), until_ended=True):
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
    """Print one attempt after the other; when the next one has begun, the one before has little time left."""
    number = await started.get()
    while number is not None:
        wanted = ReadLogsRequest()
        wanted.CopyFrom(request)
        wanted.attempt, wanted.follow = number, True
        copying = asyncio.ensure_future(try_to_copy(mesh, wanted, output))
        upcoming = asyncio.ensure_future(started.get())
        await asyncio.wait({copying, upcoming}, return_when=asyncio.FIRST_COMPLETED)
        if not copying.done():
            await asyncio.wait({copying}, timeout=DRAIN_SECONDS_MAX)
        if copying.done():
            copying.result()
        else:
            copying.cancel()
            note(f"output of attempt {number} did not come to its end; `cotenant logs` may show more")
        number = await upcoming


async def try_to_copy(mesh: Mesh, request: ReadLogsRequest, output: Output) -> None:
    """Print output; where it cannot be had, say so: the job itself is none the worse for it."""
    try:
        await copy_output(mesh, request, output, patient=True)
    except grpc.aio.AioRpcError as error:
        note(f"the output of {request.id} cannot be read: {told(from_error(error)).message}")


async def ended(mesh: Mesh, job_ids: list[str], on_change: Callable[[Job], None]) -> AsyncIterator[Job]:
    """Yield each job when it has ended."""
    left = set(job_ids)
    async for job in changes(mesh, JobFilter(ids=job_ids), until_ended=True):
        on_change(job)
        if phase_of(job) in ENDED and job.id in left:
            left.remove(job.id)
            yield job
    if left:
        raise CommandError(f"the queue tells no more of {', '.join(sorted(left))}")


class Teller:
    """Tells each new phase of jobs once, on stderr; a bad end is left to the error that tells of it."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def __call__(self, job: Job) -> None:
        """Tell how a job stands, where that is new."""
        words = standing(job)
        if phase_of(job) in (Phase.FAILED, Phase.CANCELLED):
            return
        if self._told.get(job.id) != words:
            self._told[job.id] = words
            note(f"{job.id} {words}")


def standing(job: Job) -> str:
    """Say in one line how a job stands."""
    view = views.job_view(job, now=0.0)
    phase, place = view["phase"], where(view)
    if phase in ENDED:
        return ending(job)
    if phase == Phase.QUEUED and view["reason"]:
        reason = view["reason"]
        return (
            "queued" if reason["code"] == Code.NOT_YET_CONSIDERED else f"queued: {reason['code']}: {reason['detail']}"
        )
    if phase in (Phase.STARTING, Phase.RUNNING):
        return f"{phase} on {place}"
    return f"{phase}: {place}" if place else str(phase)


def ending(job: Job) -> str:
    """Say in one line how a job ended.

    >>> from cotenant.v1.job_pb2 import Attempt, ExitStatus, JobPhase
    >>> exit = ExitStatus(code=3, rank=1, node_id="n2")
    >>> ending(Job(phase=JobPhase.JOB_PHASE_FAILED, attempt=Attempt(number=1, exit=exit)))
    'failed: rank 1 on n2 ended with exit code 3'
    """
    phase = phase_of(job)
    if phase == Phase.SUCCEEDED:
        return f"succeeded after {units.short_seconds(views.run_seconds(job, 0.0))}"
    exit_told = exit_words(views.exit_view(job.attempt.exit)) if job.attempt.HasField("exit") else ""
    reason = job.phase_reason or job.attempt.message or exit_told
    return f"{phase}: {reason}" if reason and phase == Phase.FAILED else str(phase)


def exit_words(status: views.View) -> str:
    """Say how a process ended.

    >>> exit_words({"code": 0, "signal": 9, "out_of_memory": True, "rank": 0, "node": "n1"})
    'rank 0 on n1 was killed for memory (signal 9)'
    """
    who = f"rank {status['rank']} on {status['node']}" if status["node"] else f"rank {status['rank']}"
    if status["out_of_memory"]:
        return f"{who} was killed for memory (signal {status['signal'] or 9})"
    if status["signal"]:
        return f"{who} was ended by signal {status['signal']}"
    return f"{who} ended with exit code {status['code']}"
