"""`cotenant schedules`: jobs that are submitted again and again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import sanitize
from cotenant.cli.render import Column, print_card, print_table
from cotenant.codec.specs import spec_from_wire
from cotenant.v1 import schedule_service_pb2 as pb
from cotenant.v1.schedule_service_pb2 import Schedule

PAGE_SIZE = 1000
OVERLAPS = {
    "skip": pb.OVERLAP_RULE_SKIP,
    "queue": pb.OVERLAP_RULE_QUEUE,
    "replace": pb.OVERLAP_RULE_REPLACE,
}
COLUMNS = (
    Column("SCHEDULE"),
    Column("NAME", elastic=True),
    Column("TENANT"),
    Column("EVERY", elastic=True),
    Column("NEXT"),
    Column("LAST JOB"),
    Column("LAST RESULT", elastic=True),
)


def complete_schedule(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return ids of schedules with the names of their jobs, if the mesh is reachable."""
    from cotenant.cli.completion import schedule_ids
    from cotenant.cli.options import COMPLETION_SECONDS_MAX

    return schedule_ids(Flags.of(context), incomplete, COMPLETION_SECONDS_MAX)


ScheduleId = Annotated[
    str,
    typer.Argument(metavar="ID", help="Schedule id.", autocompletion=complete_schedule, show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the command with its subcommands."""
    group = typer.Typer(invoke_without_command=True)
    group.callback()(schedules)
    group.command("list")(list_schedules)
    group.command("show")(show)
    group.command("pause")(pause)
    group.command("resume")(resume)
    group.command("run-now")(run_now)
    group.command("delete")(delete)
    app.add_typer(group, name="schedules")


def schedules(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List the schedules of your tenants; or show, pause, resume, run and delete one.

    `cotenant submit --every` creates a schedule: at each due time it submits a job, whose name ends with that time and
    which has the label schedule=ID. Of the times that pass while the mesh is down, only the last one submits a job.

    \b
    Examples:
      cotenant submit --every @daily --name report --cpus 2 -- ./report
      cotenant schedules
      cotenant schedules pause ID
      cotenant jobs --all --label schedule=ID
    """
    if context.invoked_subcommand is None:
        _list(context, as_json)


def list_schedules(context: typer.Context, as_json: options.AsJson = False) -> None:
    """List schedules.

    \b
    Example:
      cotenant schedules list --json
    """
    _list(context, as_json)


def show(context: typer.Context, schedule_id: ScheduleId, as_json: options.AsJson = False) -> None:
    """Show a schedule, its next due time, and what happened at the last one.

    \b
    Example:
      cotenant schedules show ID
    """
    request = pb.GetScheduleRequest(id=schedule_id)
    _show(with_mesh(Flags.of(context), lambda mesh: mesh.schedules.GetSchedule(request)).schedule, as_json)


def pause(context: typer.Context, schedule_id: ScheduleId, as_json: options.AsJson = False) -> None:
    """Submit nothing until the schedule is resumed. Jobs that were submitted continue.

    \b
    Example:
      cotenant schedules pause ID
    """
    _act(context, as_json, lambda mesh: mesh.schedules.PauseSchedule(pb.PauseScheduleRequest(id=schedule_id)))


def resume(context: typer.Context, schedule_id: ScheduleId, as_json: options.AsJson = False) -> None:
    """Submit again, from the next due time on.

    \b
    Example:
      cotenant schedules resume ID
    """
    _act(context, as_json, lambda mesh: mesh.schedules.ResumeSchedule(pb.ResumeScheduleRequest(id=schedule_id)))


def run_now(context: typer.Context, schedule_id: ScheduleId, as_json: options.AsJson = False) -> None:
    """Submit the job of a schedule now, and print its id. The due times stay as they are.

    \b
    Example:
      cotenant schedules run-now ID
    """
    request = pb.RunScheduleRequest(id=schedule_id)
    job = with_mesh(Flags.of(context), lambda mesh: mesh.schedules.RunSchedule(request)).job
    if as_json:
        views.print_json({"schedule": schedule_id, "job": job.id})
    else:
        print(job.id)


def delete(context: typer.Context, schedule_id: ScheduleId) -> None:
    """Delete a schedule. Jobs that were submitted continue.

    \b
    Example:
      cotenant schedules delete ID
    """
    request = pb.DeleteScheduleRequest(id=schedule_id)
    with_mesh(Flags.of(context), lambda mesh: mesh.schedules.DeleteSchedule(request))
    print(f"{schedule_id} deleted")


def _list(context: typer.Context, as_json: bool) -> None:
    async def work(mesh: Mesh) -> list[Schedule]:
        return [schedule async for schedule in all_schedules(mesh)]

    found = with_mesh(Flags.of(context), work)
    if as_json:
        views.print_json([schedule_view(schedule) for schedule in found])
        return
    rows = [
        (
            one.id,
            one.spec.name,
            one.spec.tenant,
            _every(one),
            "paused" if one.paused else time_text(one, "next_time"),
            one.last_job_id or "-",
            sanitize(one.last_result) or "-",
        )
        for one in found
    ]
    print_table(COLUMNS, rows, nothing="no schedules")


async def all_schedules(mesh: Mesh) -> AsyncIterator[Schedule]:
    """Yield the schedules that the caller may see, page by page."""
    token = ""
    while True:
        request = pb.ListSchedulesRequest(page_size=PAGE_SIZE, page_token=token)
        page = await mesh.schedules.ListSchedules(request)
        for schedule in page.schedules:
            yield schedule
        if not (token := page.next_page_token):
            return


def _act(context: typer.Context, as_json: bool, act: Callable[[Mesh], Awaitable[Any]]) -> None:
    schedule = with_mesh(Flags.of(context), act).schedule
    if as_json:
        views.print_json(schedule_view(schedule))
    else:
        upcoming = "paused" if schedule.paused else f"next at {time_text(schedule, 'next_time')}"
        print(f"{schedule.id}: {upcoming}")


def _show(schedule: Schedule, as_json: bool) -> None:
    if as_json:
        views.print_json(schedule_view(schedule))
        return
    spec = schedule.spec
    print_card(
        [
            ("schedule", schedule.id),
            ("name", spec.name),
            ("tenant", spec.tenant),
            ("submitter", schedule.submitter),
            ("every", _every(schedule)),
            ("overlap", _overlap(schedule)),
            ("next", "paused" if schedule.paused else time_text(schedule, "next_time")),
            ("last", time_text(schedule, "last_time")),
            ("last job", schedule.last_job_id or "-"),
            ("last result", sanitize(schedule.last_result) or "-"),
            ("command", sanitize(" ".join(spec.command))),
        ]
    )


def time_text(schedule: Schedule, field: str) -> str:
    """Return a time of a schedule as text, "-" if it has none."""
    return views.time_of(schedule, field) or "-"


def _every(schedule: Schedule) -> str:
    return f"{schedule.every} ({schedule.time_zone})" if schedule.time_zone else schedule.every


def _overlap(schedule: Schedule) -> str:
    return next((name for name, number in OVERLAPS.items() if number == schedule.overlap), "skip")


def schedule_view(schedule: Schedule) -> views.View:
    """Return everything known about a schedule; its job is as in a job file."""
    spec = spec_from_wire(schedule.spec)
    return {
        "id": schedule.id,
        "name": spec.name,
        "tenant": spec.tenant,
        "submitter": schedule.submitter,
        "every": schedule.every,
        "time_zone": schedule.time_zone or "UTC",
        "overlap": _overlap(schedule),
        "paused": schedule.paused,
        "created": time_text(schedule, "create_time"),
        "next": views.time_of(schedule, "next_time"),
        "last": views.time_of(schedule, "last_time"),
        "last_job": schedule.last_job_id or None,
        "last_result": schedule.last_result or None,
        "command": list(spec.command),
        "gpus": views.gpus(spec.gpu_milli),
    }
