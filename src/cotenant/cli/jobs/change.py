"""Commands that change jobs: cancel, suspend, resume, move, update."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

import grpc.aio
import typer
from google.protobuf.field_mask_pb2 import FieldMask

from cotenant.cli import options, units, views
from cotenant.cli.arrays import array_summary
from cotenant.cli.connection import Mesh, command_error, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.follow import phase_line
from cotenant.cli.jobs.job_fields import QOS
from cotenant.cli.jobs.list_jobs import split_labels
from cotenant.cli.name_lookup import find_jobs_and_arrays, not_one_job, phase_of
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.codec.errors import from_error
from cotenant.codec.specs import duration, timestamp
from cotenant.core.model.lifecycle import HOLDING, Phase
from cotenant.core.model.priority import parse_priority
from cotenant.core.model.validation import PRIORITY_MAX, RETRIES_MAX
from cotenant.v1.array_service_pb2 import Array, CancelArrayRequest, ResumeArrayRequest, SuspendArrayRequest
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import (
    CancelJobRequest,
    MoveJobRequest,
    ResumeJobRequest,
    SuspendJobRequest,
    UpdateJobRequest,
)

NO_DEADLINE = "none"

Act = Callable[[Mesh, Job], Awaitable[Any]]
ActOnArray = Callable[[Mesh, Array], Awaitable[Any]]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("cancel")(cancel)
    app.command("suspend")(suspend)
    app.command("resume")(resume)
    app.command("move")(move)
    app.command("update")(update)


def cancel(context: typer.Context, job_ids: options.JobIds, as_json: options.AsJson = False) -> None:
    """Cancel jobs or whole arrays. Running jobs get their warning signal and grace period first.

    \b
    Example:
      cotenant cancel ID ARRAY ARRAY_7
    """
    _change(
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
    _change(
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
    _change(
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

    _change(context, [job_id], as_json, lambda mesh, job: mesh.jobs.MoveJob(moved(job)), sent="migrating")


def update(
    context: typer.Context,
    job_id: options.JobId,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="New name.", show_default=False)] = None,
    priority: Annotated[
        str | None,
        typer.Option(metavar="CLASS|N", help="low, normal, high, urgent or a number; higher runs earlier."),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Deadline: 2h, or 2030-01-31T18:00; none removes it.")
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=RETRIES_MAX, help="How often a failed attempt is retried."),
    ] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Set a label; K= removes it.")] = None,
    preemptible: Annotated[
        bool | None, typer.Option("--preemptible/--not-preemptible", help="Whether the job may be preempted.")
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Latency objective of a service, such as 50ms.")
    ] = None,
    percentile: Annotated[str | None, typer.Option(metavar="P", help="Percentile of the latency objective.")] = None,
    arrivals: Annotated[str | None, typer.Option(metavar="N", help="Requests per second.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Change a job that has not finished.

    A running service is not restarted; with `replicas: auto` the new objectives apply from its next start.

    \b
    Examples:
      cotenant update ID --priority high --deadline 2h
      cotenant update ID --label project=vision --not-preemptible
      cotenant update ID --arrivals 900 --latency 50ms
    """
    changes: dict[str, Any] = {
        "name": name,
        "priority": None if priority is None else _priority(priority),
        "retries_max": retries,
        "preemptible": preemptible,
        "deadline": deadline,
        "labels": label,
        **_objectives({"latency": latency, "percentile": percentile, "arrivals": arrivals}),
    }
    given = {field: value for field, value in changes.items() if value is not None}
    if not given:
        raise usage_error("nothing to change", hint="see `cotenant update --help`")
    if deadline is not None:
        given["deadline"] = None if deadline == NO_DEADLINE else _deadline(deadline)
    _change(context, [job_id], as_json, lambda mesh, job: mesh.jobs.UpdateJob(_updated(job, given)))


def _updated(job: Job, given: Mapping[str, Any]) -> UpdateJobRequest:
    """Return a request that updates only the given fields."""
    request = UpdateJobRequest(job=Job(id=job.id), update_mask=FieldMask(paths=[f"spec.{field}" for field in given]))
    spec = request.job.spec
    for field, value in given.items():
        if field == "labels":
            spec.labels.update(_merged_labels(job, value))
            request.job.etag = job.etag  # labels are replaced as a whole; the etag guards against concurrent changes
        elif field.startswith("qos."):
            setattr(spec.qos, field.removeprefix("qos."), value)
        elif field != "deadline":
            setattr(spec, field, value)
        elif value is not None:
            spec.deadline.CopyFrom(timestamp(value))
    return request


def _objectives(changes: Mapping[str, str | None]) -> dict[str, float]:
    """Return objectives by their field paths, parsed as in job files."""
    given: dict[str, float] = {}
    for name, text in changes.items():
        if text is not None:
            try:
                given[QOS[name].wire] = QOS[name].read(text)
            except ValueError as error:
                raise usage_error(f"--{name} {error}") from None
    return given


def _priority(text: str) -> int:
    try:
        priority = parse_priority(text)
    except ValueError as error:
        raise usage_error(f"--priority {error}") from None
    if abs(priority) > PRIORITY_MAX:
        raise usage_error(f"--priority must be from -{PRIORITY_MAX} to {PRIORITY_MAX}, not {priority}")
    return priority


def _deadline(text: str) -> float:
    try:
        return units.parse_deadline(text, time.time())
    except ValueError as error:
        raise usage_error(f"--deadline {error}") from None


def _merged_labels(job: Job, pairs: Sequence[str]) -> dict[str, str]:
    labels = {**job.spec.labels, **split_labels(pairs)}
    return {key: value for key, value in labels.items() if value}


def _change(
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
        with_mesh(Flags.of(context), work)
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
