"""The formats philly, itp and tiresias: a submission, a duration and a number of GPUs."""

from __future__ import annotations

from cotenant.simulator.traces.rows import Row
from cotenant.simulator.traces.trace_job import TraceJob, workers


def tiresias(row: Row) -> TraceJob:
    """Return a job of Tiresias' simulator (NSDI'19 [D]); times in seconds."""
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.seconds("submit_time"),
        work_seconds=row.duration_seconds("duration"),
        roles=workers(row.gpus("num_gpu")),
        model=row.fields.get("model_name", ""),
    )


def itp(row: Row) -> TraceJob:
    """Return a job of Microsoft's ITP clusters (ElasticFlow's traces, 2021 [D]); times in seconds."""
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.seconds("submission_time"),
        work_seconds=row.duration_seconds("duration"),
        roles=workers(row.gpus("num_gpu")),
    )


def philly(row: Row) -> TraceJob:
    """Return a job of a Philly virtual cluster (ATC'19 [D]); a timestamp without a zone is UTC."""
    return TraceJob(
        id=f"line-{row.line}",  # the published files have no job names
        submitted_seconds=row.unix_seconds("timestamp"),
        work_seconds=row.duration_seconds("duration"),
        roles=workers(row.gpus("num_gpus")),
    )
