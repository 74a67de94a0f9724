"""`squeue --json`: jobs as JSON with the keys of Slurm's data parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cotenant.cli.slurm import times
from cotenant.cli.slurm.facts import Facts


def print_jobs(jobs: Sequence[Facts]) -> None:
    """Print jobs."""
    print(json.dumps({"jobs": [job_view(one) for one in jobs], "warnings": [], "errors": []}, indent=2))


def job_view(one: Facts) -> Mapping[str, Any]:
    """Return a job as a map."""
    limit = one.limit_seconds
    return {
        "account": one.spec.tenant,
        "array_job_id": _number(int(one.array_number) if one.in_array else 0),
        "array_task_id": _number(int(one.index) if one.in_array else None),
        "comment": one.comment,
        "cpus": _number(one.cpus),
        "current_working_directory": one.work_folder,
        "dependency": one.dependency,
        "end_time": _number(one.end),
        "job_id": int(one.raw_id),
        "job_state": [one.state.name],
        "name": one.spec.name,
        "node_count": _number(one.node_count),
        "nodes": one.node_list,
        "partition": one.spec.queue,
        "priority": _number(one.spec.priority),
        "start_time": _number(one.begin),
        "state_reason": one.reason,
        "submit_time": _number(one.submitted),
        "time_limit": {"set": True, "infinite": limit is None, "number": int((limit or 0) // times.MINUTE)},
        "tres_req_str": one.tres,
        "user_name": one.job.submitter,
    }


def _number(value: float | None) -> Mapping[str, Any]:
    return {"set": value is not None, "infinite": False, "number": int(value or 0)}
