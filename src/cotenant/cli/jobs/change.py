"""Commands that change jobs: cancel, suspend, resume, move. `update` has a module of its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.arrays import array_summary
from cotenant.cli.connection import Mesh, command_error, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_lines import phase_line
from cotenant.cli.name_lookup import find_jobs_and_arrays, not_one_job, phase_of
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.codec.errors import from_error
from cotenant.codec.specs import duration
from cotenant.core.model.lifecycle import HOLDING, Phase
from cotenant.deferred import grpc
from cotenant.v1.array_service_pb2 import Array, CancelArrayRequest, ResumeArrayRequest, SuspendArrayRequest
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import (
    CancelJobRequest,
    MoveJobRequest,
    ResumeJobRequest,
    SuspendJobRequest,
)

Act = Callable[[Mesh, Job], Awaitable[Any]]
ActOnArray = Callable[[Mesh, Array], Awaitable[Any]]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("cancel")(cancel)
    app.command("suspend")(suspend)
    app.command("resume")(resume)
    app.command("move")(move)


def cancel(context: typer.Context, job_ids: options.JobIds, as_json: options.AsJson = False) -> None:
    """Cancel jobs or whole arrays. Running jobs get their warning signal and grace period first.

    \b
    Example:
      cotenant cancel ID ARRAY ARRAY_7
    """
    change(
        context,
        job_ids,
        as_json,
        lambda mesh, job: mesh.jobs.CancelJob(CancelJobRequest(id=job.id)),
        lambda mesh, array: mesh.arrays.CancelArray(CancelArrayRequest(id=array.id)),
        goal=Phase.CANCELLED,
    )


def suspend(context: typer.Context, job_ids: options.JobIds, as_json: options.AsJson = False) -> None:
    """Stop jobs or whole arrays, with their grace period, and hold them until they are resumed.

    \b
    Example:
      cotenant suspend ID
    """
    change(
        context,
        job_ids,
        as_json,
        lambda mesh, job: mesh.jobs.SuspendJob(SuspendJobRequest(id=job.id)),
        lambda mesh, array: mesh.arrays.SuspendArray(SuspendArrayRequest(id=array.id)),
        goal=Phase.SUSPENDED,
    )


def resume(context: typer.Context, job_ids: options.JobIds, as_json: options.AsJson = False) -> None:
    """Requeue suspended jobs or arrays.

    \b
    Example:
      cotenant resume ID
    """
    change(
        context,
        job_ids,
        as_json,
        lambda mesh, job: mesh.jobs.ResumeJob(ResumeJobRequest(id=job.id)),
        lambda mesh, array: mesh.arrays.ResumeArray(ResumeArrayRequest(id=array.id)),
    )


def move(
    context: typer.Context,
    job_id: options.JobId,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, shown with the job.", show_default=False)] = "",
    avoid: Annotated[
        str, typer.Option(metavar="TIME", help="Avoid its current nodes for this long; 0s: do not.")
    ] = "1h",
    as_json: options.AsJson = False,
) -> None:
    """Migrate a running job: stop it gracefully, requeue it and avoid its current nodes for a while.

    This counts as a migration, not as a failure. A job that fits nowhere else returns to its current nodes.

    \b
    Example:
      cotenant move ID --reason "node 7 needs maintenance" --avoid 2h
    """
    try:
        seconds = units.parse_seconds(avoid)
    except ValueError as error:
        raise usage_error(f"--avoid {error}") from None

    def moved(job: Job) -> MoveJobRequest:
        return MoveJobRequest(id=job.id, number=max(1, job.attempt.number), reason=reason, avoid=duration(seconds))

    change(context, [job_id], as_json, lambda mesh, job: mesh.jobs.MoveJob(moved(job)), sent="migrating")


def change(
    context: typer.Context,
    texts: Sequence[str],
    as_json: bool,
    act: Act,
    act_on_array: ActOnArray | None = None,
    goal: Phase | None = None,
    sent: str = "",
) -> None:
    """Apply `act` to each job, and `act_on_array` to each array, after all ids are resolved; then print them.

    Raises:
        CommandError: the mesh refused some of the jobs; the others are changed and printed.
    """
    changed: list[Job | Array] = []
    refusals: list[tuple[str, CommandError]] = []

    async def work(mesh: Mesh) -> None:
        for found in await find_jobs_and_arrays(mesh, texts):
            try:
                if not isinstance(found, Array):
                    changed.append((await act(mesh, found)).job)
                elif act_on_array:
                    changed.append((await act_on_array(mesh, found)).array)
                else:
                    refusals.append((found.id, not_one_job(found)))
            except grpc.aio.AioRpcError as error:
                if is_unreachable(error.code()):
                    raise
                refusals.append((found.id, command_error(from_error(error))))

    try:
        with_mesh(Flags.of(context), work, unary=True)
    finally:
        _print(changed, as_json, sent or (f"stopping, then {goal}" if goal else ""))
    if len(refusals) == 1:
        raise refusals[0][1]
    if refusals:
        lines = [f"{job_id}: {refusal.message}" for job_id, refusal in refusals]
        worst = max(refusal.code for _, refusal in refusals)
        raise CommandError(f"{len(refusals)} jobs were not changed", details=lines, code=worst)


def _print(changed: Sequence[Job | Array], as_json: bool, sent: str) -> None:
    """Print the phases of jobs and arrays; a job that must stop first has not reached its new phase yet."""
    if as_json:
        now = time.time()
        views.print_json([views.job_or_array_view(one, now) for one in changed])
        return
    for one in changed:
        if isinstance(one, Array):
            print(f"{one.id} {array_summary(one)}")
        else:
            print(f"{one.id} {f'{sent}: ' if sent and phase_of(one) in HOLDING else ''}{phase_line(one)}")
