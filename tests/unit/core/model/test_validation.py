from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cotenant.core.model.dependencies import Condition, Dependency
from cotenant.core.model.job import (
    GRACE_SECONDS_DEFAULT,
    BatchScaling,
    Container,
    EnvironmentSource,
    JobKind,
    JobSpec,
    OpenReplicas,
    PythonEnvironment,
    Qos,
    ReplicaRange,
    Request,
    ResizeMode,
    Role,
    Spread,
    SubmitDirectory,
)
from cotenant.core.model.job_fields import (
    DISCONNECTED_SECONDS_MIN,
    GRACE_SECONDS_MAX,
    PIDS_MAX,
    PIDS_MIN,
    PRE_RUN_SECONDS_MAX,
    PRIORITY_MAX,
    RETRIES_MAX,
    TIME_LIMIT_DAYS_MAX,
)
from cotenant.core.model.limits import (
    COMMAND_WORDS_MAX,
    DEPENDENCIES_MAX,
    ENVIRONMENT_MAX,
    LABELS_MAX,
    NAME_LENGTH_MAX,
    PATH_LENGTH_MAX,
    REPLICAS_MAX,
    ROLES_MAX,
    TEXT_BYTES_MAX,
)
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.model.resources import AMOUNT_MAX, AMOUNT_MIN
from cotenant.core.model.validation import CORES_MAX, GPU_MILLI_MAX, check_amounts, check_spec


@pytest.mark.parametrize(
    ("gpu_type", "sound"),
    [("V100M16|V100M32", True), ("T4 | A100", True), ("T4|", False), ("|", False), ("T4||P100", False)],
)
def test_a_gpu_type_may_be_one_of_several_each_with_a_name(gpu_type: str, sound: bool) -> None:
    spec = JobSpec(command=("true",), roles=(Role(request=Request(1000, gpu_type=gpu_type)),))
    found = [violation.field for violation in check_spec(spec)]
    assert found == ([] if sound else ["spec.roles[0].resources.gpu_type"])


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(1000, 1), ""),
        (Request(1000, CORES_MAX), ""),
        (Request(1000, 0), "cores"),
        (Request(1000, CORES_MAX + 1), "cores"),
        (Request(GPU_MILLI_MAX), ""),
        (Request(GPU_MILLI_MAX + 1000), "gpu_milli"),
        (Request(1500), "gpu_milli"),
        (Request(1000, 1, memory_bytes=AMOUNT_MIN), ""),
        (Request(1000, 1, memory_bytes=AMOUNT_MIN - 1), "memory_bytes"),
        (Request(1000, 1, memory_bytes=AMOUNT_MAX), ""),
        (Request(1000, 1, memory_bytes=AMOUNT_MAX + 1), "memory_bytes"),
    ],
)
def test_a_request_may_be_as_small_and_as_large_as_its_bounds(request_: Request, field: str) -> None:
    found = [one.field for one in check_spec(JobSpec(command=("true",), roles=(Role(request=request_),)))]
    assert found == ([f"spec.roles[0].resources.{field}"] if field else [])


WORKER = Role(request=Request(2000))
SPEC = JobSpec(command=("true",), roles=(WORKER,))
HUGE = math.inf


def wrong(spec: JobSpec) -> list[str]:
    return [violation.field.removeprefix("spec.") for violation in check_spec(spec)]


@pytest.mark.parametrize(
    ("attribute", "least", "most", "field"),
    [
        ("grace_seconds", 0.0, GRACE_SECONDS_MAX, "grace"),
        ("retries_max", 0, RETRIES_MAX, "retries_max"),
        ("stop_after_disconnected_seconds", DISCONNECTED_SECONDS_MIN, None, "stop_after_disconnected"),
        ("pre_run_seconds", 1.0, PRE_RUN_SECONDS_MAX, "pre_run"),
        (
            "time_limit_seconds",
            math.nextafter(GRACE_SECONDS_DEFAULT, HUGE),
            TIME_LIMIT_DAYS_MAX * 86_400.0,
            "time_limit",
        ),
        ("pids_max", PIDS_MIN, PIDS_MAX, "pids_max"),
        ("priority", -PRIORITY_MAX, PRIORITY_MAX, "priority"),
        ("steps_total", 0, 10**15, ""),
        ("expected_seconds", math.nextafter(0.0, 1.0), None, "expected_duration"),
        ("qos.rate_min_per_second", 0.0, None, "qos.rate_min_per_second"),
        ("qos.arrivals_per_second", 0.0, None, "qos.arrivals_per_second"),
        ("loss_goal.target", math.nextafter(-HUGE, 0.0), None, "loss_goal.target"),
    ],
)
def test_a_number_may_be_as_small_and_as_large_as_its_bounds(
    attribute: str, least: float, most: float | None, field: str
) -> None:
    def given(value: float) -> list[str]:
        outer, _, inner = attribute.partition(".")
        held: Any = replace(getattr(SPEC, outer), **{inner: value}) if inner else value
        return wrong(replace(SPEC, **{outer: held}))

    whole = isinstance(least, int)
    assert given(least) == []
    assert given(math.nextafter(HUGE, 0.0) if most is None else most) == []
    assert not field or given(least - 1 if whole else math.nextafter(least, -HUGE)) == [field]
    assert not field or given(HUGE if most is None else most + 1 if whole else math.nextafter(most, HUGE)) == [field]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e300])
def test_an_impossible_time_limit_gets_one_error(seconds: float) -> None:
    found = check_spec(replace(SPEC, time_limit_seconds=seconds))
    said = f"must be above 0 and at most 366 days, not {seconds:g} seconds"
    assert [(one.field, one.description) for one in found] == [("spec.time_limit", said)]


def test_a_begin_after_the_deadline_is_refused() -> None:
    found = check_spec(replace(SPEC, begin_seconds=200.0, deadline_seconds=100.0))
    assert [(one.field, one.description) for one in found] == [
        ("spec.begin_time", "must be before the deadline, not 100 s after it")
    ]
    assert not check_spec(replace(SPEC, begin_seconds=50.0, deadline_seconds=100.0))


def test_a_time_limit_within_the_grace_names_both() -> None:
    found = check_spec(replace(SPEC, time_limit_seconds=20.0, grace_seconds=60.0))
    said = "must be longer than grace, 60 s, which is part of it, not 20 s"
    assert [(one.field, one.description) for one in found] == [("spec.time_limit", said)]


def many(count: int) -> tuple[tuple[str, str], ...]:
    return tuple((f"k{number}", "v") for number in range(count))


def folder(path: str = "/home", *environment: tuple[str, str]) -> dict[str, Any]:
    return {"submit_directory": SubmitDirectory(path, 1, 0, environment)}


def python(
    path: str, interpreter: str = "/bin/python", source: EnvironmentSource | None = EnvironmentSource.UV
) -> dict[str, Any]:
    return {"python_environment": PythonEnvironment(source, path, interpreter)}


def roles(*some: Role) -> dict[str, Any]:
    return {"roles": some}


def service(kind: JobKind = JobKind.INFERENCE, count: int = 2, least: int = 1, most: int = 4) -> dict[str, Any]:
    role = replace(WORKER, replicas=count, open=OpenReplicas(least, most))
    return {"kind": kind, "qos": Qos(0.0, 0.1, 99.0, 10.0), **roles(role)}


def elastic(least: int = 1, most: int = 8, count: int = 2, **changes: Any) -> dict[str, Any]:
    role = replace(WORKER, replicas=count, elastic=ReplicaRange(least, most), **changes)
    return roles(role)


CPU: dict[str, Any] = {"kind": JobKind.CPU, **roles(Role())}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"name": "n" * NAME_LENGTH_MAX, "model": "m" * NAME_LENGTH_MAX}, []),
        ({"name": "n" * (NAME_LENGTH_MAX + 1), "model": "a/b"}, ["name", "model"]),
        *(({"name": name}, ["name"]) for name in ("a\\b", ".", "..", "a\n")),
        ({"tenant": "a", "queue": "a-1" + "b" * 60}, []),
        ({"tenant": "", "queue": "-a"}, ["tenant", "queue"]),
        ({"labels": many(LABELS_MAX)}, []),
        ({"labels": many(LABELS_MAX + 1)}, ["labels"]),
        *(({"labels": (label,)}, [f"labels[{label[0]!r}]"]) for label in (("", "v"), ("a/b", "v"), ("k", "a/b"))),
        (roles(), ["roles", "kind"]),
        (roles(*(replace(WORKER, name=f"r{number}") for number in range(ROLES_MAX))), []),
        (roles(*(replace(WORKER, name=f"r{number}") for number in range(ROLES_MAX + 1))), ["roles"]),
        (roles(WORKER, WORKER), ["roles[1].name"]),
        (roles(replace(WORKER, name="A")), ["roles[0].name"]),
        (roles(replace(WORKER, replicas=REPLICAS_MAX)), []),
        (roles(replace(WORKER, replicas=REPLICAS_MAX), replace(WORKER, name="ps")), ["roles"]),
        (roles(replace(WORKER, replicas=0)), ["roles[0].replicas", "kind"]),
        (roles(replace(WORKER, replicas=REPLICAS_MAX + 1)), ["roles[0].replicas", "roles"]),
        ({"command": (), **roles(replace(WORKER, command=("true",)))}, []),
        ({"command": ()}, ["roles[0].command"]),
        (roles(Role(request=Request(2000, gpu_type="T4/"))), ["roles[0].resources.gpu_type"]),
        ({"kind": JobKind.CPU, **roles(Role(request=Request(0, gpu_type="T4")))}, ["roles[0].resources.gpu_type"]),
        (service(), []),
        (service(count=1), []),
        (service(count=4), []),
        (service(count=5), ["roles[0].replicas"]),
        (service(count=1, least=2), ["roles[0].replicas"]),
        (service(least=0, count=1), ["roles[0].open.min"]),
        (service(least=3, count=3, most=2), ["roles[0].open.max"]),
        (service(most=REPLICAS_MAX), []),
        (service(most=REPLICAS_MAX + 1), ["roles[0].open.max"]),
        (service(kind=JobKind.TRAINING), ["roles[0].open"]),
        (elastic() | {"resize": ResizeMode.IN_PLACE, "scale": BatchScaling.WEAK}, []),
        (elastic(least=4, most=4, count=4), []),
        (elastic(least=8, most=4, count=8), ["roles[0].elastic.max"]),
        (elastic(least=0, count=1), ["roles[0].elastic.min"]),
        (elastic(least=-2, most=-1, count=1), ["roles[0].elastic.min", "roles[0].elastic.max"]),
        (elastic(count=9), ["roles[0].replicas"]),
        (elastic(most=REPLICAS_MAX + 1), ["roles", "roles[0].elastic.max"]),
        (elastic(name="ps"), ["roles[0].elastic"]),
        (elastic() | {"kind": JobKind.INFERENCE}, ["roles[0].elastic"]),
        (service() | elastic(open=OpenReplicas(1, 4)), ["roles[0].elastic"]),
        (elastic() | {"spread": Spread(least=2)}, ["roles[0].elastic"]),
        (roles(*elastic(most=REPLICAS_MAX)["roles"], replace(WORKER, name="ps")), ["roles"]),
        ({"resize": ResizeMode.RESTART, "scale": BatchScaling.STRONG}, ["resize", "scale"]),
        (service() | roles(service()["roles"][0], replace(WORKER, name="ps")), ["roles[0].open"]),
        (
            service() | {"qos": Qos()},
            ["qos.latency_seconds", "qos.latency_percentile", "qos.arrivals_per_second"],
        ),
        (CPU, []),
        ({"kind": JobKind.CPU}, ["kind"]),
        (roles(Role()), ["kind"]),
        (CPU | {"best_effort": True}, []),
        ({"best_effort": True}, ["best_effort"]),
        ({"pre_run_seconds": 9.0, **roles(Role(request=Request(1000)))}, ["pre_run"]),
        ({"qos": Qos(latency_seconds=1.0)}, ["qos.latency_percentile"]),
        ({"qos": Qos(latency_percentile=99.0)}, ["qos.latency_seconds"]),
        ({"qos": Qos(latency_seconds=1.0, latency_percentile=math.nextafter(100, 0))}, []),
        ({"qos": Qos(latency_seconds=1.0, latency_percentile=100)}, ["qos.latency_percentile"]),
        ({"qos": Qos(latency_seconds=HUGE, latency_percentile=99)}, ["qos.latency_seconds"]),
        ({"pids_max": 0}, []),
        ({"steps_total": -1}, ["steps_total"]),
        ({"loss_goal": LossGoal(1.0, 1, 1e-9)}, []),
        ({"loss_goal": LossGoal(None, 5, 0.0)}, ["loss_goal.fall_min"]),
        ({"loss_goal": LossGoal(None, 0, 0.5)}, ["loss_goal.fall_steps"]),
        ({"loss_goal": LossGoal(None, -1, 0.5)}, ["loss_goal.fall_steps"]),
        ({"loss_goal": LossGoal(None, 5, HUGE)}, ["loss_goal.fall_min"]),
        ({"loss_goal": LossGoal(None, 5, -0.5)}, ["loss_goal.fall_min"]),
        ({"dependencies": (Dependency("a", Condition.AFTER),) * DEPENDENCIES_MAX}, []),
        ({"dependencies": (Dependency("a", Condition.AFTER),) * (DEPENDENCIES_MAX + 1)}, ["dependencies"]),
        ({"dependencies": (Dependency("a", Condition.AFTER), Dependency("", Condition.AFTER))}, ["dependencies[1].id"]),
        ({"dependencies": (Dependency("a/b", Condition.AFTER),)}, ["dependencies[0].id"]),
        ({"command": ("a",) * COMMAND_WORDS_MAX}, []),
        ({"command": ("a",) * (COMMAND_WORDS_MAX + 1)}, ["command"]),
        (roles(replace(WORKER, command=("a",) * (COMMAND_WORDS_MAX + 1))), ["roles[0].command"]),
        ({"command": ("a" * (TEXT_BYTES_MAX - 2),), "environment": (("k", "v"),)}, []),
        ({"command": ("a" * (TEXT_BYTES_MAX - 1),), "environment": (("k", "v"),)}, ["command"]),
        ({"command": ("a" * (TEXT_BYTES_MAX - 7),), **folder("/", ("PATH", "/a\0"))}, [
            "submit_directory.environment['PATH']"]),
        ({"command": ("a" * (TEXT_BYTES_MAX - 6),), **folder("/", ("PATH", "/a\0"))}, ["command"]),
        ({"command": ("a\0",)}, ["command"]),
        (roles(replace(WORKER, command=("\0",))), ["command"]),
        ({"environment": many(ENVIRONMENT_MAX)}, []),
        ({"environment": many(ENVIRONMENT_MAX + 1)}, ["environment"]),
        ({"environment": (("1A", "v"), ("CUDA_VISIBLE_DEVICES", "v"), ("A", "\0"))}, [
            "environment['1A']", "environment['CUDA_VISIBLE_DEVICES']", "environment['A']"]),
        ({"working_directory": "/" * PATH_LENGTH_MAX}, []),
        *(({"working_directory": path}, ["working_directory"]) for path in ("/" * (PATH_LENGTH_MAX + 1), "a", "/\0")),
        (folder("/" * PATH_LENGTH_MAX, ("PATH", "/bin")), []),
        *((folder(path), ["submit_directory.path"]) for path in ("/" * (PATH_LENGTH_MAX + 1), "a", "/\0")),
        (folder("/", ("HOME", "/")), ["submit_directory.environment['HOME']"]),
        (python("/" * PATH_LENGTH_MAX), []),
        *((python(path), ["python_environment.path"]) for path in ("/" * (PATH_LENGTH_MAX + 1), "a", "/\0")),
        (python("/", "python", None), ["python_environment.source", "python_environment.interpreter"]),
        ({"warning_signal": "SIGUSR1"}, []),
        ({"warning_signal": "SIGKILL"}, ["warning_signal"]),
        ({"progress_regex": "("}, ["progress.regex"]),
    ],
)  # fmt: skip
def test_exactly_the_invalid_fields_are_named(changes: dict[str, Any], fields: list[str]) -> None:
    assert wrong(replace(SPEC, **changes)) == fields


def test_a_deadline_must_be_ahead_of_the_clock_if_there_is_one() -> None:
    spec = replace(SPEC, deadline_seconds=100.0)
    assert check_spec(spec) == check_spec(spec, now=math.nextafter(100.0, 0.0)) == ()
    assert [one.field for one in check_spec(spec, now=100.0)] == ["spec.deadline"]


@pytest.mark.parametrize(
    ("field", "role", "least", "most"),
    [
        ("replicas", lambda count: Role(replicas=count), 1, REPLICAS_MAX),
        ("open.min", lambda count: Role(open=OpenReplicas(count, 9)), 1, REPLICAS_MAX),
        ("open.max", lambda count: Role(open=OpenReplicas(1, count)), 1, REPLICAS_MAX),
        ("elastic.min", lambda count: Role(elastic=ReplicaRange(count, 9)), 1, REPLICAS_MAX),
        ("elastic.max", lambda count: Role(elastic=ReplicaRange(1, count)), 1, REPLICAS_MAX),
        ("resources.gpu_milli", lambda count: Role(request=Request(count)), 0, GPU_MILLI_MAX),
        ("resources.cores", lambda count: Role(request=Request(cores=count)), 0, CORES_MAX),
        ("resources.memory_bytes", lambda count: Role(request=Request(memory_bytes=count)), 0, AMOUNT_MAX),
    ],
)
def test_amounts_that_can_be_counted_are_those_within_their_limits(
    field: str, role: Any, least: int, most: int
) -> None:
    for count in (least, most, least - 1, most + 1):
        found = [one.field for one in check_amounts(JobSpec(roles=(role(count),)))]
        assert found == ([] if least <= count <= most else [f"spec.roles[0].{field}"])


def test_roles_that_can_be_counted_are_few_with_no_more_replicas_than_a_job_may_have() -> None:
    for count in (0, 1, ROLES_MAX, ROLES_MAX + 1):
        found = [one.field for one in check_amounts(JobSpec(roles=(Role(),) * count))]
        assert found == ([] if 1 <= count <= ROLES_MAX else ["spec.roles"])
    for more in (0, 1):
        some = Role(replicas=REPLICAS_MAX - 1), Role(replicas=1 + more)
        assert [one.field for one in check_amounts(JobSpec(roles=some))] == ["spec.roles"] * more


def test_a_job_with_an_image_needs_no_command_and_may_have_gpus() -> None:
    container = Container("oci:/images/train:v1")

    def wrong(*roles: Role) -> list[str]:
        return [one.field for one in check_spec(JobSpec(roles=roles, container=container))]

    assert not {"spec.roles[0].command", "spec.container.image"} & set(wrong(Role()))
    assert wrong(Role(request=Request(1000))) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("busybox", "must be dir:DIR or oci:DIR"),
        ("docker://busybox", "must be dir:DIR or oci:DIR"),
        ("oci:images", "must have an absolute path"),
        ("oci:/images:", "has an invalid tag"),
        ("oci:/images:a/b", "has an invalid tag"),
        ("dir:/images/../root", "must have a path without '..'"),
        ("dir:/a\0b", "must have a path without '..' and NUL bytes"),
        ("dir:/" + "a/" * 2500, "has a path of 5001 characters"),
    ],
    ids=range(8),
)
def test_a_wrong_reference_to_an_image_is_refused_with_the_reason(text: str, why: str) -> None:
    found = check_spec(JobSpec(roles=(Role(),), command=("true",), container=Container(text)))
    (told,) = [one.description for one in found if one.field == "spec.container.image"]
    assert told.startswith(why)
