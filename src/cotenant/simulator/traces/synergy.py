"""The format synergy: a replay trace of Synergy's simulator (OSDI'22 [D]), without a header.

The file has iterations, not times. Synergy's own simulator converts durations to iterations by dividing by the
iteration time of the model's profile, whatever the number of GPUs; that time holds at the fair share of a server, 3
cores and 62.5 GB per GPU. So the work is iterations × that time, which is bundled for each model.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cotenant.simulator.traces.rows import SECONDS_MAX, Row
from cotenant.simulator.traces.trace_job import TraceJob, workers

COLUMNS = ("job_id", "model", "arrival_s", "iters", "gpus")
NUMBERS = ("arrival_s", "iters", "gpus")
PROFILE = Path(__file__).parent.parent / "samples" / "synergy_iterations.csv"


@cache
def iteration_seconds() -> Mapping[str, float]:
    """Return the seconds of an iteration by model, at 3 cores and 62.5 GB per V100 GPU."""
    with PROFILE.open(newline="", encoding="utf-8") as file:
        return {row["model"]: float(row["iteration_seconds"]) for row in csv.DictReader(file)}


def read(row: Row) -> TraceJob:
    """Return the job of a row."""
    model = row.fields["model"]
    if model not in iteration_seconds():
        raise row.bad("model", f"one of {', '.join(iteration_seconds())}")
    return TraceJob(
        id=row.text("job_id"),
        submitted_seconds=row.seconds("arrival_s"),
        work_seconds=row.above_zero("iters", "iterations", SECONDS_MAX) * iteration_seconds()[model],
        roles=workers(row.gpus("gpus")),
        model=model,
        gpu_type="V100",
    )
