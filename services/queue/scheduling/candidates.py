"""Waiting jobs as candidates in plan requests."""

from __future__ import annotations

from cotenant.codec import specs
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.queue.jobs import node_avoidance
from cotenant.services.queue.jobs.transitions import Record
from cotenant.v1 import job_pb2

ATTEMPT_FIELDS = (  # needed by attempts only
    "command",
    "environment",
    "working_directory",
    "submit_directory",
    "python_environment",
    "labels",
    "secrets",
)
SMALL_BYTES = 4096  # smaller specs are faster to copy whole than by fields


def candidate_of(record: Record, now: float, *, whole: bool = False, brief: bool = False) -> placement_pb2.Candidate:
    """Return the candidate for a waiting job: its pre-run while that is due, unless the `whole` gang is requested.

    A `brief` candidate has no command and no environment, which only an attempt needs.

    A pre-run has no estimate: the estimate is for the whole gang.
    """
    pre_run = record.in_pre_run and not whole
    asked = record.requested_spec if pre_run or (record.spec.open and not record.in_pre_run) else None
    spec = specs.spec_to_wire(asked) if asked else _spec(record.job.spec, brief)
    if record.spec.elastic and not pre_run:
        spec = with_elastic_replicas(spec, record.elastic_replicas)
    candidate = placement_pb2.Candidate(
        job_id=record.id,
        number=record.attempt_number + 1,
        spec=spec,
        trace_parent=record.job.trace_parent,
        pre_run=pre_run,
        submitter=record.job.submitter,
        revision=record.revision,
    )
    if brief and asked:
        _abridge(candidate.spec)
    if record.estimate and not pre_run:
        candidate.estimate.CopyFrom(record.estimate)
    candidate.avoided_nodes.extend(one.node_id for one in node_avoidance.active(record.job, now))
    candidate.fragmented.CopyFrom(specs.duration(record.fragmented_seconds))
    candidate.waited.CopyFrom(specs.duration(max(0.0, now - record.waiting_since)))
    return candidate


def with_elastic_replicas(spec: job_pb2.JobSpec, count: int) -> job_pb2.JobSpec:
    """Return a copy of an elastic job's spec with this number of replicas in its elastic role."""
    copy = job_pb2.JobSpec()
    copy.CopyFrom(spec)
    next(role for role in copy.roles if role.HasField("elastic")).replicas = count
    return copy


def _spec(spec: job_pb2.JobSpec, brief: bool) -> job_pb2.JobSpec:
    """Return a spec, or a copy without the fields that only an attempt needs."""
    if not brief:
        return spec
    copy = job_pb2.JobSpec()
    if spec.ByteSize() <= SMALL_BYTES:
        copy.CopyFrom(spec)
    else:
        _copy_but_large(spec, copy)
    _abridge(copy)
    return copy


def _copy_but_large(spec: job_pb2.JobSpec, copy: job_pb2.JobSpec) -> None:
    for field, value in spec.ListFields():
        if field.name in ATTEMPT_FIELDS:
            continue
        if field.is_repeated:
            getattr(copy, field.name).MergeFrom(value)
        elif field.message_type:
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)


def _abridge(spec: job_pb2.JobSpec) -> None:
    for name in ATTEMPT_FIELDS:
        spec.ClearField(name)
    for role in spec.roles:
        role.ClearField("command")
