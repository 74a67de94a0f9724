from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from cotenant.codec import estimates as estimates_on_the_wire
from cotenant.codec import refusals as refusals_on_the_wire
from cotenant.codec import specs as specs_module
from cotenant.codec.errors import Problem, to_status
from cotenant.core.model import validation
from cotenant.core.model.allocation import GpuShare, NodeAllocation, TaskAllocation
from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency
from cotenant.core.model.job import (
    EnvironmentSource,
    JobKind,
    JobSpec,
    Locality,
    PythonEnvironment,
    Qos,
    Request,
    Role,
    SubmitDirectory,
)
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.node import Core, Gpu, HealthAction, HealthProblem, Inventory, NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.internal.v1 import placement_service_pb2
from cotenant.v1 import job_pb2, predictor_service_pb2, resources_pb2

NOW = 1_800_000_000.0

texts = st.text(max_size=12)
counts = st.integers(0, 2**31 - 1)
sizes = st.integers(0, 2**50)
figures = st.floats(0, 1e12)
times = st.floats(0, 1e11)
moments = st.integers(0, 2**40).map(float)
intervals = st.integers(0, 10**15).map(lambda micros: micros / 1e6)
pairs = st.dictionaries(texts, texts, max_size=3).map(lambda found: tuple(sorted(found.items())))
words = st.lists(texts, max_size=3).map(tuple)
numbers = st.lists(counts, max_size=4).map(tuple)

requests = st.builds(Request, counts, st.none() | counts, texts, memory_bytes=sizes, scratch_bytes=sizes)
roles = st.builds(Role, texts.filter(bool), counts, requests, words)
specs = st.builds(
    JobSpec,
    name=texts,
    kind=st.sampled_from(JobKind),
    tenant=texts.filter(bool),
    queue=texts.filter(bool),
    roles=st.lists(roles, max_size=3).map(tuple),
    command=words,
    environment=pairs,
    working_directory=texts,
    model=texts,
    steps_total=sizes,
    deadline_seconds=st.none() | intervals,
    qos=st.builds(Qos, figures, figures, figures, figures),
    priority=st.integers(-(2**31), 2**31 - 1),
    preemptible=st.booleans(),
    grace_seconds=intervals,
    warning_signal=texts.filter(bool),
    retries_max=counts,
    locality=st.none() | st.sampled_from(Locality),
    progress_regex=texts,
    labels=pairs,
    expected_seconds=st.none() | intervals,
    loss_goal=st.builds(LossGoal, st.none() | figures, sizes, figures),
    submit_directory=st.none() | st.builds(SubmitDirectory, texts, st.integers(0, 2**64 - 1), counts, pairs),
    python_environment=st.none()
    | st.builds(PythonEnvironment, st.none() | st.sampled_from(EnvironmentSource), texts, texts, st.booleans()),
)
inventories = st.builds(
    Inventory,
    cores=st.lists(st.builds(Core, counts, numbers, counts, counts), max_size=3).map(tuple),
    gpus=st.lists(
        st.builds(Gpu, texts, texts, sizes, st.integers(-1, 7), st.booleans(), st.booleans(), texts, texts, counts),
        max_size=3,
    ).map(tuple),
    memory_bytes=sizes,
    scratch_bytes=sizes,
    rack=texts,
    address=texts,
    not_enforced=words,
    agent_version=texts,
    problems=st.lists(
        st.builds(HealthProblem, texts, st.sampled_from(HealthAction), texts, texts, st.none() | moments, texts),
        max_size=2,
    ).map(tuple),
    shared_user=texts,
    machine=texts,
)
tasks = st.builds(
    TaskAllocation,
    role=texts,
    rank=counts,
    core_ids=numbers,
    cpu_ids=numbers,
    gpus=st.lists(st.builds(GpuShare, texts, counts), max_size=3).map(tuple),
    memory_bytes=sizes,
    scratch_bytes=sizes,
    memory_nodes=numbers,
    reclaimable=st.booleans(),
)
allocations = st.builds(NodeAllocation, texts, st.lists(tasks, max_size=3).map(tuple))
shapes = st.builds(NodeShape, counts, counts, texts, st.booleans(), counts, memory_bytes=sizes, scratch_bytes=sizes)
known = st.none() | figures.filter(bool)
latencies = st.builds(
    Latency, counts, known, known, known, known, st.none() | st.integers(1, 2**31 - 1), st.floats(0, 1)
)
judged = st.none() | st.builds(Candidate, counts, counts, st.integers(1, 99), texts, counts, counts, counts)
estimates = st.builds(
    Estimate,
    predictable=st.booleans(),
    confidence=st.floats(0, 1),
    remaining_seconds=st.none() | intervals,
    remaining_p10_seconds=st.none() | intervals,
    remaining_p90_seconds=st.none() | intervals,
    cores_useful=st.none() | st.integers(1, 4096),
    candidates=st.lists(
        st.builds(CandidateEstimate, known, st.none() | intervals, st.floats(0, 1), st.none() | latencies, judged),
        max_size=3,
    ).map(tuple),
    source=texts,
)
refusals = st.builds(
    Refusal,
    st.sampled_from(Code),
    texts,
    texts,
    st.dictionaries(texts, figures, max_size=3),
    st.none() | st.sampled_from(Locality),
    st.booleans(),
)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(specs)
def test_a_spec_comes_back_as_it_went(spec: JobSpec) -> None:
    assert specs_module.spec_from_wire(over_the_wire(specs_module.spec_to_wire(spec))) == spec


@given(inventories)
def test_an_inventory_comes_back_as_it_went(inventory: Inventory) -> None:
    assert specs_module.inventory_from_wire(over_the_wire(specs_module.inventory_to_wire(inventory))) == inventory


@given(allocations)
def test_an_allocation_comes_back_as_it_went(allocation: NodeAllocation) -> None:
    assert specs_module.allocation_from_wire(over_the_wire(specs_module.allocation_to_wire(allocation))) == allocation


@given(shapes)
def test_a_shape_comes_back_as_it_went(shape: NodeShape) -> None:
    assert specs_module.shape_from_wire(over_the_wire(specs_module.shape_to_wire(shape))) == shape


@given(estimates)
def test_an_estimate_comes_back_as_it_went(estimate: Estimate) -> None:
    message = over_the_wire(estimates_on_the_wire.estimate_to_wire("a", estimate))
    assert message.job_id == "a"
    assert estimates_on_the_wire.estimate_from_wire(message) == estimate


@given(refusals)
def test_a_refusal_comes_back_as_it_went(refusal: Refusal) -> None:
    assert refusals_on_the_wire.from_wire(over_the_wire(refusals_on_the_wire.to_wire(refusal))) == refusal


@given(times | st.floats(-1e9, 1e11))
def test_a_time_comes_back_to_the_nanosecond(time: float) -> None:
    back = specs_module.seconds(specs_module.timestamp(time))
    assert math.isclose(back, time, rel_tol=0, abs_tol=1e-9) or back == time
    if abs(time) > 1e8:  # there a float is coarser than a nanosecond
        assert back == time


@given(intervals)
def test_a_duration_comes_back_to_the_microsecond(interval: float) -> None:
    assert specs_module.seconds(specs_module.duration(interval)) == interval


@pytest.mark.parametrize(
    ("map", "wire"),
    [
        (specs_module.PHASES, job_pb2.JobPhase),
        (specs_module.ATTEMPT_STATES, job_pb2.AttemptState),
        (specs_module.STOP_REASONS, job_pb2.StopReason),
        (specs_module.KINDS, job_pb2.JobKind),
        (specs_module.LOCALITIES, job_pb2.Locality),
        (specs_module.LAUNCH_CAUSES, job_pb2.LaunchCause),
        (specs_module.ENVIRONMENT_SOURCES, job_pb2.EnvironmentSource),
        (specs_module.HEALTH_ACTIONS, resources_pb2.HealthAction),
    ],
)
def test_every_protobuf_enum_value_has_a_value_in_the_model(map: specs_module.EnumMap[Any], wire: Any) -> None:
    numbers = set(wire.values()) - {0}
    assert set(map.names) == numbers
    assert {map.to_wire(map.from_wire(number)) for number in numbers} == numbers
    with pytest.raises(KeyError):
        map.from_wire(0)


# Every field of these messages is decoded: a field that is added to the API but forgotten here fails the test.
TRANSLATED: dict[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    job_pb2.JobSpec: (specs_module.spec_from_wire, specs_module.spec_to_wire),
    resources_pb2.Inventory: (specs_module.inventory_from_wire, specs_module.inventory_to_wire),
    resources_pb2.NodeAllocation: (specs_module.allocation_from_wire, specs_module.allocation_to_wire),
    placement_service_pb2.NodeShape: (specs_module.shape_from_wire, specs_module.shape_to_wire),
    predictor_service_pb2.Estimate: (
        estimates_on_the_wire.estimate_from_wire,
        lambda estimate: estimates_on_the_wire.estimate_to_wire("text", estimate),
    ),
}

# What is written for callers and read by none of our decisions.
SHOWN_ONLY: dict[Any, tuple[str, ...]] = {predictor_service_pb2.Estimate: ("record",)}


def filled(message: Any, depth: int = 0) -> Any:
    """Set every field, at every depth, to a value other than its default."""
    for field in message.DESCRIPTOR.fields:
        value: Any = {"string": "text", "int": 1, "double": 0.5, "bool": True}.get(_sort(field))
        if field.message_type and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["text"] = "text"
        elif field.message_type:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append(1 if field.enum_type else value)
        else:
            setattr(message, field.name, 1 if field.enum_type else value)
    return message


def _sort(field: Any) -> str:
    sorts = {
        field.TYPE_STRING: "string",
        field.TYPE_INT32: "int",
        field.TYPE_INT64: "int",
        field.TYPE_UINT32: "int",
        field.TYPE_UINT64: "int",
        field.TYPE_DOUBLE: "double",
        field.TYPE_BOOL: "bool",
    }
    return sorts.get(field.type, "")


@pytest.mark.parametrize("kind", TRANSLATED, ids=lambda kind: str(kind.DESCRIPTOR.name))
def test_no_field_of_the_api_is_lost_in_decoding(kind: Any) -> None:
    read, write = TRANSLATED[kind]
    message = filled(kind())
    for name in SHOWN_ONLY.get(kind, ()):
        message.ClearField(name)
    assert write(read(message)) == message


def a_spec(**fields: Any) -> job_pb2.JobSpec:
    role = job_pb2.Role(name="worker", replicas=1, resources=resources_pb2.ResourceRequest(gpu_milli=1000))
    return job_pb2.JobSpec(**{"name": "a", "roles": [role], "command": ["true"]} | fields)


def refused(message: job_pb2.JobSpec) -> dict[str, str]:
    with pytest.raises(Problem) as problem:
        specs_module.accept_spec(message, now=NOW)
    assert problem.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert all(violation.field in problem.value.message for violation in problem.value.violations)
    return {violation.field: violation.description for violation in problem.value.violations}


def test_unset_fields_of_a_spec_get_defaults() -> None:
    message = job_pb2.JobSpec(command=["true"], roles=[job_pb2.Role(replicas=2)])
    spec = specs_module.accept_spec(message, now=NOW)
    assert spec == JobSpec(kind=JobKind.CPU, command=("true",), roles=(Role("worker", 2),))
    assert (spec.tenant, spec.queue, spec.grace_seconds, spec.warning_signal) == ("default", "default", 30.0, "SIGTERM")
    assert specs_module.accept_spec(a_spec(), now=NOW).kind is JobKind.TRAINING


def test_unset_cores_mean_auto_and_zero_cores_are_invalid() -> None:
    assert specs_module.accept_spec(a_spec(), now=NOW).roles[0].request.cores is None
    message = a_spec()
    message.roles[0].resources.cores = 0
    assert "absent for auto" in refused(message)["spec.roles[0].resources.cores"]


def test_a_grace_of_zero_is_not_the_default() -> None:
    message = a_spec()
    message.grace.SetInParent()
    assert specs_module.accept_spec(message, now=NOW).grace_seconds == 0


def test_all_invalid_fields_are_named_by_their_protobuf_paths() -> None:
    message = a_spec(tenant="Vision!", kind=99, locality=77, retries_max=-1, steps_total=-5)
    message.roles[0].resources.gpu_milli = 1500
    message.roles.add(name="ps", replicas=0)
    message.deadline.FromSeconds(int(NOW) - 60)
    message.environment["BAD-NAME"] = "x"
    assert set(refused(message)) == {
        "spec.tenant",
        "spec.kind",
        "spec.locality",
        "spec.retries_max",
        "spec.steps_total",
        "spec.roles[0].resources.gpu_milli",
        "spec.roles[1].replicas",
        "spec.deadline",
        "spec.environment['BAD-NAME']",
    }


def test_an_unknown_enum_number_is_answered_with_the_known_values() -> None:
    assert refused(a_spec(kind=99))["spec.kind"] == "99 is unknown; the values are 1 (training), 2 (inference), 3 (cpu)"


@pytest.mark.parametrize("field", ["deadline", "grace", "expected_duration"])
@pytest.mark.parametrize(("seconds", "nanos"), [(2**62, 0), (-1, 0), (-(2**62), 0), (1, -1), (1, 10**9)])
def test_times_out_of_range_are_rejected(field: str, seconds: int, nanos: int) -> None:
    message = a_spec()
    time = getattr(message, field)
    time.seconds, time.nanos = seconds, nanos
    assert "are out of range" in refused(message)[f"spec.{field}"]


@given(st.binary(max_size=200))
def test_any_message_is_accepted_or_rejected_and_accepted_specs_can_be_encoded(noise: bytes) -> None:
    message = job_pb2.JobSpec()
    try:
        message.ParseFromString(a_spec().SerializeToString() + noise)  # adds to its fields, or replaces them
        spec = specs_module.accept_spec(message, now=NOW)
    except (DecodeError, Problem):
        return
    assert validation.check_spec(spec) == ()
    assert specs_module.spec_from_wire(over_the_wire(specs_module.spec_to_wire(spec))) == spec


messages = st.builds(
    a_spec,
    name=texts,
    kind=st.integers(0, 5),
    tenant=texts,
    steps_total=st.integers(-(2**63), 2**63 - 1),
    grace=st.builds(Duration, seconds=st.integers(-(2**63), 2**63 - 1), nanos=st.integers(-(2**31), 2**31 - 1)),
    deadline=st.builds(Timestamp, seconds=st.integers(-(2**63), 2**63 - 1), nanos=st.integers(0, 2**31 - 1)),
    qos=st.builds(
        job_pb2.Qos, rate_min_per_second=st.floats(), latency_seconds=st.floats(), latency_percentile=st.floats()
    ),
    environment=st.dictionaries(texts, texts),
    progress=st.builds(job_pb2.ProgressRule, regex=texts),
)


@given(messages)
def test_any_field_values_give_a_spec_or_a_problem(message: job_pb2.JobSpec) -> None:
    try:
        specs_module.spec_to_wire(specs_module.accept_spec(message, now=NOW))
    except Problem as problem:
        to_status(problem)
