"""Jobs and nodes as `--json` prints them: plain maps with stable keys. Tables and cards are made from the same maps.

Times are ISO 8601 texts in UTC, durations are in seconds, memory is in bytes, GPUs are in whole GPUs or fractions.
Unknown values are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cotenant.cli import units
from cotenant.cli.arrays import counts, indices_of, leading_phase
from cotenant.cli.condition_views import agent_view
from cotenant.cli.control_characters import UNPRINTABLE
from cotenant.cli.jobs.launch_failures import launch_failure_view
from cotenant.cli.name_lookup import phase_of
from cotenant.codec import refusals
from cotenant.codec.dependencies import condition_of
from cotenant.codec.node_capabilities import declared
from cotenant.codec.specs import (
    ATTEMPT_STATES,
    ENVIRONMENT_SOURCES,
    HEALTH_ACTIONS,
    KINDS,
    LOCALITIES,
    mounts_from_wire,
    seconds,
    secrets_from_wire,
    triggers_from_wire,
)
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.lifecycle import AttemptState, Phase
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.model.priority import class_of
from cotenant.core.model.refusal import Refusal as Reason
from cotenant.core.model.refusal import Wait
from cotenant.core.model.resources import AMOUNT_KINDS, AMOUNTS, ResourceKind, amounts_of
from cotenant.security.validity import Validity
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.certificate_pb2 import Certificate
from cotenant.v1.job_pb2 import (
    Attempt,
    Dependency,
    ExitStatus,
    Failure,
    FailureBlame,
    Job,
    JobSpec,
    ObjectiveStatus,
    Refusal,
    StartForecast,
)
from cotenant.v1.job_service_pb2 import JobAhead
from cotenant.v1.node_service_pb2 import Node, NodeState, NodeStateOwner
from cotenant.v1.resources_pb2 import HealthProblem, NodeAllocation

View = dict[str, Any]
ARRAY_FIELDS = (  # in the views of arrays as in those of jobs
    "id", "name", "kind", "tenant", "queue", "priority", "priority_class", "submitter", "labels", "replicas", "gpus",
    "cores", *AMOUNTS, "create_time", "end_time", "deadline", "dependencies", "retries", "archived",
)  # fmt: skip
LIVE = frozenset({AttemptState.ASSIGNED, AttemptState.RUNNING, AttemptState.STOPPING})


def json_text(value: object, indent: int | None = None) -> str:
    r"""Return a value as JSON; characters that would change how a terminal shows the text are escaped.

    >>> json_text("\x9b \u202e")
    '"\\u009b \\u202e"'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_json(value: object) -> None:
    """Print one JSON value."""
    print(json_text(value, indent=2))


def print_json_line(value: object) -> None:
    """Print one JSON value on one line, for streams of values."""
    print(json_text(value), flush=True)


def job_view(job: Job, now: float) -> View:
    """Return everything known about a job."""
    spec = job.spec
    live = job.HasField("attempt") and state_of(job.attempt) in LIVE
    return {
        "id": job.id,
        "name": spec.name,
        "kind": KINDS.names.get(spec.kind, f"kind {spec.kind}"),
        "phase": str(phase_of(job)),
        "phase_reason": job.phase_reason,
        "tenant": spec.tenant,
        "queue": spec.queue,
        "priority": spec.priority,
        "priority_class": class_of(spec.priority) or None,
        "submitter": job.submitter,
        "labels": dict(sorted(spec.labels.items())),
        "secrets": list(map(str, secrets_from_wire(spec))),
        "mounts": list(map(str, mounts_from_wire(spec))),
        "notify": list(spec.notify),
        "notify_on": [str(one) for one in triggers_from_wire(spec.notify_on)],
        "python_environment": _python_environment(spec),
        "replicas": sum(role.replicas for role in spec.roles),
        "gpus": gpus(sum(role.replicas * role.resources.gpu_milli for role in spec.roles)),
        "cores": allocated_cores(job.attempt) if live else requested_cores(spec),
        **{name: sum(role.replicas * getattr(role.resources, name) for role in spec.roles) for name in AMOUNTS},
        "nodes": sorted(one.node_id for one in job.attempt.allocations) if live else [],
        "create_time": time_of(job, "create_time"),
        "start_time": time_of(job, "start_time"),
        "end_time": time_of(job, "end_time"),
        "wait_seconds": wait_seconds(job, now),
        "run_seconds": run_seconds(job, now),
        "deadline": time_of(spec, "deadline"),
        "objectives": _objectives(job.objectives),
        "submitted_objectives": _objectives(job.submitted_objectives),
        "dependencies": [dependency_view(one) for one in spec.dependencies],
        "array": task_view(spec) if spec.HasField("array_task") else None,
        "reason": reason_view(job.refusal) if job.HasField("refusal") else None,
        "attempt": attempt_view(job.attempt) if job.HasField("attempt") else None,
        "past_attempts": [attempt_view(attempt) for attempt in job.past_attempts],
        "progress": _progress(job),
        "failures": job.failures,
        "launch_failures": job.launch_failures,
        "avoided_nodes": [
            {"node": one.node_id, "until": time_of(one, "until"), "reason": one.reason} for one in job.avoided_nodes
        ],
        "retries": spec.retries_max,
        "preemptions": job.preemptions,
        "migrations": job.migrations,
        "attained_gpu_seconds": job.attained_gpu_seconds,
        "attained_core_seconds": job.attained_core_seconds,
        "archived": job.archived,
    }


def _objectives(statuses: Sequence[ObjectiveStatus]) -> list[View]:
    if not statuses:
        return []
    from cotenant.cli.objective_views import objective_view  # few jobs have objectives

    return [objective_view(one) for one in statuses]


def dependency_view(dependency: Dependency) -> View:
    """Return a dependency of a job."""
    return {"id": dependency.id, "condition": str(condition_of(dependency))}


def array_view(array: Array, now: float) -> View:
    """Return everything known about an array as a whole; its resources are those of one job."""
    alike = Job(id=array.id, spec=array.spec, submitter=array.submitter, archived=array.archived)
    alike.create_time.CopyFrom(array.create_time)
    if array.HasField("end_time"):
        alike.end_time.CopyFrom(array.end_time)
    view = job_view(alike, now)
    return {name: view[name] for name in ARRAY_FIELDS} | {
        "phase": str(leading_phase(array)),
        "array": str(indices_of(array)),
        "jobs": array.job_count,
        "phases": counts(array),
    }


def job_or_array_view(found: Job | Array, now: float) -> View:
    """Return everything known about a job or an array."""
    return array_view(found, now) if isinstance(found, Array) else job_view(found, now)


def task_view(spec: JobSpec) -> View:
    """Return which job of an array a job is."""
    task = spec.array_task
    return {
        "id": task.array_id,
        "index": task.index,
        "count": task.count,
        "running_max": task.running_max or None,
    }


def attempt_view(attempt: Attempt) -> View:
    """Return one attempt of a job."""
    return {
        "number": attempt.number,
        "state": str(state_of(attempt)),
        "pre_run": attempt.pre_run,
        "assign_time": time_of(attempt, "assign_time"),
        "start_time": time_of(attempt, "start_time"),
        "end_time": time_of(attempt, "end_time"),
        "message": attempt.message,
        "next_replicas": attempt.next_replicas or None,
        "stop_detail": attempt.stop_detail,
        "exit": exit_view(attempt.exit) if attempt.HasField("exit") else None,
        "failure": failure_view(attempt.failure) if attempt.HasField("failure") else None,
        "launch_failure": launch_failure_view(attempt.launch_failure) if attempt.HasField("launch_failure") else None,
        "allocations": [allocation_view(one) for one in attempt.allocations],
    }


BLAMES = {
    FailureBlame.FAILURE_BLAME_UNSPECIFIED: "unknown",
    FailureBlame.FAILURE_BLAME_USER: "user",
    FailureBlame.FAILURE_BLAME_INFRASTRUCTURE: "infrastructure",
}


def failure_view(failure: Failure) -> View:
    """Return the classification of a failure."""
    return {
        "class": failure.failure_class,
        "blame": BLAMES.get(failure.blame, "unknown"),
        "rule": failure.rule,
        "evidence": failure.evidence,
        "transient": failure.transient,
        "node_at_fault": failure.node_at_fault,
    }


def exit_view(status: ExitStatus) -> View:
    """Return how a process ended."""
    return {
        "code": status.code,
        "signal": status.signal,
        "out_of_memory": status.out_of_memory,
        "rank": status.rank,
        "node": status.node_id,
    }


def allocation_view(allocation: NodeAllocation) -> View:
    """Return the allocation on one node."""
    return {
        "node": allocation.node_id,
        "tasks": [
            {
                "role": task.role,
                "rank": task.rank,
                "cores": list(task.core_ids),
                "gpus": [{"uuid": share.uuid, "share": gpus(share.milli)} for share in task.gpus],
                **amounts_of(task),
                "reclaimable": task.reclaimable,
                "lent_cores": max(0, len(task.core_ids) - task.own_cores) if task.own_cores else 0,
                "target_cores": task.target_cores or None,
            }
            for task in allocation.tasks
        ],
    }


def reason_view(refusal: Refusal) -> View:
    """Return why a job waits."""
    read = refusal_of(refusal)
    return {
        "code": refusal.code,
        "detail": refusal.detail,
        "remedy": refusal.remedy,
        "numbers": dict(sorted(refusal.numbers.items())),
        "wait": read.wait.value if read else None,
        "locality": read.locality.value if read and read.locality else None,
        "since": time_of(refusal, "since"),
        "holds_seconds": read.holds_seconds if read and read.holds_seconds < math.inf else None,
    }


def wait_of(job: Job) -> str | None:
    """Return what kind of thing a job waits for; None if it does not wait."""
    if phase_of(job) == Phase.SUSPENDED:
        return Wait.DEPENDENCY.value
    read = refusal_of(job.refusal) if job.HasField("refusal") else None
    return read.wait.value if read else None


def refusal_of(message: Refusal) -> Reason | None:
    """Return a decoded refusal; None if only a newer server knows its code."""
    try:
        return refusals.from_wire(message)
    except ValueError:
        return None


def _node_amounts(node: Node) -> View:
    """Return how much of each amount a node has, and how much of it attempts hold."""
    return {
        key: amount
        for kind in AMOUNT_KINDS
        for key, amount in (
            (kind.name, getattr(node.inventory, kind.name)),
            (used_key(kind), getattr(node, f"used_{kind.name}")),
        )
    }


def amounts_shown(nodes: Sequence[View]) -> list[ResourceKind]:
    """Return the amounts that are shown of some nodes: optional ones only if any node has them."""
    return [kind for kind in AMOUNT_KINDS if not kind.optional or any(view[kind.name] for view in nodes)]


def used_key(kind: ResourceKind) -> str:
    """Return the key of what attempts hold of an amount on a node: `memory_used_bytes`."""
    return f"{kind.name.removesuffix('_bytes')}_used_bytes"


def node_view(node: Node, now: float) -> View:
    """Return everything known about a node."""
    inventory = node.inventory
    return {
        "id": node.id,
        "state": node_state(node),
        "state_reason": node.state_reason,
        "state_owner": _owner(node),
        "gpus": len(inventory.gpus),
        "gpus_used": gpus(node.used_gpu_milli),
        "gpu_models": sorted({gpu.model for gpu in inventory.gpus}),
        "gpus_declared": sum(gpu.declared for gpu in inventory.gpus),
        "gpus_unhealthy": {gpu.uuid: gpu.unhealthy_reason for gpu in inventory.gpus if gpu.unhealthy_reason},
        "problems": [problem_view(problem) for problem in inventory.problems],
        "cores": len(inventory.cores),
        "cores_used": node.used_cores,
        **_node_amounts(node),
        "rack": inventory.rack,
        "address": inventory.address,
        "attempts": list(node.attempts),
        "not_enforced": list(inventory.not_enforced),
        "shared_user": inventory.shared_user or None,
        "container_runtime": inventory.container_runtime or None,
        "container_gpus_missing": inventory.container_gpus_missing or None,
        "capabilities": capabilities_view(node),
        "outer_job": inventory.outer_job or None,
        "available_until": time_of(inventory, "available_until"),
        "agent_version": inventory.agent_version,
        "certificate": certificate_view(node.certificate),
        "create_time": time_of(node, "create_time"),
        **agent_view(node, now),
    }


def capabilities_view(node: Node) -> View:
    """Return what the executor of a node has declared; everything if it has declared nothing."""
    able = declared(node)
    return {
        "cores": able.cores.value,
        "able": [one.value for one in Capability if able.can(one)],
        "limits": able.in_words or None,
    }


def certificate_view(message: Certificate) -> View | None:
    """Return the validity of a certificate; None if there is none or it was not reported."""
    begins, ends = time_of(message, "begin_time"), time_of(message, "expire_time")
    return {"begin_time": begins, "expire_time": ends} if begins and ends else None


def validity_of(view: View) -> Validity | None:
    """Return the validity of the certificate of a process or a node's agent."""
    certificate = view["certificate"]
    return (
        Validity(*map(datetime.fromisoformat, (certificate["begin_time"], certificate["expire_time"])))
        if certificate
        else None
    )


def problem_view(problem: HealthProblem) -> View:
    """Return a health problem; an action that only a newer server knows keeps its number."""
    known = problem.action in HEALTH_ACTIONS.names
    return {
        "check": problem.check,
        "gpu_uuid": problem.gpu_uuid or None,
        "action": HEALTH_ACTIONS.from_wire(problem.action).value if known else f"action {problem.action}",
        "reason": problem.reason,
        "since": time_of(problem, "since"),
        "remedy": problem.remedy,
    }


def requested_cores(spec: JobSpec) -> int | None:
    """Return the cores that a job requests; None if any are left to the allocator."""
    if not all(role.resources.HasField("cores") for role in spec.roles):
        return None
    return sum(role.replicas * role.resources.cores for role in spec.roles)


def allocated_cores(attempt: Attempt) -> int:
    """Return the cores that an attempt holds."""
    return sum(len(task.core_ids) for one in attempt.allocations for task in one.tasks)


def wait_seconds(job: Job, now: float) -> float:
    """Return how long a job waited for its first start."""
    until = next((getattr(job, name) for name in ("start_time", "end_time") if job.HasField(name)), None)
    return max(0.0, (now if until is None else seconds(until)) - seconds(job.create_time))


def run_seconds(job: Job, now: float) -> float:
    """Return how long a job has run over all attempts."""
    ran = job.run_time.ToNanoseconds() / 1e9
    running = job.HasField("attempt") and state_of(job.attempt) in (AttemptState.RUNNING, AttemptState.STOPPING)
    if running and job.attempt.HasField("start_time"):
        ran += max(0.0, now - seconds(job.attempt.start_time))
    return ran


def state_of(attempt: Attempt) -> AttemptState | str:
    """Return an attempt's state; a state that only a newer server knows keeps its number."""
    try:
        return ATTEMPT_STATES.from_wire(attempt.state)
    except KeyError:
        return f"state {attempt.state}"


def locality_of(spec: JobSpec) -> str:
    """Return the requested locality; "" if there is none."""
    return LOCALITIES.names.get(spec.locality, f"locality {spec.locality}") if spec.locality else ""


def python_environment_of(spec: JobSpec) -> str:
    """Return the Python environment that a job was submitted from, and how it was found; "" if there is none."""
    found = _python_environment(spec)
    how = "asked for" if spec.python_environment.requested else "found at submission"
    return f"{found['path']} ({found['source']}, {how})" if found else ""


def _python_environment(spec: JobSpec) -> View | None:
    if not spec.HasField("python_environment"):
        return None
    found = spec.python_environment
    return {
        "source": ENVIRONMENT_SOURCES.names.get(found.source, f"source {found.source}"),
        "path": found.path,
        "interpreter": found.interpreter,
        "requested": found.requested,
    }


def _owner(node: Node) -> str:
    """Return who cordoned or drains a node; "" for nobody, or an owner that this version does not know."""
    known = node.state_owner and node.state_owner in NodeStateOwner.values()
    return NodeStateOwner.Name(node.state_owner).removeprefix("NODE_STATE_OWNER_").lower() if known else ""


def node_state(node: Node) -> str:
    """Return a node's state; a state that only a newer server knows keeps its number.

    >>> node_state(Node(state=NodeState.NODE_STATE_READY)), node_state(Node(state=99))
    ('ready', 'state 99')
    """
    if node.state not in NodeState.values():
        return f"state {node.state}"
    return NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()


def gpus(milli: int) -> float:
    """Return thousandths as GPUs, whole GPUs as an integer.

    >>> gpus(2000), gpus(500)
    (2, 0.5)
    """
    return milli // WHOLE_GPU_MILLI if milli % WHOLE_GPU_MILLI == 0 else milli / WHOLE_GPU_MILLI


def time_of(message: Any, field: str) -> str | None:
    """Return a message's timestamp as text; None if it is not set or outside the calendar."""
    unix_seconds = seconds(getattr(message, field)) if message.HasField(field) else math.nan
    return units.format_time(unix_seconds) if units.has_date(unix_seconds) else None


def _progress(job: Job) -> Mapping[str, Any] | None:
    if not job.HasField("progress"):
        return None
    progress = job.progress
    return {
        "step": progress.step,
        "steps": job.spec.steps_total or None,
        "rate_per_second": progress.rate_per_second,
        "loss": progress.loss if progress.HasField("loss") else None,
        "update_time": time_of(progress, "update_time"),
        "throttle": progress.throttle or None,
        "launch": progress.launch or None,
        "tracked_runs": dict(sorted(progress.tracked_runs.items())),
    }


def throttle_of(view: View) -> str:
    """Return how a running job is throttled, from its view; "" if it is not."""
    runs = view["phase"] in (Phase.RUNNING, Phase.STARTING)
    return (view["progress"] or {}).get("throttle") or "" if runs else ""


def forecast_view(message: StartForecast) -> View:
    """Return a start forecast: times from now, null if beyond the forecast horizon or unknown."""
    present = {field.name: value for field, value in message.ListFields()}

    def field_seconds(field: str) -> float | None:
        return seconds(present[field]) if field in present else None

    return {
        "start_seconds": field_seconds("start"),
        "start_p10_seconds": field_seconds("start_p10"),
        "start_p90_seconds": field_seconds("start_p90"),
        "finish_seconds": field_seconds("finish"),
        "reached_seconds": field_seconds("reached"),
        "ending_job_ids": list(message.ending_job_ids),
        "ending_count": message.ending_count,
        "draws": message.draws,
        "of_unknown": message.of_unknown,
    }


def ahead_view(message: JobAhead) -> View:
    """Return a job that another job waits for, or that another job would delay."""
    view: View = {"id": message.job_id, "name": message.name, "needs": message.needs, "running": message.running}
    return view | ({"later_seconds": seconds(message.later)} if message.HasField("later") else {})
