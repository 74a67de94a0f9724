"""Decoding of the predictor's messages. An invalid message raises a `ValueError` with the reason.

A job's user is its tenant: history must be recorded and looked up by the same name, even for jobs that are not yet
submitted and have no submitter. The submitter of a job is part of its submission.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from cotenant.codec import objectives
from cotenant.codec.request_limits import spec_violations
from cotenant.codec.spec_cache import SpecCache
from cotenant.core.model.estimate import NO_QOS, TRAINING, Candidate, Observation, OwnRate, Query, Submission
from cotenant.core.model.job import TENANT_DEFAULT, WHOLE_GPU_MILLI, JobKind, Qos, Request, Role
from cotenant.core.model.loss_goal import NO_GOAL, LossGoal
from cotenant.core.model.resources import AMOUNT_MAX, amounts_of
from cotenant.core.model.validation import CORES_MAX, GPU_MILLI_MAX, REPLICAS_MAX, ROLES_MAX, name_error
from cotenant.core.placement.candidate_allocations import SERVER_ROLE
from cotenant.core.prediction.own_rate import WINDOWS_MAX
from cotenant.core.prediction.record_validation import (
    NODES_MAX,
    RATE_MAX_PER_SECOND,
    RATE_MIN_PER_SECOND,
    SECONDS_MAX,
    STEPS_MAX,
    UNIX_SECONDS_MAX,
)
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb

CANDIDATES_MAX = 256  # of one query
BATCH_SIZE_MAX = 1_000_000

SPEC_BYTES_MAX, SPECS_BYTES_MAX = 4_096, 16 << 20  # of one cached spec, of all cached specs

JobClass = tuple[str, str, str, int, int]  # user, model, name, GPUs in thousandths, replicas
PsLayout = tuple[
    int, int, int
]  # workers, parameter servers, cores per parameter server; all 0 without parameter servers
NO_SERVERS: PsLayout = (0, 0, 0)

KINDS: Mapping[int, str] = {
    job_pb2.JOB_KIND_TRAINING: JobKind.TRAINING.value,
    job_pb2.JOB_KIND_INFERENCE: JobKind.INFERENCE.value,
    job_pb2.JOB_KIND_CPU: JobKind.CPU.value,
}


@dataclass(frozen=True, slots=True)
class DecodedSpec:
    """The decoded spec of a job; equal for all queries and observations of the job and its resubmissions."""

    kind: JobClass
    own: Candidate
    ps_layout: PsLayout
    job_kind: str
    roles: tuple[Role, ...]
    steps_total: int
    labels: tuple[tuple[str, str], ...]
    expected_seconds: float | None
    goal: LossGoal
    qos: Qos

    def submission(self, message: pb.EstimateQuery | observation_pb2.Observation) -> Submission:
        """Return what was known of the job at its submission."""
        if wrong := name_error(message.submitter):
            raise ValueError(f"submitter: {wrong}")
        submitted = _moment("submit_time", message.submit_time) if message.HasField("submit_time") else None
        return Submission(message.submitter, submitted, self.job_kind, self.roles, self.steps_total, self.labels)


def decoded_spec_of(spec: job_pb2.JobSpec) -> DecodedSpec:
    """Decode a spec; small specs are cached, because most are queried repeatedly.

    Raises:
        ValueError: the spec is invalid; the text has the reason.
    """
    return _specs(spec)


def _decode_spec(spec: job_pb2.JobSpec) -> DecodedSpec:
    for beyond in spec_violations(spec):
        raise ValueError(f"its {beyond.field} is invalid: {beyond.description}")
    kind = _job_class_of(spec)
    return DecodedSpec(
        kind,
        _own(spec),
        _ps_layout(spec),
        job_kind=KINDS.get(spec.kind, ""),
        roles=tuple([_role(role.name, role.replicas, *_calls_in_flight(role.resources)) for role in spec.roles]),
        steps_total=_within("spec.steps_total", spec.steps_total, STEPS_MAX),
        labels=tuple(sorted(spec.labels.items())) if spec.labels else (),
        expected_seconds=_expected(spec),
        goal=_goal(spec) if spec.HasField("loss_goal") else NO_GOAL,
        qos=_qos(spec.qos) if spec.HasField("qos") else NO_QOS,
    )


_specs = SpecCache(_decode_spec, bytes_max=SPECS_BYTES_MAX, spec_bytes_max=SPEC_BYTES_MAX)


class QueryReader:
    """Decodes the queries of one call; their allocations, which are mostly the same, are decoded once."""

    def __init__(self) -> None:
        self._last: tuple[Any, PsLayout, tuple[Candidate, ...]] = ((), NO_SERVERS, ())

    def read(self, message: pb.EstimateQuery) -> Query:
        """Decode a query.

        Raises:
            ValueError: the query is invalid; the text has the reason.
        """
        spec, attained = decoded_spec_of(message.spec), message.attained_gpu_seconds
        if not 0 <= attained <= SECONDS_MAX * GPU_MILLI_MAX:
            raise ValueError(f"attained_gpu_seconds is {attained:g}; it must be finite and not negative")
        user, model, name, gpu_milli, replicas = spec.kind
        return Query(
            user,
            model,
            name,
            gpu_milli,
            replicas,
            spec.own.cores or None,
            _gpu_type(message.gpu_type) or spec.own.gpu_type,
            attained,
            _run_seconds(message, gpu_milli),
            _within("progress.step", message.progress.step, STEPS_MAX) if message.HasField("progress") else 0,
            spec.steps_total,
            spec.expected_seconds,
            self._candidates(message.candidates, spec.ps_layout) or (spec.own,),
            _phase(message.phase) if message.phase else TRAINING,
            _job_id(message.job_id),
            spec.goal,
            spec.qos,
            spec.submission(message),
            _measured(message.progress.own_rate) if message.progress.HasField("own_rate") else None,
        )

    def _candidates(self, messages: Sequence[pb.CandidateAllocation], ps_layout: PsLayout) -> tuple[Candidate, ...]:
        if len(messages) > CANDIDATES_MAX:
            raise ValueError(f"has {len(messages)} candidates; the maximum is {CANDIDATES_MAX}")
        before, same_layout, read = self._last
        if same_layout == ps_layout and messages == before:
            return read
        read = tuple([_allocation(one, ps_layout) for one in messages])
        self._last = messages, ps_layout, read
        return read


def query_of(message: pb.EstimateQuery) -> Query:
    """Decode a single query.

    Raises:
        ValueError: the query is invalid; the text has the reason.
    """
    return QueryReader().read(message)


def observation_of(message: observation_pb2.Observation) -> Observation:
    """Decode an observation.

    Raises:
        ValueError: the observation is invalid; the text has the reason.
    """
    rate = message.rate_per_second
    if rate and not RATE_MIN_PER_SECOND <= rate <= RATE_MAX_PER_SECOND:
        raise ValueError(
            f"rate_per_second is {rate:g}; it must be 0, or from {RATE_MIN_PER_SECOND:g} to {RATE_MAX_PER_SECOND:g}"
        )
    ended = message.HasField("run_time")
    window_seconds = _seconds("window", message.window)
    if rate and not window_seconds:
        raise ValueError("rate_per_second needs the window over which it was measured")
    batch_seconds = _seconds("batch_time", message.batch_time)
    if bool(message.batch_size) != bool(batch_seconds):
        raise ValueError("batch_size and batch_time must be given together")
    if not (rate or ended or batch_seconds or message.HasField("loss") or message.profile_done):
        raise ValueError("it has neither a rate, nor a loss, nor a batch, nor the end of a run or a profile")
    if message.HasField("loss") and not message.HasField("step"):
        raise ValueError("loss needs the step at which it was measured")
    spec = decoded_spec_of(message.spec)
    return Observation(
        *spec.kind,
        allocation=_allocation(message.allocation, spec.ps_layout),
        rate_per_second=rate or None,
        window_seconds=window_seconds,
        run_seconds=_seconds("run_time", message.run_time) if ended else None,
        succeeded=message.succeeded,
        phase=_phase(message.phase),
        submission=spec.submission(message),
        seen_seconds=_moment("time", message.time) if message.HasField("time") else None,
        job_id=_job_id(message.job_id),
        step=_within("step", message.step, STEPS_MAX) if message.HasField("step") else None,
        loss=message.loss if message.HasField("loss") else None,
        batch_size=_within("batch_size", message.batch_size, BATCH_SIZE_MAX) or None,
        batch_seconds=batch_seconds or None,
        loss_goal=spec.goal,
    )


def job_class_of(spec: job_pb2.JobSpec) -> JobClass:
    """Return the job class of a spec: the fields that are equal in similar jobs.

    Raises:
        ValueError: an amount or a name is invalid; the text, about the spec, names it.
    """
    if len(spec.roles) > ROLES_MAX:
        raise ValueError(f"has {len(spec.roles)} roles, not 1 to {ROLES_MAX}")
    gpu_milli = replicas = 0
    for role in spec.roles:
        gpu_milli += role.replicas * role.resources.gpu_milli
        replicas += role.replicas
    for field, figure, at_least, at_most in (
        ("roles", len(spec.roles), 1, ROLES_MAX),
        ("replicas", replicas, 1, REPLICAS_MAX),
        ("gpu_milli", gpu_milli, 0, GPU_MILLI_MAX * REPLICAS_MAX),
    ):
        if not at_least <= figure <= at_most:
            raise ValueError(f"has {figure} {field}, not {at_least} to {at_most}")
    user, model, name = spec.tenant or TENANT_DEFAULT, spec.model, spec.name
    if wrong := _bad_names(user, model, name):
        raise ValueError(wrong)
    return user, model, name, gpu_milli, replicas


def _bad_names(user: str, model: str, name: str) -> str:
    for field, text in (("tenant", user), ("model", model), ("name", name)):
        if wrong := name_error(text):
            return f"has a bad {field}: {wrong}"
    return ""


def _job_class_of(spec: job_pb2.JobSpec) -> JobClass:
    try:
        return job_class_of(spec)
    except ValueError as error:
        raise ValueError(f"its spec {error}") from None


def gpu_type_of(spec: job_pb2.JobSpec) -> str:
    """Return the GPU type requested by the role with the most GPUs per replica; "" for any. There must be a role."""
    return _own(spec).gpu_type


def _phase(text: str) -> str:
    if wrong := name_error(text):
        raise ValueError(f"phase: {wrong}")
    return text


def _calls_in_flight(resources: resources_pb2.ResourceRequest) -> tuple[Any, ...]:
    cores = resources.cores if resources.HasField("cores") else None
    return resources.gpu_milli, cores, resources.gpu_type, tuple(amounts_of(resources).items())


@lru_cache(maxsize=4096)  # jobs share few shapes
def _role(
    name: str, replicas: int, gpu_milli: int, cores: int | None, gpu_type: str, amounts: tuple[tuple[str, Any], ...]
) -> Role:
    _within("cores", cores or 0, CORES_MAX)
    for amount, size in amounts:
        _within(amount, size, AMOUNT_MAX)
    return Role(name, replicas, Request(gpu_milli, cores, gpu_type, **dict(amounts)))


def _gpu_type(text: str) -> str:
    if wrong := name_error(text):
        raise ValueError(f"gpu_type: {wrong}")
    return text


def _job_id(text: str) -> str:
    if wrong := name_error(text):
        raise ValueError(f"job_id: {wrong}")
    return text


def _measured(message: job_pb2.OwnRate) -> OwnRate:
    rate, spread = message.rate_per_second, message.spread
    if rate and not RATE_MIN_PER_SECOND <= rate <= RATE_MAX_PER_SECOND:
        bounds = f"0, or from {RATE_MIN_PER_SECOND:g} to {RATE_MAX_PER_SECOND:g}"
        raise ValueError(f"progress.own_rate.rate_per_second is {rate:g}; it must be {bounds}")
    if not 0 <= spread < math.inf:
        raise ValueError(f"progress.own_rate.spread is {spread:g}; it must be finite and not negative")
    return OwnRate(
        rate,
        _within("progress.own_rate.windows", message.windows, WINDOWS_MAX),
        spread,
        _seconds("progress.own_rate.gap", message.gap),
        _seconds("progress.own_rate.silence", message.silence),
    )


def _goal(spec: job_pb2.JobSpec) -> LossGoal:
    goal = objectives.goal_from_wire(spec.loss_goal)
    if goal.target is not None and not math.isfinite(goal.target):
        raise ValueError(f"spec.loss_goal.target is {goal.target:g}; it must be finite")
    if not 0 <= goal.fall_min < math.inf:
        raise ValueError(f"spec.loss_goal.fall_min is {goal.fall_min:g}; it must be finite and not negative")
    _within("spec.loss_goal.fall_steps", goal.fall_steps, STEPS_MAX)
    return goal


def _qos(message: job_pb2.Qos) -> Qos:
    qos = Qos(
        message.rate_min_per_second, message.latency_seconds, message.latency_percentile, message.arrivals_per_second
    )
    for name in ("rate_min_per_second", "latency_seconds", "arrivals_per_second"):
        if not 0 <= getattr(qos, name) <= RATE_MAX_PER_SECOND:
            raise ValueError(f"spec.qos.{name} is {getattr(qos, name):g}; it must be from 0 to {RATE_MAX_PER_SECOND:g}")
    if not 0 <= qos.latency_percentile < 100:
        raise ValueError(f"spec.qos.latency_percentile is {qos.latency_percentile:g}; it must be from 0 to below 100")
    return qos


def _own(spec: job_pb2.JobSpec) -> Candidate:
    """Return the job's own request as a candidate; 0 cores mean `auto`."""
    largest = spec.roles[0].resources
    for role in spec.roles[1:]:
        largest = max(largest, role.resources, key=lambda resources: resources.gpu_milli)
    return Candidate(largest.cores, largest.gpu_milli, 1, largest.gpu_type, *_ps_layout(spec))


def _ps_layout(spec: job_pb2.JobSpec) -> PsLayout:
    """Return the numbers of a job's workers and parameter servers (the role `ps`), and the servers' cores."""
    if len(spec.roles) < 2:
        return 0, 0, 0
    servers = [role for role in spec.roles if role.name == SERVER_ROLE]
    count = sum(role.replicas for role in servers)
    if not count:
        return 0, 0, 0
    return sum(role.replicas for role in spec.roles) - count, count, servers[0].resources.cores


def _allocation(message: pb.CandidateAllocation, ps_layout: PsLayout) -> Candidate:
    workers, servers, server_cores = ps_layout
    return _interned(
        message.cores,
        message.gpu_milli,
        message.nodes,
        message.gpu_type,
        message.workers or workers,
        message.servers or servers,
        message.server_cores or server_cores,
    )


@lru_cache(maxsize=4096)  # jobs share few candidate allocations
def _interned(
    cores: int, gpu_milli: int, nodes: int, gpu_type: str, workers: int, servers: int, server_cores: int
) -> Candidate:
    _within("workers", workers, REPLICAS_MAX)
    _within("servers", servers, REPLICAS_MAX)
    _within("server_cores", server_cores, CORES_MAX)
    _within("cores", cores, CORES_MAX)
    _within("gpu_milli", gpu_milli, GPU_MILLI_MAX)
    _within("nodes", nodes, NODES_MAX)
    return Candidate(cores, gpu_milli, nodes or 1, _gpu_type(gpu_type), workers, servers, server_cores)


def _within(what: str, figure: int, at_most: int) -> int:
    if not 0 <= figure <= at_most:
        raise ValueError(f"{what} is {figure}; it must be from 0 to {at_most}")
    return figure


def _run_seconds(message: pb.EstimateQuery, gpu_milli: int) -> float:
    """Return how long a job has run, if need be from its attained GPU seconds; 0 if that is unknown."""
    if message.HasField("run_time"):
        return _seconds("run_time", message.run_time)
    return message.attained_gpu_seconds * WHOLE_GPU_MILLI / gpu_milli if gpu_milli else 0.0


def _expected(spec: job_pb2.JobSpec) -> float | None:
    return _seconds("spec.expected_duration", spec.expected_duration) if spec.HasField("expected_duration") else None


def _seconds(what: str, duration: Duration) -> float:
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 <= seconds <= SECONDS_MAX:
        raise ValueError(f"{what} is {seconds:g} s; it must be from 0 to 100 years")
    return seconds


def _moment(what: str, time: Timestamp) -> float:
    if not 0 <= (seconds := seconds_of(time)) <= UNIX_SECONDS_MAX:
        raise ValueError(f"{what} is {seconds:g} s after 1970; it must be from 1970 to the year 9999")
    return seconds


def seconds_of(time: Timestamp) -> float:
    """Return a timestamp in unix seconds."""
    return time.seconds + time.nanos / 1e9
