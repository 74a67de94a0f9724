"""A job like an earlier one: its fields with overrides, without what belonged to one submission."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from cotenant.cli.connection import with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_file import Draft, read_jobs
from cotenant.cli.jobs.job_writer import write_jobs
from cotenant.cli.name_lookup import find_job_or_array
from cotenant.cli.outcome import note
from cotenant.cli.source_positions import MapNode
from cotenant.codec.specs import seconds, spec_from_wire, triggers_from_wire
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job, JobSpec


def find_draft(flags: Flags, text: str, overrides: MapNode) -> Draft:
    """Return a job like the one with this id or name, with overrides.

    Raises:
        CommandError: there is no such job, or an override is invalid.
    """
    return draft_like(with_mesh(flags, lambda mesh: find_job_or_array(mesh, text)), overrides, time.time())


def draft_like(earlier: Job | Array, overrides: MapNode, now: float) -> Draft:
    """Return a job like an earlier one with overrides; tell what of it is dropped.

    Raises:
        BadJobs: an override is invalid.
    """
    message = JobSpec()
    message.CopyFrom(earlier.spec)
    given = {key.text for key, _ in overrides.entries}
    for field, words in _dropped(message, now):
        message.ClearField(field)
        if field not in given:
            note(f"{earlier.id}: {words} is not repeated")
    if message.HasField("array_task"):
        index = message.array_task.index
        message.ClearField("array_task")
        message.array.ranges.add(first=index, last=index)
    if isinstance(earlier, Job) and earlier.archived:
        note(f"{earlier.id} is archived without its environment; give variables that it needs with --env")
    targets, triggers = tuple(message.notify), triggers_from_wire(message.notify_on)
    message.ClearField("notify")  # redacted targets cannot be read again; the server knows them
    message.ClearField("notify_on")
    message.ClearField("upload")  # in a job file it is a path, here the id of a folder that the mesh has
    before = spec_from_wire(message)
    (draft,) = read_jobs(write_jobs([before]), f"job {earlier.id}", now, overrides)
    spec = replace(draft.spec, submit_directory=before.submit_directory, python_environment=before.python_environment)
    if not given & {"upload", "workdir"}:
        spec = replace(spec, upload=earlier.spec.upload)
    if "notify" not in given:
        spec = replace(spec, notify=targets, notify_on=spec.notify_on or triggers)
    like = replace(draft, spec=spec, like=earlier.id)
    return like.with_environment(spec.submit_directory.path if spec.submit_directory else "", os.environ)


def _dropped(message: JobSpec, now: float) -> Sequence[tuple[str, str]]:
    """Return the fields that belonged to one submission, with their names for users."""
    found = [("dependencies", "its dependencies")] if message.dependencies else []
    found += [("hold", "its hold")] if message.hold else []
    found += [("begin_time", "its begin time")] if message.HasField("begin_time") else []
    passed = message.HasField("deadline") and seconds(message.deadline) <= now
    return [*found, *([("deadline", "its deadline, which has passed,")] if passed else [])]
