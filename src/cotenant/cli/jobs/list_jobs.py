"""`cotenant jobs`: list jobs once, or watch them change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.arrays import array_summary
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_pages import PAGE_SIZE_MAX, newest_jobs_and_arrays
from cotenant.cli.name_lookup import find_job_or_array, phase_of
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.render import Column, join_or_count, print_table
from cotenant.cli.watch import Removed, changes, live_table
from cotenant.codec.specs import seconds, timestamp
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.priority import in_words
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job, JobPhase
from cotenant.v1.job_service_pb2 import JOB_VIEW_BASIC, JOB_VIEW_FULL, JobFilter, ListJobsRequest

LIMIT_DEFAULT = 100
NODES_NAMED_MAX = 2
THROTTLED = "throttled on "

COLUMNS = (
    Column("ID"),
    Column("NAME", elastic=True),
    Column("PHASE", styled=True),
    Column("GPUS", right=True),
    Column("CORES", right=True),
    Column("WAIT", right=True),
    Column("RUN", right=True),
    Column("NODES / REASON", elastic=True),
)
WIDE = (
    *COLUMNS[:2],
    Column("KIND"),
    Column("TENANT", elastic=True),
    Column("QUEUE", elastic=True),
    Column("PRIORITY"),
    *COLUMNS[2:],
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("jobs")(jobs)


def jobs(
    context: typer.Context,
    phase: Annotated[
        list[Phase] | None,
        typer.Option(metavar="PHASE", help=f"Only jobs in this phase: {', '.join(Phase)}; repeatable."),
    ] = None,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Only jobs of this tenant.")] = "",
    queue: Annotated[str, typer.Option(metavar="QUEUE", help="Only jobs of this queue.")] = "",
    name: Annotated[str, typer.Option(metavar="NAME", help="Only jobs with this name.")] = "",
    node: Annotated[
        str, typer.Option(metavar="NODE", help="Only jobs on this node.", autocompletion=options.complete_node)
    ] = "",
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Only jobs with this label.")] = None,
    me: Annotated[bool, typer.Option("--me", help="Only jobs that you have submitted.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include jobs that have ended.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Show at most N jobs, newest first; default: {LIMIT_DEFAULT}, with --all no limit.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Only jobs submitted since TIME, such as 2d or 2030-01-31; includes ended jobs.",
        ),
    ] = "",
    until: Annotated[
        str, typer.Option(metavar="TIME", help="Only jobs submitted before TIME; includes ended jobs.")
    ] = "",
    sort: Annotated[
        str,
        typer.Option(
            metavar="FIELDS",
            help="Sort by create_time, start_time, end_time, priority, name or attained_gpu_seconds; several separated "
            "by commas, each descending with a - in front. Each job of an array then has its own row.",
        ),
    ] = "",
    array: Annotated[str, typer.Option(metavar="ID", help="Only jobs of this array, sorted by index.")] = "",
    expand: Annotated[bool, typer.Option("--expand", help="Show each job of an array in its own row.")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="Add kind, tenant, queue and priority.")] = False,
    slo: Annotated[
        bool,
        typer.Option(
            "--slo",
            help="Add whether objectives are met, at risk or missed, and by how much. Each job of an array then has "
            "its own row.",
        ),
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing jobs as they change.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """List jobs, newest first. Jobs that have ended need --all, --since or --phase. An array has one row.

    \b
    Examples:
      cotenant jobs --me --watch
      cotenant jobs --all --tenant vision --label project=vision
      cotenant jobs --phase queued --json
      cotenant jobs --all --array ID
      cotenant jobs --since 2d --sort=-attained_gpu_seconds,name
      cotenant jobs --all --slo
    """
    wanted = JobFilter(
        tenant=tenant, queue=queue, name=name, node_id=node, labels=split_labels(label or []), own_only=me
    )
    _set_times(wanted, since, until)
    flags = Flags.of(context)
    if watch and sort:
        raise usage_error("--sort does not go with --watch, which shows the newest jobs first")
    if watch and slo:
        raise usage_error("--slo does not go with --watch: margins change although jobs do not")
    if watch:
        shown = _shown(phase or [], everything or bool(since or until), since=time.time())
        with suppress(KeyboardInterrupt):  # Ctrl-C ends watching
            with_mesh(flags, lambda mesh: _watch(mesh, wanted, shown, wide, as_json))
        return
    ended_too, now = everything or bool(since or until), time.time()
    wanted.phases.extend(_phases(phase or [], ended_too))
    most = limit or (None if everything else LIMIT_DEFAULT)
    if expand or array or as_json or sort or slo:
        view = JOB_VIEW_FULL if as_json else JOB_VIEW_BASIC
        request = ListJobsRequest(filter=wanted, view=view, order_by=_order_by(sort))
        jobs, total = with_mesh(flags, lambda mesh: _listed(mesh, request, most, array), unary=True)
        if as_json:
            views.print_json([views.job_view(job, now) for job in jobs])
            return
        found: Sequence[Job | Array] = jobs
    else:
        found, total = with_mesh(flags, lambda mesh: newest_jobs_and_arrays(mesh, wanted, most), unary=True)
    columns = [*(WIDE if wide else COLUMNS)]
    shown_jobs = [_view(one, now) for one in found]
    rows = [_row(view, wide) for view in shown_jobs]
    if slo:
        _add_objectives(columns, rows, shown_jobs)
    print_table(columns, rows, nothing=_nothing(ended_too))
    if total > len(found):
        note(f"{total - len(found)} more; show them with --limit or --all")


def _add_objectives(columns: list[Column], rows: Sequence[list[str]], found: Sequence[dict[str, Any]]) -> None:
    """Insert the column of the objectives before the last one."""
    from cotenant.cli.objective_views import objectives_cell  # only for --slo

    columns.insert(-1, Column("OBJECTIVES", elastic=True))
    for row, view in zip(rows, found, strict=True):
        row.insert(-1, objectives_cell(view.get("objectives", ())))


def _set_times(wanted: JobFilter, since: str, until: str) -> None:
    now = time.time()
    for option, text, field in (("--since", since, wanted.created_since), ("--until", until, wanted.created_before)):
        try:
            if text:
                field.CopyFrom(timestamp(units.parse_moment(text, now)))
        except ValueError as error:
            raise usage_error(f"{option} {error}") from None


def _order_by(sort: str) -> str:
    """Return the order of a request from --sort.

    >>> _order_by("-priority,+name, end_time desc")
    'priority desc,name,end_time desc'
    """
    parts = (part.strip() for part in sort.split(","))
    return ",".join(f"{part[1:]} desc" if part.startswith("-") else part.removeprefix("+") for part in parts)


def _nothing(everything: bool) -> str:
    return "no jobs" if everything else "no jobs; --all includes jobs that have ended"


def split_labels(pairs: Sequence[str]) -> dict[str, str]:
    """Return labels from `KEY=VALUE` texts."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise usage_error(f"--label {wrong[0]}: value is missing", hint="write --label KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _phases(chosen: Sequence[Phase], everything: bool) -> list[JobPhase.ValueType]:
    """Return the requested phases; by default those of live jobs; none, meaning any phase, with --all."""
    if not chosen and everything:
        return []
    return [JobPhase.Value(f"JOB_PHASE_{phase.name}") for phase in chosen or Phase if chosen or phase not in ENDED]


def _view(found: Job | Array, now: float) -> dict[str, Any]:
    """Return the view of a job, or of an array as a single row."""
    view = views.job_or_array_view(found, now)
    return view | {"times": found.job_count, "standing": array_summary(found)} if isinstance(found, Array) else view


async def _listed(mesh: Mesh, request: ListJobsRequest, limit: int | None, array: str) -> tuple[list[Job], int]:
    """Return jobs, read page by page up to the limit, and their total number; those of an array by index."""
    if array:
        found_array = await find_job_or_array(mesh, array)
        if not isinstance(found_array, Array):
            raise usage_error(f"{found_array.id} is not an array", hint="list arrays with `cotenant jobs`")
        request.filter.array_id = found_array.id
    found: list[Job] = []
    total = 0
    most = None if array and not request.order_by else limit  # the jobs of an array are sorted here
    while most is None or len(found) < most:
        request.page_size = PAGE_SIZE_MAX if most is None else min(PAGE_SIZE_MAX, most - len(found))
        page = await mesh.jobs.ListJobs(request)
        found += page.jobs
        total, request.page_token = page.total_size, page.next_page_token
        if not page.next_page_token:
            break
    if array and not request.order_by:
        found.sort(key=lambda job: job.spec.array_task.index)
    return found[:limit], total


def _shown(chosen: Sequence[Phase], everything: bool, since: float) -> Callable[[Job], bool]:
    """Return the filter for watching. The server cannot apply it: phases change, and ends of jobs must be seen."""

    def shown(job: Job) -> bool:
        if chosen:
            return phase_of(job) in chosen
        return everything or phase_of(job) not in ENDED or seconds(job.end_time) >= since

    return shown


async def _watch(mesh: Mesh, wanted: JobFilter, shown: Callable[[Job], bool], wide: bool, as_json: bool) -> None:
    """Show jobs as they change: in place on a terminal, otherwise one line per change."""
    columns = WIDE if wide else COLUMNS
    if as_json:
        async for job in changes(mesh, wanted, view=JOB_VIEW_FULL):
            if isinstance(job, Removed):
                views.print_json_line({"id": job.id, "removed": True})
            elif shown(job):
                views.print_json_line(views.job_view(job, time.time()))
        return

    def rows(known: Iterable[Job]) -> list[list[str]]:
        now = time.time()
        newest = sorted(filter(shown, known), key=lambda job: (-seconds(job.create_time), job.id))
        return [_row(views.job_view(job, now), wide) for job in newest]

    await live_table(changes(mesh, wanted), columns, rows)


def _row(view: dict[str, Any], wide: bool) -> list[str]:
    first, rest = [view["id"], view["name"]], cells(view)
    return (
        [*first, view["kind"], view["tenant"], view["queue"], in_words(view["priority"]), *rest]
        if wide
        else [*first, *rest]
    )


def cells(view: dict[str, Any]) -> list[str]:
    """Return the cells for a job's phase, size, times and nodes; or for an array."""
    if "times" in view:
        times, cores = view["times"], units.write_cores(view["cores"])
        return [view["phase"], f"{times} × {view['gpus']:g}", f"{times} × {cores}", "-", "-", view["standing"]]
    ran = view["run_seconds"]
    return [
        view["phase"],
        f"{view['gpus']:g}",
        units.write_cores(view["cores"]),
        units.short_seconds(view["wait_seconds"]),
        units.short_seconds(ran) if ran else "-",
        where(view),
    ]


def where(view: dict[str, Any]) -> str:
    """Return where a job runs, or why it does not run."""
    if view["nodes"]:
        mark = THROTTLED if views.throttle_of(view) else ""
        return mark + join_or_count(view["nodes"], NODES_NAMED_MAX, "nodes")
    if view["phase"] == Phase.QUEUED and view["reason"]:
        return str(view["reason"]["code"])
    return str(view["phase_reason"])
