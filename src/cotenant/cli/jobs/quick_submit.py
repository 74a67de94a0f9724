"""Submits a job with plain options without the model of jobs, whose import takes longer than the whole submission.

The message is what `submit` would send: the generated `JOB`, with the fields of the options that were given. The server
checks it. Whatever goes wrong here is left to `submit`, which checks the options itself and explains every error; both
use one request id, so that the job is not created twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from cotenant.cli import units
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.python_environment import find_environment, variables_with
from cotenant.cli.jobs.submit_directory import Directory, find_directory
from cotenant.cli.jobs.user_defaults import read_user_defaults
from cotenant.cli.outcome import CommandError, note
from cotenant.cli.quick_table import JOB, JOB_FIELDS
from cotenant.cli.unary_stubs import NotUnary
from cotenant.codec.times import duration
from cotenant.core.model.priority import parse_priority
from cotenant.v1.job_pb2 import JOB_KIND_TRAINING, EnvironmentSource, Job, JobSpec
from cotenant.v1.job_service_pb2 import CreateJobRequest, CreateJobResponse

EMPTY_WORKDIR = "none"  # as in `job_file`, whose import takes longer than a plain submission
READ: Mapping[str, Callable[[str], Any]] = {
    "TEXT": str,
    "INTEGER": units.parse_integer,
    "DURATION": units.parse_seconds,
    "SIZE": units.parse_bytes,
    "GPUS": units.parse_gpu_milli,
    "CORES": units.parse_cores,
    "PRIORITY": parse_priority,
}
HANDLED = frozenset({*JOB_FIELDS, "job_env", "job_labels", "job_not_preemptible", "empty_workdir", "request_id"})


def submitted(context: Any, given: dict[str, Any], tail: list[str] | None) -> bool:
    """Submit the job and print its id; return False if `submit` has to do it, with the request id in `given`."""
    spec = plain_spec(given, tail)
    if spec is None or _has_default_targets() or len(given["request_id"]) > units.REQUEST_ID_LENGTH_MAX:
        return False
    elsewhere = given["empty_workdir"] or given["job_workdir"] == EMPTY_WORKDIR
    folder = None if elsewhere else find_directory(os.environ)
    if folder:
        _set_folder(spec, folder)
    given["request_id"] = given["request_id"] or os.urandom(16).hex()
    request = CreateJobRequest(spec=spec, request_id=given["request_id"])

    async def work(mesh: Mesh) -> Job:
        answer: CreateJobResponse = await mesh.jobs.CreateJob(request)
        return answer.job

    try:
        job = with_mesh(Flags.of(context), work, unary=True, strictly=True)
    except (CommandError, NotUnary):
        return False
    print(job.id)
    if job.HasField("refusal") and job.refusal.code == "NEVER_FITS":
        note(f"note: {job.id} waits: {job.refusal.code}: {job.refusal.detail}")
    return True


def _set_folder(spec: JobSpec, folder: Directory) -> None:
    """Set the folder, and the Python environment that is found there, as `Draft.submitted_from` does."""
    path, inode, owner_uid, variables = folder
    spec.submit_directory.path, spec.submit_directory.inode = path, inode
    spec.submit_directory.owner_uid = owner_uid
    given = dict(variables)
    own = spec.working_directory or "PATH" in spec.environment
    if not own and (found := find_environment(os.environ, path)):
        given = variables_with(found, given)
        spec.python_environment.source = EnvironmentSource.Value(f"ENVIRONMENT_SOURCE_{found.source.upper()}")
        spec.python_environment.path, spec.python_environment.interpreter = found.path, found.interpreter
    spec.submit_directory.environment.update(given)


def _has_default_targets() -> bool:
    try:
        return bool(read_user_defaults(os.environ).notify)
    except CommandError:
        return True  # `submit` reports it


def plain_spec(given: Mapping[str, Any], tail: list[str] | None) -> JobSpec | None:
    """Return the job that the options describe; None if not all of them are plain."""
    if not tail or any(value for name, value in given.items() if name not in HANDLED):
        return None
    spec = JobSpec.FromString(JOB)
    spec.command.extend(tail)
    try:
        for name, (path, kind) in JOB_FIELDS.items():
            if given[name] is not None:
                _set(spec, path, READ[kind](given[name]))
        spec.environment.update(_pairs(given["job_env"]))
        spec.labels.update(_pairs(given["job_labels"]))
    except ValueError:
        return None
    if spec.working_directory == EMPTY_WORKDIR:
        spec.working_directory = ""
    if spec.roles[0].resources.gpu_milli > 0:
        spec.kind = JOB_KIND_TRAINING
    if given["job_not_preemptible"]:
        spec.preemptible = False
    return spec


def _set(spec: JobSpec, path: str, value: Any) -> None:
    """Set a field; None is what an unset field means."""
    message: Any = spec
    *outer, name = path.split(".")
    for part in outer:
        message = message.roles[0] if part == "roles" else getattr(message, part)
    if value is None:
        return
    if isinstance(getattr(message, name), Message):
        getattr(message, name).CopyFrom(duration(value))
    else:
        setattr(message, name, value)


def _pairs(texts: list[str] | None) -> dict[str, str]:
    """Return `KEY=VALUE` texts as a map.

    Raises:
        ValueError: a text has no key or no value.
    """
    pairs = dict[str, str]()
    for text in texts or ():
        key, given, value = text.partition("=")
        if not given or not key:
            raise ValueError(text)
        pairs[key] = value
    return pairs
