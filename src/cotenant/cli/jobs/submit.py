"""`cotenant submit`: jobs from files or from options, and waiting for their end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from importlib.resources import files as resources
from typing import Annotated

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.connection import Mesh, away, exit_code, reach, told
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.array_view import as_array, is_array, read_tasks
from cotenant.cli.jobs.follow import Output, Teller, ended, ending, follow, is_gang, try_to_copy
from cotenant.cli.jobs.job_file import BadJobs, Draft, Mistake
from cotenant.cli.jobs.job_options import TailCommand, read_drafts, takes_job
from cotenant.cli.jobs.submit_directory import current_directory
from cotenant.cli.jobs.submit_order import Step, arrange
from cotenant.cli.name_lookup import find_thing, phase_of
from cotenant.cli.outcome import CommandError, ExitCode, note, usage
from cotenant.cli.source_positions import Fields
from cotenant.codec.errors import Problem, from_error
from cotenant.core.model.lifecycle import Phase
from cotenant.v1.job_pb2 import Job
from cotenant.v1.job_service_pb2 import CreateJobRequest, ReadLogsRequest

REQUEST_ID_LENGTH_MAX = 120  # leaves room for a number behind it
FAILED_SHOWN_MAX = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("submit", cls=TailCommand)(takes_job(submit))


def submit(
    context: typer.Context,
    job: Fields,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Job files; - is stdin.", show_default=False)
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a job file with comments, and stop.")] = False,
    empty_workdir: Annotated[
        bool, typer.Option("--empty-workdir", help="Start in an empty folder, not in the current one.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say whether the jobs would be taken.")] = False,
    request_id: Annotated[
        str, typer.Option(metavar="TEXT", help="A repeat with the same text submits nothing twice.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end, print the output; exit 0 where the jobs succeeded.")
    ] = False,
    following: Annotated[bool, typer.Option("--follow", "-f", help="As --wait, and print output as it comes.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Submit jobs from files, or one from options; print their ids.

    A job starts in the current folder, with your PATH and virtual environment, on every node that has
    this folder: on this machine, or through a shared file system. On other nodes it starts in an empty
    folder. --workdir names another one.

    Options go over each job of the files. All jobs are checked before the first one is submitted. --array makes many
    jobs of one; --after and --after-ok let it wait for others.

    \b
    Examples:
      cotenant submit --gpus 1 --wait -- python3 train.py --epochs 90
      cotenant submit --cpus 4 --memory 8GiB --env DATA=/data -- ./preprocess
      cotenant submit --example > job.yaml
      cotenant submit job.yaml --tenant vision
      cotenant submit --array 0-99%10 --cpus 1 -- ./sweep
      cotenant submit --after-ok ID -- python3 evaluate.py
    """
    if example:
        print(example_text(), end="")
        return
    if len(request_id) > REQUEST_ID_LENGTH_MAX:
        raise usage(f"--request-id: at most {REQUEST_ID_LENGTH_MAX} characters are taken, not {len(request_id)}")
    folder = None if empty_workdir else current_directory(os.environ)
    drafts = [draft.submitted_from(folder) for draft in read_drafts(files or [], job, time.time())]
    steps = arrange(drafts)
    if following and (len(steps) > 1 or steps[0].draft.spec.array):
        raise usage("--follow prints the output of one job", hint="--wait prints that of several, each at its end")
    taken: list[Job] = []
    try:
        reach(Flags.of(context), lambda mesh: _submit(mesh, steps, request_id, dry_run, taken))
        if wait or following:
            taken[:] = reach(Flags.of(context), lambda mesh: _wait(mesh, taken, following, quiet=as_json))
    except KeyboardInterrupt:
        _still_there(taken, dry_run, "no longer waiting")
        raise
    except CommandError as error:
        if error.code == ExitCode.UNREACHABLE:
            _still_there(taken, dry_run, "no longer waiting: the mesh is away")
        raise
    _print(taken, as_json, dry_run, waited=wait or following)


def example_text() -> str:
    """Read the job file that shows every field."""
    return resources("cotenant.cli.jobs").joinpath("example.yaml").read_text(encoding="utf-8")


async def _submit(mesh: Mesh, steps: Sequence[Step], request_id: str, dry_run: bool, taken: list[Job]) -> None:
    """Check all jobs where there are several, then submit one after the other; `taken` has them as they were read."""
    steps = await found(mesh, steps)
    if dry_run or len(steps) > 1:
        checked = await _check(mesh, steps)
        if dry_run:
            taken += checked
            return
    made: dict[int, Job] = {}
    for step in steps:
        own_id = f"{request_id}:{step.number}" if request_id and len(steps) > 1 else request_id
        spec = step.spec({number: job.id for number, job in made.items()})
        try:
            answer = await mesh.jobs.CreateJob(CreateJobRequest(spec=step.draft.to_wire(spec), request_id=own_id))
        except grpc.aio.AioRpcError as error:
            if taken:
                note(f"submitted before that: {' '.join(job.id for job in taken)}")
            raise refused([(step.draft, from_error(error))]) from error
        made[step.number] = as_array(answer.job) if step.draft.spec.array else answer.job
        taken[:] = [made[number] for number in sorted(made)]


async def found(mesh: Mesh, steps: Sequence[Step]) -> list[Step]:
    """Put ids for what users write of them: the beginning or the end is enough.

    Raises:
        BadJobs: naming all that is waited for but is not there.
    """
    ids: dict[str, str] = {}
    mistakes: list[Mistake] = []
    resolved = []
    for step in steps:
        for place, text in step.others():
            try:
                ids[text] = ids.get(text) or (await find_thing(mesh, text)).id
            except CommandError as error:
                hint = f"; {error.hint}" if error.hint else ""
                mistakes.append(step.draft.mistake(f"spec.dependencies[{place}].id", f"{error.message}{hint}"))
        resolved.append(step.with_ids({place: ids[text] for place, text in step.others() if text in ids}))
    if mistakes:
        raise BadJobs("the submission", mistakes)
    return resolved


async def _check(mesh: Mesh, steps: Sequence[Step]) -> list[Job]:
    """Ask whether each job would be taken.

    Raises:
        CommandError: naming every job that would not.
    """
    jobs: list[Job] = []
    problems: list[tuple[Draft, Problem]] = []
    for step in steps:
        try:
            spec = step.draft.to_wire(step.spec({}))
            answer = await mesh.jobs.CreateJob(CreateJobRequest(spec=spec, validate_only=True))
        except grpc.aio.AioRpcError as error:
            if away(error.code()):
                raise
            problems.append((step.draft, from_error(error)))
        else:
            jobs.append(answer.job)
    if problems:
        raise refused(problems)
    return jobs


def refused(problems: Sequence[tuple[Draft, Problem]]) -> CommandError:
    """Tell why jobs are refused, pointing at their fields."""
    mistakes = [
        draft.mistake(violation.field, violation.description)
        for draft, problem in problems
        for violation in problem.violations
    ]
    if mistakes and all(problem.violations for _, problem in problems):
        return BadJobs("the submission", sorted(mistakes, key=lambda mistake: mistake.place))
    if len(problems) == 1:
        return told(problems[0][1])
    plain = [f"{draft.place}: {told(problem).message}" for draft, problem in problems if not problem.violations]
    worst = max(exit_code(problem.code) for _, problem in problems)
    return CommandError(f"{len(problems)} jobs are refused", details=[*map(str, mistakes), *plain], code=worst)


async def _wait(mesh: Mesh, jobs: Sequence[Job], following: bool, quiet: bool) -> list[Job]:
    """Wait until all jobs have ended, telling how they stand, and print their output unless `quiet`."""
    teller = Teller()
    for job in jobs:
        note(f"submitted {job.id} {job.spec.name}".rstrip())
    if following and not quiet:
        [job] = jobs
        output = Output(sys.stdout.buffer, marked=is_gang(job))
        return [await follow(mesh, job.id, ReadLogsRequest(id=job.id), output, teller)]
    last = {one.id: one for job in jobs for one in (await read_tasks(mesh, job.id) if is_array(job) else [job])}
    async for job in ended(mesh, list(last), teller):
        last[job.id] = job
        if not quiet and job.HasField("attempt"):
            await try_to_copy(mesh, ReadLogsRequest(id=job.id), Output(sys.stdout.buffer, marked=is_gang(job)))
    return list(last.values())


def _still_there(taken: Sequence[Job], dry_run: bool, why: str) -> None:
    """Say that the end of waiting is not the end of the jobs."""
    if taken and not dry_run:
        ids = " ".join(job.id for job in taken)
        note(f"{why}; {'the jobs run' if len(taken) > 1 else 'the job runs'} on")
        note(f"to end {'them' if len(taken) > 1 else 'it'}: cotenant cancel {ids}")


def _print(jobs: Sequence[Job], as_json: bool, dry_run: bool, waited: bool) -> None:
    if as_json:
        now = time.time()
        views.print_json([views.job_view(job, now) for job in jobs])
    elif dry_run:
        print("the job would be taken" if len(jobs) == 1 else f"all {len(jobs)} jobs would be taken")
    elif not waited:
        for job in jobs:
            print(job.id)
    for job in jobs if not waited else ():
        if job.HasField("refusal") and job.refusal.code == "NEVER_FITS":
            note(f"note: {job.id} waits: {job.refusal.code}: {job.refusal.detail}")
    failed = [job for job in jobs if waited and phase_of(job) != Phase.SUCCEEDED]
    if failed:
        raise _failure(failed)


def _failure(failed: Sequence[Job]) -> CommandError:
    if len(failed) == 1:
        return CommandError(f"{failed[0].id} {ending(failed[0])}", code=ExitCode.FAILED)
    lines = [f"{job.id} {ending(job)}" for job in failed[:FAILED_SHOWN_MAX]]
    if len(failed) > FAILED_SHOWN_MAX:
        lines.append(f"and {len(failed) - FAILED_SHOWN_MAX:,} more")
    return CommandError(f"{len(failed)} jobs did not succeed", details=lines, code=ExitCode.FAILED)
