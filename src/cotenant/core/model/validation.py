"""Validates job specifications: every rule is checked, and every invalid field is named at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.model import job_array, job_fields
from cotenant.core.model.field_limits import is_id
from cotenant.core.model.field_limits import name_error as name_error
from cotenant.core.model.field_limits import shown as shown
from cotenant.core.model.job import (
    SUBMIT_VARIABLES,
    WHOLE_GPU_MILLI,
    EnvironmentSource,
    JobKind,
    JobSpec,
    Locality,
    PythonEnvironment,
    Request,
    Role,
    SpreadBy,
    SubmitDirectory,
)
from cotenant.core.model.limits import (
    COMMAND_WORDS_MAX,
    ENVIRONMENT_MAX,
    LABELS_MAX,
    PATH_LENGTH_MAX,
    TEXT_BYTES_MAX,
)
from cotenant.core.model.limits import DEPENDENCIES_MAX as DEPENDENCIES_MAX
from cotenant.core.model.limits import REPLICAS_MAX as REPLICAS_MAX
from cotenant.core.model.limits import ROLES_MAX as ROLES_MAX
from cotenant.core.model.mounts import mount_errors
from cotenant.core.model.node import alternatives
from cotenant.core.model.notification import TARGETS_MAX, target_error
from cotenant.core.model.resources import AMOUNT_MAX, AMOUNT_MIN, amounts_of
from cotenant.core.model.secrets import use_errors

CORES_MAX = 4096
PARAMETER_SERVER = "ps"  # the usual name of their role
GPU_MILLI_MAX = 64 * WHOLE_GPU_MILLI

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_VARIABLES = ("COTENANT_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, slots=True)
class Violation:
    """An invalid field and why it is invalid."""

    field: str
    description: str


def check_spec(spec: JobSpec, *, now: float | None = None) -> tuple[Violation, ...]:
    """Return every violation in a spec; empty if it is valid. Fields are named as on the wire.

    >>> check_spec(JobSpec(roles=(Role(replicas=0),), command=("true",)))[0]
    Violation(field='spec.roles[0].replicas', description='must be from 1 to 4096, not 0')
    """
    return tuple(
        Violation(f"spec.{field}", description)
        for rule in (_labels, _roles, _elastic, _contradictions, _begin, _fields, _texts, _order, _notify)
        for field, description in rule(spec)
    ) + tuple(_deadline(spec, now))


def check_amounts(spec: JobSpec) -> tuple[Violation, ...]:
    """Return amounts that cannot be computed with, whatever else is wrong: negative ones, or more than any job has.

    >>> check_amounts(JobSpec(roles=(Role(request=Request(memory_bytes=-1)),)))[0].field
    'spec.roles[0].resources.memory_bytes'
    """
    if not 1 <= len(spec.roles) <= ROLES_MAX:
        return (Violation("spec.roles", f"must be from 1 to {ROLES_MAX}, not {len(spec.roles)}"),)
    wrong = tuple(
        Violation(f"spec.roles[{index}].{field}", f"must be from {least} to {most}, not {amount}")
        for index, role in enumerate(spec.roles)
        for field, least, amount, most in (
            ("replicas", 1, role.replicas, REPLICAS_MAX),
            ("open.min", 1, role.open.least if role.open else 1, REPLICAS_MAX),
            ("open.max", 1, role.open.most if role.open else 1, REPLICAS_MAX),
            ("elastic.min", 1, role.elastic.least if role.elastic else 1, REPLICAS_MAX),
            ("elastic.max", 1, role.elastic.most if role.elastic else 1, REPLICAS_MAX),
            ("resources.gpu_milli", 0, role.request.gpu_milli, GPU_MILLI_MAX),
            ("resources.cores", 0, role.request.cores or 0, CORES_MAX),
            *((f"resources.{name}", 0, amount, AMOUNT_MAX) for name, amount in amounts_of(role.request).items()),
        )
        if not least <= amount <= most
    )
    return wrong or tuple(Violation(f"spec.{field}", description) for field, description in _replicas(spec))


Found = Iterator[tuple[str, str]]


def _fields(spec: JobSpec) -> Found:
    """Yield the values beyond the limits of the table of job fields."""
    for field in job_fields.JOB:
        value = field.value_of(spec)
        if field.limit and value is not None and (wrong := field.limit.reason(value)):
            yield field.wire, wrong


def _labels(spec: JobSpec) -> Found:
    if len(spec.labels) > LABELS_MAX:
        yield "labels", f"at most {LABELS_MAX} are allowed, not {len(spec.labels)}"
    for key, value in spec.labels[:LABELS_MAX]:
        if not key or name_error(key) or name_error(value):
            yield f"labels[{shown(key)}]", "key and value must be printable and short"


def _roles(spec: JobSpec) -> Found:
    if not spec.roles:
        yield "roles", "at least one role is needed"
    if len(spec.roles) > ROLES_MAX:
        yield "roles", f"at most {ROLES_MAX} are allowed, not {len(spec.roles)}"
    seen: set[str] = set()
    for index, role in enumerate(spec.roles[:ROLES_MAX]):
        where = f"roles[{index}]"
        if not is_id(role.name):
            yield f"{where}.name", f"must be lower-case letters, digits and dashes, not {shown(role.name)}"
        if role.name in seen:
            yield f"{where}.name", f"{shown(role.name)} is already the name of another role"
        seen.add(role.name)
        if not 1 <= role.replicas <= REPLICAS_MAX:
            yield f"{where}.replicas", f"must be from 1 to {REPLICAS_MAX}, not {role.replicas}"
        yield from _open(spec, role, where)
        if not (role.command or spec.command or spec.container.image):
            yield f"{where}.command", "nothing to run: neither the role nor the job has a command"
        for field, wrong in _request(role.request):
            yield f"{where}.resources.{field}", wrong
    yield from _replicas(spec)


def _replicas(spec: JobSpec) -> Found:
    if sum(role.elastic.most if role.elastic else role.replicas for role in spec.roles) > REPLICAS_MAX:
        yield "roles", f"all roles together may have {REPLICAS_MAX} replicas, not {spec.replicas}"


def _elastic(spec: JobSpec) -> Found:
    """Yield what contradicts the ranges of replicas of an elastic job."""
    ranges = [(f"roles[{index}]", role) for index, role in enumerate(spec.roles[:ROLES_MAX]) if role.elastic]
    for where, role in ranges:
        yield from _range(role, where)
    if not ranges:
        for field in ("resize", "scale"):
            if getattr(spec, field):
                yield field, "has no effect: no role has a range of replicas, such as 1..8"
        return
    where, last = ranges[-1]
    if spec.kind is not JobKind.TRAINING and not last.open:
        yield f"{where}.elastic", f"only training jobs can have a range of replicas, not {spec.kind} jobs"
    if all(role.name == PARAMETER_SERVER for role in spec.roles):
        yield f"{where}.elastic", "parameter servers need a role of workers beside them"
    fewest = sum(role.elastic.least if role.elastic else role.replicas for role in spec.roles)
    if spec.spread.least > max(0, fewest):
        yield f"{where}.elastic", f"its minimum must leave at least {spec.spread.least} replicas, as spread.min does"


def _range(role: Role, where: str) -> Found:
    assert role.elastic
    least, most = role.elastic.least, role.elastic.most
    if not 1 <= least <= REPLICAS_MAX:
        yield f"{where}.elastic.min", f"must be from 1 to {REPLICAS_MAX}, not {least}"
    if not max(1, least) <= most <= REPLICAS_MAX:
        yield f"{where}.elastic.max", f"must be from {max(1, least)} to {REPLICAS_MAX}, not {most}"
    elif not least <= role.replicas <= most and 1 <= role.replicas <= REPLICAS_MAX:
        yield f"{where}.replicas", f"must be from {least} to {most}, its range, or absent, not {role.replicas}"
    if role.open:
        yield f"{where}.elastic", "auto replicas and a range of an elastic job cannot be combined"


def _open(spec: JobSpec, role: Role, where: str) -> Found:
    """Yield what is missing if the number of replicas is open."""
    if role.open is None:
        return
    least, most = role.open.least, role.open.most
    if not 1 <= least <= REPLICAS_MAX:
        yield f"{where}.open.min", f"must be from 1 to {REPLICAS_MAX}, not {least}"
    if not max(1, least) <= most <= REPLICAS_MAX:
        yield f"{where}.open.max", f"must be from {max(1, least)} to {REPLICAS_MAX}, not {most}"
    elif not least <= role.replicas <= most and 1 <= role.replicas <= REPLICAS_MAX:
        yield f"{where}.replicas", f"must be from {least} to {most} or absent because it is open, not {role.replicas}"
    if spec.kind is not JobKind.INFERENCE:
        yield f"{where}.open", f"only inference jobs can have auto replicas, not {spec.kind} jobs"
    if len(spec.roles) > 1:
        yield f"{where}.open", "a job with several roles must give the number of replicas of each"
    for field, value, what in (
        ("latency_seconds", spec.qos.latency_seconds, "a latency target"),
        ("latency_percentile", spec.qos.latency_percentile, "the percentile at which its latency target holds"),
        ("arrivals_per_second", spec.qos.arrivals_per_second, "the rate at which requests arrive"),
    ):
        if not value:
            yield f"qos.{field}", f"a service with auto replicas needs {what}"


def _request(request: Request) -> Found:
    milli = request.gpu_milli
    if not 0 <= milli <= GPU_MILLI_MAX:
        yield "gpu_milli", f"must be from 0 to {GPU_MILLI_MAX} (64 GPUs), not {milli}"
    elif milli > WHOLE_GPU_MILLI and milli % WHOLE_GPU_MILLI:
        yield "gpu_milli", f"above one GPU, only whole GPUs are allowed, not {milli / 1000:g}"
    if request.cores is not None and not 1 <= request.cores <= CORES_MAX:
        yield "cores", f"must be from 1 to {CORES_MAX}, or absent for auto, not {request.cores}"
    for name, amount in amounts_of(request).items():
        if amount and not AMOUNT_MIN <= amount <= AMOUNT_MAX:
            yield name, f"must be 0, or from 4 MiB to 1 PiB, not {amount}"
    if wrong := name_error(request.gpu_type):
        yield "gpu_type", wrong
    elif request.gpu_type and not all(alternatives(request.gpu_type)):
        yield "gpu_type", f"needs a type on each side of a |, not {shown(request.gpu_type)}"
    if request.gpu_type and not milli:
        yield "gpu_type", "a GPU type is given but no GPU"


def _contradictions(spec: JobSpec) -> Found:
    if spec.kind is JobKind.CPU and spec.gpu_milli:
        yield "kind", f"a cpu job must not ask for GPUs; this job asks for {spec.gpu_milli / 1000:g}"
    if spec.kind is not JobKind.CPU and not spec.gpu_milli:
        yield "kind", f"a job of kind {spec.kind} must ask for GPUs; ask for some, or use kind cpu"
    if spec.best_effort and spec.kind is not JobKind.CPU:
        yield "best_effort", f"only cpu jobs can be best-effort, not {spec.kind} jobs"
    if spec.pre_run_seconds is not None and spec.gpu_milli <= WHOLE_GPU_MILLI:
        yield "pre_run", "needs a job with more than one GPU: with one, it would run the whole job"
    if spec.time_limit_seconds is not None and 0 < spec.time_limit_seconds <= spec.grace_seconds:
        yield (
            "time_limit",
            f"must be longer than grace, {spec.grace_seconds:g} s, which is part of it, "
            f"not {spec.time_limit_seconds:g} s",
        )
    if spec.qos.latency_seconds and not spec.qos.latency_percentile:
        yield "qos.latency_percentile", "a latency target needs the percentile at which it holds"
    if spec.qos.latency_percentile and not spec.qos.latency_seconds:
        yield "qos.latency_seconds", "a percentile was given but no latency target"
    yield from _spread(spec)
    goal = spec.loss_goal
    if bool(goal.fall_steps) != bool(goal.fall_min):
        given, missing = ("fall_steps", "fall_min") if goal.fall_steps else ("fall_min", "fall_steps")
        yield f"loss_goal.{missing}", f"is missing: {given} alone has no effect"


def _begin(spec: JobSpec) -> Found:
    begin, deadline = spec.begin_seconds, spec.deadline_seconds
    if begin is not None and deadline is not None and begin >= deadline:
        yield "begin_time", f"must be before the deadline, not {begin - deadline:.0f} s after it"


def _spread(spec: JobSpec) -> Found:
    """Yield why the replicas cannot be on as many different nodes or racks."""
    least, by = spec.spread.least, spec.spread.by or SpreadBy.NODE
    if spec.spread.by and not least:
        yield "spread.min", "is missing: spread.by alone has no effect"
    if least > spec.replicas > 0:
        yield "spread.min", f"must be at most the number of replicas, {spec.replicas}, not {least}"
    if least > 1 and (spec.locality is Locality.SERVER or (spec.locality, by) == (Locality.RACK, SpreadBy.RACK)):
        yield (
            "spread.min",
            f"contradicts locality: locality {spec.locality} wants all replicas on one {spec.locality}, "
            f"spread wants them on {least} {by}s at least",
        )


def _order(spec: JobSpec) -> Found:
    if len(spec.dependencies) > DEPENDENCIES_MAX:
        yield "dependencies", f"at most {DEPENDENCIES_MAX} are allowed, not {len(spec.dependencies)}"
    for place, dependency in enumerate(spec.dependencies[:DEPENDENCIES_MAX]):
        if not dependency.job_id or name_error(dependency.job_id):
            yield f"dependencies[{place}].id", f"must name a job or an array, not {shown(dependency.job_id)}"
    if spec.array and (wrong := job_array.invalid_reason(spec.array)):
        yield "array", wrong


def _notify(spec: JobSpec) -> Found:
    for violation in notify_violations(spec.notify):
        yield violation.field, violation.description


def notify_violations(targets: Sequence[str]) -> Iterator[Violation]:
    """Yield what is wrong with the targets of notifications."""
    if len(targets) > TARGETS_MAX:
        yield Violation("notify", f"at most {TARGETS_MAX} are allowed, not {len(targets)}")
    for place, target in enumerate(targets[:TARGETS_MAX]):
        if wrong := target_error(target):
            yield Violation(f"notify[{place}]", wrong)
        elif target in targets[:place]:
            yield Violation(f"notify[{place}]", "is given twice")


def _texts(spec: JobSpec) -> Found:
    if spec.upload and spec.working_directory:
        yield "upload", "a job has an uploaded folder or a working directory, not both"
    for field, words in _commands(spec):
        if len(words) > COMMAND_WORDS_MAX:
            yield field, f"has {len(words)} words; {COMMAND_WORDS_MAX} are allowed at most"
    if len(spec.environment) > ENVIRONMENT_MAX:
        yield "environment", f"has {len(spec.environment)} variables; {ENVIRONMENT_MAX} are allowed at most"
    size = _size(spec)
    if size > TEXT_BYTES_MAX:
        yield "command", f"command and environment have {size} bytes; {TEXT_BYTES_MAX} are allowed at most"
        return
    if any("\0" in word for word in _words(spec)):
        yield "command", "a NUL byte cannot be passed to a program"
    yield from _environment(spec)
    yield from mount_errors(spec.container.mounts, spec.container.image)
    yield from use_errors(spec.secrets, dict(spec.environment), _OWN_VARIABLES)
    yield from _submit_directory(spec.submit_directory)
    yield from _python_environment(spec.python_environment)


def _environment(spec: JobSpec) -> Found:
    for key, value in spec.environment[:ENVIRONMENT_MAX]:
        if not _VARIABLE.fullmatch(key):
            yield f"environment[{shown(key)}]", "a variable's name has letters, digits and underscores only"
        if key.startswith(_OWN_VARIABLES):
            yield f"environment[{shown(key)}]", "this variable is set by the node agent"
        if "\0" in value:
            yield f"environment[{shown(key)}]", "a NUL byte cannot be passed to a program"


def _submit_directory(folder: SubmitDirectory | None) -> Found:
    if folder is None:
        return
    yield from _absolute("submit_directory.path", folder.path)
    for key, value in folder.environment[: len(SUBMIT_VARIABLES) + 1]:
        field = f"submit_directory.environment[{shown(key)}]"
        if key not in SUBMIT_VARIABLES:
            yield field, f"must be one of {', '.join(SUBMIT_VARIABLES)}; other variables belong in environment"
        if "\0" in value:
            yield field, "a NUL byte cannot be passed to a program"


def _python_environment(environment: PythonEnvironment | None) -> Found:
    if environment is None:
        return
    if environment.source is None:
        yield "python_environment.source", f"must be one of {', '.join(EnvironmentSource)}"
    yield from _absolute("python_environment.path", environment.path)
    yield from _absolute("python_environment.interpreter", environment.interpreter)


def _absolute(field: str, path: str) -> Found:
    if len(path) > PATH_LENGTH_MAX:
        yield field, f"has {len(path)} characters; at most {PATH_LENGTH_MAX} are allowed"
    elif not path.startswith("/") or "\0" in path:
        yield field, f"must be an absolute path, not {shown(path)}"


def _deadline(spec: JobSpec, now: float | None) -> Iterator[Violation]:
    if spec.deadline_seconds is not None and now is not None and spec.deadline_seconds <= now:
        yield Violation("spec.deadline", f"has passed {now - spec.deadline_seconds:.0f} s ago")


def _words(spec: JobSpec) -> Iterator[str]:
    yield from spec.command
    for role in spec.roles:
        yield from role.command


def _commands(spec: JobSpec) -> Iterator[tuple[str, Sequence[str]]]:
    yield "command", spec.command
    for index, role in enumerate(spec.roles[:ROLES_MAX]):
        yield f"roles[{index}].command", role.command


def _size(spec: JobSpec) -> int:
    words = sum(len(word.encode(errors="replace")) for word in _words(spec))
    variables = (*spec.environment, *(spec.submit_directory.environment if spec.submit_directory else ()))
    return words + sum(len(key) + len(value.encode(errors="replace")) for key, value in variables)


def default_kind(roles: tuple[Role, ...]) -> JobKind:
    """Return the kind of a job that gives none: training if it asks for GPUs, else cpu."""
    return JobKind.TRAINING if any(role.request.gpu_milli for role in roles) else JobKind.CPU
