"""A plan of a snapshot as plain values, as `cotenant plan --json` prints it and `PlanJobs` sends it.

The names are those of the fields of `PlanJobsResponse`, and times are strings as protobuf's JSON mapping writes them.
"""

from __future__ import annotations

import math
from typing import Any

from cotenant.core.model.resources import as_map
from cotenant.simulator.snapshot_plan import PlannedJob, PlannedPlace, PlannedStart, SnapshotPlan

View = dict[str, Any]


def plan_view(plan: SnapshotPlan) -> View:
    """Return a plan as plain values."""
    return {
        "policies": dict(plan.policies),
        "jobs": [_job(job) for job in plan.jobs],
        "stops": [
            {
                "job_id": stop.id,
                "kind": stop.kind,
                "starts": list(stop.starts),
                "places": [_place(place) for place in stop.places],
            }
            for stop in plan.stops
        ],
        "draws": plan.draws,
        "notes": list(plan.notes),
    }


def _job(job: PlannedJob) -> View:
    view: View = {"job_id": job.id, "order": job.order or 0, "places": [_place(place) for place in job.places]}
    if not job.starts:
        view["refusal"] = {"code": job.code, "detail": job.detail, "remedy": job.remedy}
    if job.start:
        view["start"] = _start(job.start)
    return view


def _start(start: PlannedStart) -> View:
    times = {"start": start.seconds, "start_p10": start.p10_seconds, "start_p90": start.p90_seconds}
    known = {} if start.of_unknown else {key: f"{at:.3f}s" for key, at in times.items() if not math.isinf(at)}
    return {**known, "of_unknown": start.of_unknown, "after_job_ids": list(start.after)}


def _place(place: PlannedPlace) -> View:
    amounts = {"memory_bytes": place.memory_bytes, "scratch_bytes": place.scratch_bytes}
    counts = {"gpu_milli": place.gpu_milli, "cores": place.cores, **amounts}
    shares = [{"gpu": gpu, "milli": milli} for gpu, milli in place.shares]
    whole = {"node_id": place.node, "role": place.role, "replicas": place.replicas, **counts, "shares": shares}
    return as_map(whole.items())
