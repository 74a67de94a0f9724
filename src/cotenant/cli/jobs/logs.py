"""`cotenant logs`: what a job printed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cotenant.cli import options, units
from cotenant.cli.connection import Mesh, reach
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.follow import Output, copy_output, follow, is_gang, standing
from cotenant.cli.name_lookup import find_job
from cotenant.cli.outcome import CommandError, usage
from cotenant.core.model.validation import REPLICAS_MAX
from cotenant.v1.job_service_pb2 import ReadLogsRequest

RANK_MAX, ATTEMPT_MAX = REPLICAS_MAX - 1, 2**31 - 1


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("logs")(logs)


def logs(
    context: typer.Context,
    job_id: options.JobId,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=RANK_MAX, help="Only the process of this rank.")
    ] = None,
    tail: Annotated[
        str, typer.Option(metavar="SIZE", help="Only the last so many bytes of what is there, such as 64KiB.")
    ] = "",
    attempt: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=ATTEMPT_MAX, help="Of this attempt; the last one by default.", show_default=False
        ),
    ] = 0,
) -> None:
    """Print a job's output, as its processes wrote it.

    Lines of a gang have the rank of their process before them, unless --rank chooses one.

    \b
    Examples:
      cotenant logs ID
      cotenant logs -f --tail 4KiB ID
      cotenant logs --rank 3 ID
    """
    request = ReadLogsRequest(attempt=attempt, tail_bytes=_tail(tail), rank=rank)
    reach(Flags.of(context), lambda mesh: _print(mesh, job_id, request, following))


def _tail(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else units.parse_bytes(text) if text else 0
    except ValueError as error:
        raise usage(f"--tail: {error}") from None


async def _print(mesh: Mesh, text: str, request: ReadLogsRequest, following: bool) -> None:
    job = await find_job(mesh, text)
    request.id = job.id
    output = Output(sys.stdout.buffer, marked=is_gang(job) and not request.HasField("rank"))
    if following and not request.attempt:
        await follow(mesh, job.id, request, output, lambda changed: None)
        return
    if not job.HasField("attempt"):
        raise CommandError(
            f"{job.id} has no output yet: {standing(job)}", hint="`cotenant logs -f` waits for it to start"
        )
    request.follow = following
    await copy_output(mesh, request, output, patient=following)
