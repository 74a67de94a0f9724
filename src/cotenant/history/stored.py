"""Decodes a store's changes as events: the only place that knows the keys of all services."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from cotenant.codec.dependencies import condition_of
from cotenant.core.model.lifecycle import AttemptState, LaunchCause, Phase
from cotenant.history.events import (
    AttemptGone,
    AttemptPut,
    Change,
    Commit,
    Holds,
    JobGone,
    JobPut,
    LeaderGone,
    LeaderPut,
    NodePut,
    Resource,
)
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Changes
from cotenant.v1 import job_pb2, node_service_pb2, resources_pb2

JOBS, ATTEMPTS, NODES = "queue/jobs/", "placement/attempts/", "placement/nodes/"
LEADER = "/leader"
CLOSED = (node_service_pb2.NODE_STATE_CORDONED, node_service_pb2.NODE_STATE_DRAINING)


def commit_of(changes: Changes, at_seconds: float = 0.0, *, began_unix_seconds: float | None = None) -> Commit:
    """Decode one transaction; times in records are ignored unless the start of the commits' clock is known."""
    read = (_change(change.key, change.value, changes.revision, began_unix_seconds) for change in changes.changes)
    return Commit(changes.revision, tuple(change for change in read if change), at_seconds)


def _change(key: str, value: bytes | None, revision: int, began_unix_seconds: float | None) -> Change | None:
    if key.startswith(JOBS):
        job_id = key.removeprefix(JOBS)
        return JobGone(job_id) if value is None else _job(records_pb2.StoredJob.FromString(value), began_unix_seconds)
    if key.startswith(ATTEMPTS):
        if value is None:
            return AttemptGone(key.removeprefix(ATTEMPTS))
        return _attempt(records_pb2.StoredAttempt.FromString(value), revision)
    if key.startswith(NODES) and value is not None:
        node = records_pb2.StoredNode.FromString(value).node
        return NodePut(node.id, node.state not in CLOSED)
    if key.endswith(LEADER):
        service = key.removesuffix(LEADER)
        if value is None:
            return LeaderGone(service)
        return LeaderPut(service, records_pb2.StoredLeader.FromString(value).identity)
    return None


def _job(stored: records_pb2.StoredJob, began_unix_seconds: float | None) -> JobPut:
    job = stored.job
    not_before = stored.not_before_time
    waits = stored.HasField("not_before_time") and began_unix_seconds is not None
    return JobPut(
        job.id,
        phase_of(job.phase),
        () if job.spec.HasField("array_task") else tuple(stored.request_ids),  # an array's jobs share theirs
        job.attempt.number,
        job.spec.priority,
        tuple((one.id, condition_of(one)) for one in job.spec.dependencies),
        not_before.seconds + not_before.nanos / 1e9 - (began_unix_seconds or 0.0) if waits else 0.0,
        job.failures + stored.infrastructure_failures,
    )


@cache
def phase_of(phase: job_pb2.JobPhase.ValueType) -> Phase:
    """Decode a phase."""
    return Phase(job_pb2.JobPhase.Name(phase).removeprefix("JOB_PHASE_").lower())


def _attempt(stored: records_pb2.StoredAttempt, revision: int) -> AttemptPut:
    attempt = stored.attempt
    tasks = [task for part in attempt.allocations for task in part.tasks]
    return AttemptPut(
        attempt.job_id,
        attempt.number,
        attempt.epoch or revision,
        _state_of(attempt.state),
        holds_of(attempt.allocations, stored.resizing),
        frozenset(part.node_id for part in attempt.allocations),
        tuple(task.rank for task in tasks),
        1 if attempt.pre_run else sum(role.replicas for role in stored.spec.roles),
        _cause_of(attempt.launch_failure.cause) if attempt.HasField("launch_failure") else None,
        None if attempt.pre_run else _elastic(stored.spec.roles),
    )


def _elastic(roles: Sequence[job_pb2.Role]) -> tuple[int, int, int] | None:
    role = next((role for role in roles if role.HasField("elastic")), None)
    return (role.elastic.min, role.replicas, role.elastic.max) if role else None


@cache
def _state_of(state: job_pb2.AttemptState.ValueType) -> AttemptState:
    return AttemptState(job_pb2.AttemptState.Name(state).removeprefix("ATTEMPT_STATE_").lower())


def _cause_of(cause: job_pb2.LaunchCause.ValueType) -> LaunchCause:
    return LaunchCause(job_pb2.LaunchCause.Name(cause).removeprefix("LAUNCH_CAUSE_").lower())


def holds_of(
    allocations: Sequence[resources_pb2.NodeAllocation], resizing: Sequence[resources_pb2.NodeAllocation] = ()
) -> Holds:
    """Return what allocations hold; during a resize, the cores of before and after."""
    holds: defaultdict[Resource, int] = defaultdict(int)
    for part in allocations:
        node_id = part.node_id
        for task in part.tasks:
            for core in dict.fromkeys(task.core_ids):
                holds[node_id, f"core {core}"] += 1000
            for share in task.gpus:
                holds[node_id, share.uuid] += share.milli
    if resizing:
        before = {(part.node_id, task.rank): set(task.core_ids) for part in allocations for task in part.tasks}
        for part in resizing:
            for task in part.tasks:
                for core in set(task.core_ids) - before.get((part.node_id, task.rank), set()):
                    holds[part.node_id, f"core {core}"] += 1000
    return dict(holds)
