"""`cotenant logs`: the output of a job."""

from __future__ import annotations

import sys
from typing import Annotated

from cotenant.cli import units
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.follow import Output, copy_output, follow, is_gang
from cotenant.cli.jobs.job_lines import phase_line
from cotenant.cli.name_lookup import find_job_or_array
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.core.model.validation import REPLICAS_MAX
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_service_pb2 import ReadLogsRequest

RANK_MAX, ATTEMPT_MAX = REPLICAS_MAX - 1, 2**31 - 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("logs")(logs)


def logs(
    context: typer.Context,
    job_id: options.JobId,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Stream output until the job ends.")] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=RANK_MAX, help="Only the process with this rank.")
    ] = None,
    tail: Annotated[str, typer.Option(metavar="SIZE", help="Only the last SIZE bytes so far, such as 64KiB.")] = "",
    attempt: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=ATTEMPT_MAX, help="Attempt; default: the last.", show_default=False),
    ] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Pass on control characters to the terminal, as the job wrote them.")
    ] = False,
) -> None:
    """Print a job's output as its processes wrote it.

    A terminal gets colours, but other control characters are shown, not passed on, unless --raw is given.

    Lines of a gang are prefixed with the rank of their process, unless --rank selects one process. Lines of an
    array are prefixed with the index of their task; -f follows up to 16 tasks at once, and the others after them.

    \b
    Examples:
      cotenant logs ID
      cotenant logs -f --tail 4KiB ID
      cotenant logs --rank 3 ID
      cotenant logs -f ARRAY
    """
    request = ReadLogsRequest(attempt=attempt, tail_bytes=_tail(tail), rank=rank)
    with_mesh(Flags.of(context), lambda mesh: _print(mesh, job_id, request, following, raw))


def _tail(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else units.parse_bytes(text) if text else 0
    except ValueError as error:
        raise usage_error(f"--tail: {error}") from None


async def _print(mesh: Mesh, text: str, request: ReadLogsRequest, following: bool, raw: bool) -> None:
    job, neutral = await find_job_or_array(mesh, text), sys.stdout.isatty() and not raw
    if isinstance(job, Array):
        await _print_array(mesh, job, request, following, neutral)
        return
    request.id = job.id
    marked = is_gang(job) and not request.HasField("rank")
    output = Output(sys.stdout.buffer, marked=marked, neutral=neutral)
    if following and not request.attempt:
        await follow(mesh, job.id, request, output, lambda changed: None)
        return
    if not job.HasField("attempt"):
        raise CommandError(
            f"{job.id} has no output yet: {phase_line(job)}", hint="wait for it to start with `cotenant logs -f`"
        )
    request.follow = following
    await copy_output(mesh, request, output, resumable=following)


async def _print_array(mesh: Mesh, array: Array, request: ReadLogsRequest, following: bool, neutral: bool) -> None:
    from cotenant.cli.jobs.array_logs import follow_array, print_array  # most logs are of one job

    if request.attempt:
        raise usage_error("--attempt is for one job", hint=f"name a task, such as {array.id}_0")

    def new_output(label: str, marked: bool) -> Output:
        return Output(sys.stdout.buffer, marked=marked, neutral=neutral, label=label)

    await (follow_array if following else print_array)(mesh, array, request, new_output)
