"""`cotenant failures`: a summary of job failures."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated, Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import note, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.codec.specs import seconds, timestamp
from cotenant.v1 import job_service_pb2 as pb


class GroupBy(StrEnum):
    """What failures are grouped by, in addition to their class."""

    TENANT = "tenant"
    NODE = "node"
    USER = "user"
    MODEL = "model"


_GROUPS = {
    GroupBy.TENANT: pb.FAILURE_GROUP_TENANT,
    GroupBy.NODE: pb.FAILURE_GROUP_NODE,
    GroupBy.USER: pb.FAILURE_GROUP_SUBMITTER,
    GroupBy.MODEL: pb.FAILURE_GROUP_MODEL,
}
COLUMNS = (
    Column("CLASS"),
    Column("RESPONSIBLE"),
    Column("ATTEMPTS", right=True),
    Column("JOBS", right=True),
    Column("GPU-HOURS", right=True),
    Column("P50", right=True),
    Column("P90", right=True),
    Column("NEWEST", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("failures")(failures)


def failures(
    context: typer.Context,
    by: Annotated[GroupBy | None, typer.Option(help="Group by this as well.", show_default=False)] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only failures of the last TIME, such as 7d or 12h.", show_default=False),
    ] = None,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Only jobs of this tenant.", show_default=False)] = "",
    as_json: options.AsJson = False,
) -> None:
    """Summarize job failures by class and by who is responsible, with the GPU time lost and the run time until failure.

    \b
    Examples:
      cotenant failures
      cotenant failures --by node --since 7d
    """
    request = pb.SummarizeFailuresRequest(tenant=tenant)
    if by is not None:
        request.by = _GROUPS[by]
    if since is not None:
        try:
            request.since.CopyFrom(timestamp(max(0.0, time.time() - units.parse_seconds(since))))
        except ValueError as error:
            raise usage_error(f"--since {error}") from None

    async def work(mesh: Mesh) -> pb.SummarizeFailuresResponse:
        answer: pb.SummarizeFailuresResponse = await mesh.jobs.SummarizeFailures(request)
        return answer

    answer = with_mesh(Flags.of(context), work)
    rows = [view(count) for count in answer.counts]
    if as_json:
        views.print_json({"attempts": answer.attempts, "total": answer.total_size, "failures": rows})
        return
    if answer.total_size > len(rows):
        note(f"showing the {len(rows):,} most frequent of {answer.total_size:,} groups")
    columns = (Column(by.upper()), *COLUMNS) if by else COLUMNS
    cells = [[one["group"] or "-", *_row(one)] if by else _row(one) for one in rows]
    print_table(columns, cells, nothing=f"no failures in {answer.attempts} finished attempts")


def view(count: pb.FailureCount) -> dict[str, Any]:
    """Return a count as `--json` prints it."""
    return {
        "group": count.group,
        **views.failure_view(count.failure),
        "attempts": count.attempts,
        "jobs": count.jobs,
        "gpu_seconds": count.gpu_seconds,
        "runtime_p50_seconds": seconds(count.runtime_p50),
        "runtime_p90_seconds": seconds(count.runtime_p90),
        "newest_job_id": count.newest_job_id,
        "newest_time": seconds(count.newest_time),
    }


def _row(one: dict[str, Any]) -> list[str]:
    newest = ": ".join(filter(None, (one["newest_job_id"], one["evidence"])))
    return [
        one["class"],
        one["blame"],
        str(one["attempts"]),
        str(one["jobs"]),
        f"{one['gpu_seconds'] / 3600:.1f}",
        units.short_seconds(one["runtime_p50_seconds"]),
        units.short_seconds(one["runtime_p90_seconds"]),
        newest,
    ]
