"""`cotenant usage`: what jobs used in a period."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, note, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.codec.specs import timestamp
from cotenant.v1 import job_service_pb2 as pb


class UsageBy(StrEnum):
    """What usage is grouped by."""

    TENANT = "tenant"
    USER = "user"
    WEEK = "week"
    DAY = "day"
    JOB_CLASS = "job-class"


GROUPS = {
    UsageBy.TENANT: pb.USAGE_GROUP_TENANT,
    UsageBy.USER: pb.USAGE_GROUP_SUBMITTER,
    UsageBy.WEEK: pb.USAGE_GROUP_WEEK,
    UsageBy.DAY: pb.USAGE_GROUP_DAY,
    UsageBy.JOB_CLASS: pb.USAGE_GROUP_MODEL,
}
COLUMNS = (
    Column("GPU-HOURS", right=True),
    Column("CORE-HOURS", right=True),
    Column("JOBS", right=True),
    Column("FAILED", right=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("usage")(usage)


def usage(
    context: typer.Context,
    by: Annotated[
        UsageBy, typer.Option(help="Group by this; job-class: the job's model, or else its name.")
    ] = UsageBy.TENANT,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only what was used since TIME, such as 30d or 2030-01-31.")
    ] = "",
    until: Annotated[
        str, typer.Option(metavar="TIME", help="Only what was used before TIME.", show_default="now")
    ] = "",
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Only jobs of this tenant.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Parquet file instead.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the GPU-hours and core-hours that jobs used.

    Counted is what their attempts held while they ran, not what was requested. Running jobs count until now, and
    archived jobs count as well. Days and weeks are in UTC; weeks begin on Monday. You see the jobs of your own tenants;
    operators see all.

    \b
    Examples:
      cotenant usage --since 30d
      cotenant usage --by week --tenant vision --since 2030-01-01
      cotenant usage --by user --csv > usage.csv
      cotenant usage --by job-class --parquet usage.parquet
    """
    if as_csv + as_json + (parquet is not None) > 1:
        raise usage_error("choose one of --csv, --json and --parquet")
    request = _request(by, tenant, since, until)

    async def work(mesh: Mesh) -> pb.SummarizeUsageResponse:
        answer: pb.SummarizeUsageResponse = await mesh.jobs.SummarizeUsage(request)
        return answer

    answer = with_mesh(Flags.of(context), work)
    if answer.total_size > len(answer.counts):
        note(f"showing {len(answer.counts):,} of {answer.total_size:,} groups; the total has all")
    if answer.missing_archives:
        note(f"{answer.missing_archives} archives of other queues cannot be read: ended jobs in them are missing")
    rows = [usage_view(by, count) for count in answer.counts]
    if as_json:
        views.print_json({"usage": rows, "total": usage_view(by, answer.total) | {by.value: None}})
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, fieldnames=[*usage_view(by, answer.total)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif parquet is not None:
        _write_parquet(parquet, by, rows)
    else:
        cells = [_row(by, row) for row in rows]
        if cells:
            cells.append(["total", *_row(by, usage_view(by, answer.total))[1:]])
        print_table([Column(by.value.upper(), elastic=True), *COLUMNS], cells, nothing="no job ran in that time")


def _request(by: UsageBy, tenant: str, since: str, until: str) -> pb.SummarizeUsageRequest:
    """Return the request for a period.

    Raises:
        CommandError: a time is invalid, or the period is empty.
    """
    request, now = pb.SummarizeUsageRequest(by=GROUPS[by], tenant=tenant), time.time()
    wrong, moments = [], {}
    for option, text in (("--since", since), ("--until", until)):
        try:
            moments[option] = units.parse_moment(text, now) if text else None
        except ValueError as error:
            wrong.append(f"{option} {error}")
    if wrong:
        raise usage_error(wrong[0] if len(wrong) == 1 else "invalid period", details=wrong if len(wrong) > 1 else ())
    first, last = moments["--since"], moments["--until"]
    if first is not None and first >= (now if last is None else last):
        raise usage_error(f"--since {since} is not before {f'--until {until}' if until else 'now'}")
    if first is not None:
        request.since.CopyFrom(timestamp(first))
    if last is not None:
        request.until.CopyFrom(timestamp(last))
    return request


def usage_view(by: UsageBy, count: pb.UsageCount) -> dict[str, Any]:
    """Return a count as `--json` prints it."""
    return {
        by.value: count.group,
        "gpu_hours": count.gpu_seconds / 3600,
        "core_hours": count.core_seconds / 3600,
        "jobs": count.jobs,
        "failed_jobs": count.failed_jobs,
    }


def _row(by: UsageBy, view: dict[str, Any]) -> list[str]:
    hours = [f"{view[name]:,.2f}" for name in ("gpu_hours", "core_hours")]
    return [view[by.value] or "-", *hours, f"{view['jobs']:,}", f"{view['failed_jobs']:,}"]


def _write_parquet(path: Path, by: UsageBy, rows: Sequence[dict[str, Any]]) -> None:
    """Write one row for each group.

    Raises:
        CommandError: the file cannot be written.
    """
    import pyarrow as pa  # of the extra `research`
    import pyarrow.parquet as pq

    types = [(by.value, pa.string()), ("gpu_hours", pa.float64()), ("core_hours", pa.float64())]
    schema = pa.schema([*types, ("jobs", pa.int64()), ("failed_jobs", pa.int64())])
    try:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None
    note(f"wrote {path}: {len(rows):,} rows")
