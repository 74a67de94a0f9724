"""The format gavel: a trace of Gavel's simulator (OSDI'20 [D]), tab-separated, without a header.

The file has steps, not times. The work is steps / the published throughput of the job type on this many V100 GPUs of
one server, alone; that extract is bundled. An SLO above 0 is a factor: the deadline is arrival + SLO × work.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cotenant.simulator.traces.rows import SECONDS_MAX, Row
from cotenant.simulator.traces.trace_job import TraceJob, workers

COLUMNS = (
    "job_type",
    "command",
    "working_directory",
    "num_steps_arg",
    "needs_data_dir",
    "total_steps",
    "scale_factor",
    "priority_weight",
    "SLO",
    "arrival_time",
)
NUMBERS = ("total_steps", "scale_factor", "priority_weight", "SLO", "arrival_time")
PROFILE = Path(__file__).parent.parent / "samples" / "gavel_v100.csv"


@cache
def steps_per_second() -> Mapping[tuple[str, int], float]:
    """Return the throughput by job type and number of V100 GPUs, all of one server."""
    with PROFILE.open(newline="", encoding="utf-8") as file:
        return {(row["job_type"], int(row["gpus"])): float(row["steps_per_second"]) for row in csv.DictReader(file)}


def read(row: Row) -> TraceJob:
    """Return the job of a row. Its priority is the weight minus one, rounded; jobs are named by their line."""
    kind, gpus = row.fields["job_type"], row.gpus("scale_factor")
    if (kind, gpus) not in steps_per_second():
        known = sorted(count for name, count in steps_per_second() if name == kind)
        counts = ", ".join(str(count) for count in known)
        if known:
            raise row.bad("scale_factor", f"a number of GPUs for which {kind} was measured on V100: {counts}")
        raise row.bad("job_type", "a job type measured on V100")
    work_seconds = row.above_zero("total_steps", "steps", SECONDS_MAX) / steps_per_second()[kind, gpus]
    submitted_seconds = row.seconds("arrival_time")
    slo = row.seconds("SLO")
    return TraceJob(
        id=f"line-{row.line}",
        submitted_seconds=submitted_seconds,
        work_seconds=work_seconds,
        roles=workers(gpus),
        model=kind,
        gpu_type="V100",
        priority=round(row.number("priority_weight", "weight", 1e6)) - 1,
        deadline_seconds=submitted_seconds + slo * work_seconds if slo > 0 else None,
    )
