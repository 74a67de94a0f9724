"""`cotenant rerun`, and `submit --like`: a new job like an earlier one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.job_file import Draft, read_jobs
from cotenant.cli.jobs.job_writer import write_jobs
from cotenant.cli.jobs.submit import create, print_accepted, rejection
from cotenant.cli.name_lookup import find_job_or_array, find_jobs_and_arrays
from cotenant.cli.outcome import note
from cotenant.cli.source_positions import MapNode, SourcePosition
from cotenant.codec.errors import from_error
from cotenant.codec.specs import seconds, spec_from_wire, triggers_from_wire
from cotenant.deferred import grpc
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job, JobSpec

NOTHING = MapNode(SourcePosition("the command line"), ())


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("rerun")(rerun)


def rerun(
    context: typer.Context,
    job_ids: options.JobIds,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check whether the jobs are valid.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Submit jobs or whole arrays again, as new jobs with new ids, and print these.

    Everything is as before, labels and notifications included, but for what belonged to that submission: dependencies,
    begin time, --hold and a deadline that has passed are dropped. A task of an array becomes an array of that index. To
    change something, use `cotenant submit --like ID` with the options of submit.

    \b
    Examples:
      cotenant rerun ID
      cotenant rerun @last
      cotenant submit --like ID --gpus 2 --time 4h
    """

    flags, now = Flags.of(context), time.time()
    earlier = with_mesh(flags, lambda mesh: find_jobs_and_arrays(mesh, job_ids))
    drafts = [draft_like(one, NOTHING, now) for one in earlier]
    accepted: list[Job | Array] = []
    try:
        with_mesh(flags, lambda mesh: _submit(mesh, drafts, dry_run, accepted))
    finally:
        print_accepted(accepted, as_json, dry_run, waited=False)


async def _submit(mesh: Mesh, drafts: Sequence[Draft], dry_run: bool, accepted: list[Job | Array]) -> None:
    """Create jobs one by one, and collect them in `accepted`.

    Raises:
        CommandError: one was refused; those before it are submitted.
    """
    for draft in drafts:
        try:
            made = await create(mesh, draft.to_wire(draft.spec), validate_only=dry_run, like=draft.like)
        except grpc.aio.AioRpcError as error:
            raise rejection([(draft, from_error(error))]) from error
        accepted.append(made)


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
        message.ClearField(field)  # type: ignore[arg-type]  # a field's name that is only known here
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
    before = spec_from_wire(message)
    (draft,) = read_jobs(write_jobs([before]), f"job {earlier.id}", now, overrides)
    spec = replace(draft.spec, submit_directory=before.submit_directory)
    if "notify" not in given:
        spec = replace(spec, notify=targets, notify_on=spec.notify_on or triggers)
    return replace(draft, spec=spec, like=earlier.id)


def _dropped(message: JobSpec, now: float) -> Sequence[tuple[str, str]]:
    """Return the fields that belonged to one submission, with their names for users."""
    found = [("dependencies", "its dependencies")] if message.dependencies else []
    found += [("hold", "its hold")] if message.hold else []
    found += [("begin_time", "its begin time")] if message.HasField("begin_time") else []
    passed = message.HasField("deadline") and seconds(message.deadline) <= now
    return [*found, *([("deadline", "its deadline, which has passed,")] if passed else [])]
