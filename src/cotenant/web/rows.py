"""Jobs and nodes as the pages get them: small maps of what lists and the cluster show. What is empty is left out.

All texts are inert: names and reasons are other people's, and pages show their control characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cotenant.cli import views
from cotenant.cli.control_characters import inert
from cotenant.cli.jobs.job_lines import outcome_line
from cotenant.cli.name_lookup import phase_of
from cotenant.codec.specs import seconds
from cotenant.core.model.lifecycle import ENDED
from cotenant.v1.job_pb2 import Job
from cotenant.v1.node_service_pb2 import Node
from cotenant.v1.resources_pb2 import NodeAllocation

NODES_NAMED_MAX = 3
Row = dict[str, Any]


def to_json(value: Any) -> str:
    """Return a value as JSON on one line, with all of its texts inert."""
    return json.dumps(inert_values(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)


def inert_values(value: Any) -> Any:
    """Return a value with all of its texts inert, and numbers that JSON lacks as None."""
    if isinstance(value, str):
        return inert(value)
    if isinstance(value, Mapping):
        return {inert(str(name)): inert_values(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [inert_values(one) for one in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None  # JSON has no such numbers
    return value


def job_row(job: Job) -> Row:
    """Return a job for the list."""
    spec, phase = job.spec, phase_of(job)
    live = is_live(job)
    row = {
        "id": job.id,
        "name": spec.name,
        "phase": str(phase),
        "tenant": spec.tenant,
        "by": job.submitter,
        "gpus": views.gpus(sum(role.replicas * role.resources.gpu_milli for role in spec.roles)),
        "cores": views.allocated_cores(job.attempt) if live else views.requested_cores(spec),
        "priority": spec.priority,
        "made": _time(job, "create_time"),
        "began": _time(job, "start_time"),
        "ended": _time(job, "end_time"),
        "why": why(job),
        "code": job.refusal.code if job.HasField("refusal") and phase not in ENDED else "",
        "wait": views.wait_of(job) if phase not in ENDED else "",
        "reserved": int(job.refusal.numbers.get("reserved_nodes", 0)) if phase not in ENDED else 0,
    }
    return {name: value for name, value in row.items() if value or name == "phase"}


def why(job: Job) -> str:
    """Return what matters about a job in its phase: how it ended, where it runs, or why it waits."""
    if phase_of(job) in ENDED:
        outcome = outcome_line(job)
        return outcome.partition(": ")[2] or outcome.partition(" ")[2]
    if is_live(job):
        nodes = sorted(one.node_id for one in job.attempt.allocations)
        named = ", ".join(nodes[:NODES_NAMED_MAX])
        return named if len(nodes) <= NODES_NAMED_MAX else f"{named} and {len(nodes) - NODES_NAMED_MAX} more"
    return job.refusal.detail if job.HasField("refusal") else job.phase_reason


def is_live(job: Job) -> bool:
    """Return whether a job holds resources."""
    return job.HasField("attempt") and views.state_of(job.attempt) in views.LIVE


def held(job: Job) -> Mapping[str, Row]:
    """Return what a job holds on each of its nodes."""
    parts = job.attempt.allocations if is_live(job) else ()
    return {one.node_id: held_part(job.id, job.spec.name, one) for one in parts}


def held_part(job_id: str, name: str, allocation: NodeAllocation) -> Row:
    """Return what a job holds on one node: core ids, and GPUs with the part of each in thousandths."""
    return {
        "id": job_id,
        "name": name,
        "cores": [core for task in allocation.tasks for core in task.core_ids],
        "gpus": [[share.uuid, share.milli] for task in allocation.tasks for share in task.gpus],
    }


def ranks(job: Job) -> list[Row]:
    """Return the replicas of a job's last attempt, by rank, with the role and the node of each."""
    found = [(task.rank, task.role, part.node_id) for part in job.attempt.allocations for task in part.tasks]
    several = len({role for _, role, _ in found}) > 1
    return [{"rank": rank, "role": role if several else "", "node": node} for rank, role, node in sorted(found)]


def node_row(node: Node, jobs: Iterable[Row]) -> Row:
    """Return a node for the picture of the cluster, with what jobs hold of it."""
    inventory = node.inventory
    numa = sorted({core.numa_node for core in inventory.cores} | {gpu.numa_node for gpu in inventory.gpus})
    return {
        "id": node.id,
        "state": views.node_state(node),
        "why": node.state_reason,
        "rack": inventory.rack,
        "gpus_used": views.gpus(node.used_gpu_milli),
        "cores_used": node.used_cores,
        "numa": [
            {
                "cores": [core.id for core in inventory.cores if core.numa_node == one],
                "gpus": [
                    {"uuid": gpu.uuid, "model": gpu.model, "ill": gpu.unhealthy_reason}
                    for gpu in inventory.gpus
                    if gpu.numa_node == one
                ],
            }
            for one in numa
        ],
        "problems": [{"reason": one.reason, "remedy": one.remedy} for one in inventory.problems],
        "jobs": sorted(jobs, key=lambda one: str(one["id"])),
    }


def capacity(nodes: Sequence[Node]) -> Row:
    """Return what all nodes have, and what attempts hold of it."""
    return {
        "nodes": len(nodes),
        "nodes_ready": sum(views.node_state(node) == "ready" for node in nodes),
        "gpus": sum(len(node.inventory.gpus) for node in nodes),
        "gpus_used": views.gpus(sum(node.used_gpu_milli for node in nodes)),
        "cores": sum(len(node.inventory.cores) for node in nodes),
        "cores_used": sum(node.used_cores for node in nodes),
    }


Sample = tuple[float, float, int, int, float | None]  # time, rate, cores, step and loss


def sample(job: Job, now: float) -> Sample | None:
    """Return a running job's last report; None without one."""
    if not job.HasField("progress") or not is_live(job):
        return None
    reported = seconds(job.progress.update_time) if job.progress.HasField("update_time") else now
    rate, cores, step = job.progress.rate_per_second, views.allocated_cores(job.attempt), job.progress.step
    return reported, rate, cores, step, job.progress.loss if job.progress.HasField("loss") else None


def _time(job: Job, field: Literal["create_time", "start_time", "end_time"]) -> float | None:
    return round(seconds(getattr(job, field)), 3) if job.HasField(field) else None
