"""`cotenant history`: archived jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from google.protobuf.message import DecodeError

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.mesh.settings import ARCHIVE_FILE
from cotenant.cli.mesh.state_dir import resolve_state_dir
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import CommandError, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.codec.specs import seconds
from cotenant.core.model.lifecycle import ENDED
from cotenant.v1.job_pb2 import Job

LIMIT_DEFAULT = 100
COLUMNS = (
    Column("ID"),
    Column("NAME", elastic=True),
    Column("TENANT", elastic=True),
    Column("PHASE", styled=True),
    Column("ENDED"),
    Column("RUN", right=True),
    Column("GPU HOURS", right=True),
    Column("REASON", elastic=True),
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("history")(history)


def history(
    context: typer.Context,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Only jobs of this tenant.")] = "",
    name: Annotated[str, typer.Option(metavar="NAME", help="Only jobs with this name.")] = "",
    job_id: Annotated[str, typer.Option("--id", metavar="ID", help="Only this job, or the jobs of this array.")] = "",
    phase: Annotated[
        str, typer.Option(metavar="PHASE", help=f"Only jobs in this phase: {', '.join(sorted(ENDED))}.")
    ] = "",
    since: Annotated[str, typer.Option(metavar="DATE", help="Only jobs that ended on this day or later.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most N jobs, newest first.")] = LIMIT_DEFAULT,
    archive: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Archive file; default: the one in the state directory.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List archived jobs: those that ended long ago. `cotenant jobs --all` lists recent ones.

    The archive is an SQLite file next to the queue's state, written by the leading queue. Any SQLite client can query
    its table `jobs`.

    \b
    Examples:
      cotenant history --tenant vision --since 2026-01-01
      cotenant history --name nightly --phase failed --json
      cotenant history --id ID --archive FILE
      sqlite3 archive.sqlite 'SELECT tenant, count(*) FROM jobs GROUP BY 1'
    """
    if phase and phase not in set(ENDED):
        raise usage_error(f"--phase must be one of {', '.join(sorted(ENDED))}, not {phase!r}")
    path = archive or resolve_state_dir(context) / ARCHIVE_FILE
    wanted: dict[str, str | float] = {
        "? IN (id, substr(id, 1, 12))": job_id,
        "tenant = ?": tenant,
        "name = ?": name,
        "phase = ?": phase,
        "end_time >= ?": _since_seconds(since),
    }
    found = list(_found(path, {term: value for term, value in wanted.items() if value}, limit))
    if as_json:
        views.print_json([views.job_view(job, seconds(job.end_time)) for job in found])
    else:
        print_table(COLUMNS, [_row(job) for job in found], nothing=f"no such jobs in {path}")


def _since_seconds(day: str) -> float:
    try:
        moment = datetime.fromisoformat(day) if day else None
    except ValueError:
        raise usage_error(f"--since must be a date such as 2026-01-31, not {day!r}") from None
    if moment is None:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _found(path: Path, wanted: dict[str, str | float], limit: int) -> Iterator[Job]:
    """Yield archived jobs, most recently ended first."""
    if not path.exists():
        raise CommandError(f"archive {path} not found", hint="jobs are archived 30 days after they end")
    where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                f"SELECT job FROM jobs {where} ORDER BY end_time DESC, id LIMIT ?",
                (*wanted.values(), limit),
            )
            for (message,) in rows:
                yield Job.FromString(message)
    except (sqlite3.Error, DecodeError, TypeError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {error}") from None


def _row(job: Job) -> tuple[str, ...]:
    return (
        job.id,
        job.spec.name,
        job.spec.tenant,
        phase_of(job),
        units.format_time(seconds(job.end_time)),
        units.short_seconds(seconds(job.run_time)),
        f"{job.attained_gpu_seconds / 3600:.2f}",
        job.phase_reason,
    )
