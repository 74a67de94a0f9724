"""The format muri: Tiresias' columns with times in milliseconds and the stages of an iteration (SIGCOMM'22 [D])."""

from __future__ import annotations

from cotenant.simulator.traces.rows import MILLISECONDS, SECONDS_MAX, Row
from cotenant.simulator.traces.trace_job import TraceJob, workers

COLUMNS = ("job_id", "num_gpu", "submit_time", "duration", "model_name", "iteration_time", "resource_time_0")


def read(row: Row) -> TraceJob:
    """Return the job of a row. `duration` is iterations × iteration time, which is the run time when alone.

    The column `priority` is ignored: it is random, and only Muri's AntMan baseline uses it, 0 for a guaranteed job and
    1 for an opportunistic one.
    """
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.milliseconds("submit_time"),
        work_seconds=row.above_zero("duration", "milliseconds", SECONDS_MAX * MILLISECONDS) / MILLISECONDS,
        roles=workers(row.gpus("num_gpu")),
        model=row.fields["model_name"],
        gpu_type="V100",
    )
