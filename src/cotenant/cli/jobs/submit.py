"""`cotenant submit`: submit jobs from files or options, and optionally wait for them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from cotenant.cli import units
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, command_error, exit_code, is_unreachable, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.bell import Bell
from cotenant.cli.jobs.default_targets import with_default_targets, without_targets
from cotenant.cli.jobs.job_file import AUTO_UPLOAD, BadJobs, Draft, Mistake
from cotenant.cli.jobs.job_options import read_drafts, with_job_options
from cotenant.cli.jobs.submit_directory import current_directory
from cotenant.cli.jobs.submit_order import Step, order_steps
from cotenant.cli.jobs.user_defaults import read_user_defaults
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.source_positions import MapNode
from cotenant.codec.errors import Problem, from_error
from cotenant.core.model.notification import REDACTED
from cotenant.deferred import grpc
from cotenant.v1.array_service_pb2 import Array, CreateArrayRequest, CreateArrayResponse
from cotenant.v1.job_pb2 import Job, JobSpec
from cotenant.v1.job_service_pb2 import CreateJobRequest, CreateJobResponse


def register(app: typer.Typer) -> None:
    """Add the command."""
    from cotenant.cli.lazy import TailCommand  # derived from typer's

    app.command("submit", cls=TailCommand)(with_job_options(submit))


def submit(
    context: typer.Context,
    job: MapNode,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Job files; - is stdin.", show_default=False)
    ] = None,
    like: Annotated[
        str,
        typer.Option(
            metavar="ID",
            help="Submit a job like this earlier one, changed by the options; see `cotenant rerun`.",
            autocompletion=options.complete_job,
        ),
    ] = "",
    example: Annotated[bool, typer.Option("--example", help="Print a commented job file and exit.")] = False,
    empty_workdir: Annotated[
        bool, typer.Option("--empty-workdir", help="Start in an empty folder instead of the current one.")
    ] = False,
    git: Annotated[
        str,
        typer.Option(
            metavar="URL[@REF]", help="Check out a branch, tag or commit of a git repository here, and upload that."
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check whether the jobs are valid.")] = False,
    request_id: Annotated[
        str, typer.Option(metavar="KEY", help="Idempotency key: a retry with the same key creates no second job.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the jobs and print their output; exit 0 if all succeed.")
    ] = False,
    following: Annotated[bool, typer.Option("--follow", "-f", help="Like --wait, but stream the output.")] = False,
    no_bell: Annotated[bool, typer.Option("--no-bell", help="Do not ring the terminal's bell after --wait.")] = False,
    no_notify: Annotated[
        bool, typer.Option("--no-notify", help="Notify nobody, whatever files and your configuration say.")
    ] = False,
    every: Annotated[
        str,
        typer.Option(
            "--every",
            metavar="WHEN",
            help="Submit the job again and again: '0 3 * * MON-FRI', @daily, or 6h; see `cotenant schedules`.",
        ),
    ] = "",
    time_zone: Annotated[
        str,
        typer.Option("--time-zone", metavar="ZONE", help="Time zone of --every, such as Europe/Berlin; default: UTC."),
    ] = "",
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="skip|queue|replace",
            help="While an earlier job of --every has not ended: skip the new one (default), queue it, or replace the "
            "earlier one.",
        ),
    ] = "",
    as_json: options.AsJson = False,
) -> None:
    """Submit jobs from files, or one job from options, and print their ids.

    A job starts in the current folder, with your PATH and Python environment, on every node that has
    this folder: on this machine, or through a shared file system. On other nodes it starts in an empty
    folder. --upload . takes the folder along to every node; --workdir names another folder of the nodes,
    and --workdir none an empty one. --env-from names the Python environment to use on every node, or none.

    Options override the fields of each job in the files. All jobs are validated before the first is submitted. --array
    runs a job once per index; --after and --after-ok make it wait for other jobs, --begin for a time, and --hold until
    `cotenant resume`. --notify sends a word when a job has ended, if the mesh has notifications; `notify` in
    ~/.config/cotenant/config.toml does so for all your jobs.

    \b
    Examples:
      cotenant submit --gpus 1 --wait -- python3 train.py --epochs 90
      cotenant submit --cpus 4 --memory 8GiB --env DATA=/data -- ./preprocess
      cotenant submit --env-file prod.env --env-from conda -- python train.py
      cotenant submit --upload . -- python3 train.py; cotenant cp @last:out .
      cotenant submit --upload auto --gpus 1 -- python3 train.py
      cotenant submit --git https://github.com/ada/train@v1.2 -- python3 train.py
      cotenant submit --example > job.yaml
      cotenant submit job.yaml --tenant vision
      cotenant submit --array 0-99%10 --cpus 1 -- ./sweep
      cotenant submit --after-ok ID -- python3 evaluate.py
      cotenant submit --after fail:ID,ok:OTHER -- ./report-failure
      cotenant submit --begin 17:30 --gpus 1 -- python3 train.py
      cotenant submit --hold --gpus 1 -- python3 train.py; cotenant resume @last
      cotenant submit --deadline 3h --objective-check require -- ./train
      cotenant submit --gpus 1 --notify mailto:ada@example.org -- ./train
      cotenant submit --every "0 3 * * *" --name report --cpus 2 -- ./report
      cotenant submit --like ID --gpus 2 --time 4h
    """
    if example:
        print(example_text(), end="")
        return
    if len(request_id) > units.REQUEST_ID_LENGTH_MAX:
        raise usage_error(
            f"--request-id must have at most {units.REQUEST_ID_LENGTH_MAX} characters, not {len(request_id)}"
        )
    if like and (files or git):
        raise usage_error("--like takes neither job files nor --git", hint="change the earlier job with options")
    defaults = read_user_defaults(os.environ)
    if like:
        from cotenant.cli.jobs.earlier_job import find_draft  # few jobs repeat another

        draft = find_draft(Flags.of(context), like, job)
        nowhere = empty_workdir or draft.empty_workdir
        drafts = [replace(draft, spec=draft.spec.without_folder()) if nowhere else draft]
    else:
        folder = None if empty_workdir else current_directory(os.environ)
        drafts = [draft.submitted_from(folder, os.environ) for draft in read_drafts(files or [], job, time.time())]
        drafts = drafts if no_notify else with_default_targets(drafts, defaults)
    if not like or "upload" in {key.text for key, _ in job.entries}:  # else it has the earlier job's folder already
        drafts = _with_folders(Flags.of(context), git, drafts, dry_run)
    drafts = without_targets(drafts) if no_notify else drafts
    bell = Bell(wanted=defaults.bell and not no_bell)
    if every or time_zone or overlap:
        from cotenant.cli.jobs.schedule_create import create_schedule  # few jobs recur

        _check_waits_not(every, wait or following)
        when = every, time_zone, overlap
        create_schedule(Flags.of(context), drafts, when, request_id, dry_run, as_json, (resolve_ids, rejection))
        return
    steps = order_steps(drafts)
    if following and (len(steps) > 1 or steps[0].draft.spec.array):
        raise usage_error(
            "--follow takes one job", hint="use --wait for several jobs; it prints each output at the end"
        )
    accepted: list[Job | Array] = []
    try:
        with_mesh(Flags.of(context), lambda mesh: submit_steps(mesh, steps, request_id, dry_run, accepted), unary=True)
        _warn_of_objectives(accepted)
        if wait or following:
            from cotenant.cli.jobs.submit_wait import wait_for  # streams need far more modules than a call

            accepted[:] = with_mesh(Flags.of(context), lambda mesh: wait_for(mesh, accepted, following, quiet=as_json))
            bell.ring()
    except KeyboardInterrupt:
        _note_jobs_continue(accepted, dry_run, "no longer waiting")
        raise
    except CommandError as error:
        if error.code == ExitCode.UNREACHABLE:
            _note_jobs_continue(accepted, dry_run, "no longer waiting: the mesh is unreachable")
        raise
    print_accepted(accepted, as_json, dry_run, waited=wait or following)


def _check_waits_not(every: str, waits: bool) -> None:
    if every and waits:
        raise usage_error("--every cannot be combined with --wait and --follow")


def _with_folders(flags: Flags, git: str, drafts: list[Draft], dry_run: bool) -> list[Draft]:
    if not git:
        return upload_folders(flags, drafts, dry_run)
    from cotenant.cli.jobs.git_checkout import checked_out  # few jobs are of a repository

    with checked_out(git, drafts) as found:
        return upload_folders(flags, found, dry_run)


def upload_folders(flags: Flags, drafts: list[Draft], dry_run: bool) -> list[Draft]:
    """Upload the folders that jobs take along, and return the jobs with their ids."""
    if not any(draft.spec.upload for draft in drafts):
        return drafts
    from cotenant.cli.jobs.folder_choice import choose, unchosen
    from cotenant.cli.jobs.folder_upload import Uploads  # most jobs have none

    if any(draft.spec.upload == AUTO_UPLOAD for draft in drafts):
        auto = drafts
        drafts = unchosen(auto) if dry_run else with_mesh(flags, lambda mesh: choose(mesh, auto))
    uploads = Uploads(drafts)
    return uploads.dry(drafts) if dry_run else with_mesh(flags, lambda mesh: uploads.upload(mesh, drafts))


def example_text() -> str:
    """Return a job file with every field, commented."""
    from importlib.resources import files as resources

    return resources("cotenant.cli.jobs").joinpath("example.yaml").read_text(encoding="utf-8")


async def submit_steps(
    mesh: Mesh, steps: Sequence[Step], request_id: str, dry_run: bool, accepted: list[Job | Array]
) -> None:
    """Submit the jobs one by one, and collect them in `accepted` in file order; several are all checked first."""
    steps = await resolve_ids(mesh, steps)
    if dry_run or len(steps) > 1:
        checked = await _check(mesh, steps)
        if dry_run:
            accepted += checked
            return
    made: dict[int, Job | Array] = {}
    for step in steps:
        own_id = f"{request_id}:{step.number}" if request_id and len(steps) > 1 else request_id
        spec = step.spec({number: job.id for number, job in made.items()})
        try:
            made[step.number] = await create(mesh, step.draft.to_wire(spec), request_id=own_id, like=step.draft.like)
        except grpc.aio.AioRpcError as error:
            if accepted:
                note(f"already submitted: {' '.join(job.id for job in accepted)}")
            raise rejection([(step.draft, from_error(error))]) from error
        accepted[:] = [made[number] for number in sorted(made)]


async def create(
    mesh: Mesh, spec: JobSpec, *, request_id: str = "", validate_only: bool = False, like: str = ""
) -> Job | Array:
    """Create a job, or an array if the spec has indices; return it as accepted.

    `like` is the id of one that it repeats. Of this one's notifications, those that are no longer known are left out.
    """
    try:
        return await _create(mesh, spec, request_id, validate_only, like)
    except grpc.aio.AioRpcError as error:
        lost = _lost_targets(spec, from_error(error)) if like else []
        if not lost:
            raise
    for target in lost:
        note(f"{like}: its notification to {target} is not repeated; give it again with --notify")
        spec.notify.remove(target)
    return await _create(mesh, spec, request_id, validate_only, like)


def _lost_targets(spec: JobSpec, problem: Problem) -> list[str]:
    """Return the redacted targets because of which a job was refused; empty if there is another reason as well."""
    redacted = {f"spec.notify[{index}]": one for index, one in enumerate(spec.notify) if REDACTED in one}
    fields = [violation.field for violation in problem.violations]
    return [redacted[field] for field in fields] if all(field in redacted for field in fields) else []


async def _create(mesh: Mesh, spec: JobSpec, request_id: str, validate_only: bool, like: str) -> Job | Array:
    if spec.HasField("array"):
        array_request = CreateArrayRequest(spec=spec, request_id=request_id, validate_only=validate_only, like=like)
        array_made: CreateArrayResponse = await mesh.arrays.CreateArray(array_request)
        return array_made.array
    request = CreateJobRequest(spec=spec, request_id=request_id, validate_only=validate_only, like=like)
    job_made: CreateJobResponse = await mesh.jobs.CreateJob(request)
    return job_made.job


async def resolve_ids(mesh: Mesh, steps: Sequence[Step]) -> list[Step]:
    """Return steps with dependencies resolved to full ids; users may write a prefix or a suffix.

    Raises:
        BadJobs: names every dependency that was not found.
    """
    if not any(step.others() for step in steps):
        return list(steps)
    from cotenant.cli.jobs.job_fields import AFTER_CONDITIONS
    from cotenant.cli.name_lookup import find_job_or_array

    ids: dict[str, str] = {}
    mistakes: list[Mistake] = []
    resolved = []
    for step in steps:
        for place, text in step.others():
            try:
                ids[text] = ids.get(text) or (await find_job_or_array(mesh, text)).id
            except CommandError as error:
                hint = f"; {error.hint}" if error.hint else ""
                if ":" in text:
                    hint += f"; the conditions before a colon are {', '.join(AFTER_CONDITIONS)}"
                mistakes.append(step.draft.mistake(f"spec.dependencies[{place}].id", f"{error.message}{hint}"))
        resolved.append(step.with_ids({place: ids[text] for place, text in step.others() if text in ids}))
    if mistakes:
        raise BadJobs("the submission", mistakes)
    return resolved


async def _check(mesh: Mesh, steps: Sequence[Step]) -> list[Job | Array]:
    """Validate each job on the server without submitting it.

    Raises:
        CommandError: names every invalid job.
    """
    checked: list[Job | Array] = []
    problems: list[tuple[Draft, Problem]] = []
    for step in steps:
        try:
            spec = step.draft.to_wire(step.spec({}))
            checked.append(await create(mesh, spec, validate_only=True, like=step.draft.like))
        except grpc.aio.AioRpcError as error:
            if is_unreachable(error.code()):
                raise
            problems.append((step.draft, from_error(error)))
    if problems:
        raise rejection(problems)
    return checked


def rejection(problems: Sequence[tuple[Draft, Problem]]) -> CommandError:
    """Return an error that explains why jobs are rejected, with the positions of their fields."""
    mistakes = [
        draft.mistake(violation.field, violation.description)
        for draft, problem in problems
        for violation in problem.violations
    ]
    if mistakes and all(problem.violations and exit_code(problem.code) is ExitCode.USAGE for _, problem in problems):
        return BadJobs("the submission", sorted(mistakes, key=lambda mistake: mistake.place))
    if len(problems) == 1:
        return command_error(problems[0][1])
    plain = [
        f"{draft.place}: {command_error(problem).message}" for draft, problem in problems if not problem.violations
    ]
    worst = max(exit_code(problem.code) for _, problem in problems)
    return CommandError(f"{len(problems)} jobs were rejected", details=[*map(str, mistakes), *plain], code=worst)


def _note_jobs_continue(accepted: Sequence[Job | Array], dry_run: bool, why: str) -> None:
    """Print a note that the jobs continue although the command stops waiting."""
    if accepted and not dry_run:
        ids = " ".join(job.id for job in accepted)
        note(f"{why}; {'the jobs continue' if len(accepted) > 1 else 'the job continues'}")
        note(f"cancel {'them' if len(accepted) > 1 else 'it'} with: cotenant cancel {ids}")


def _warn_of_objectives(accepted: Sequence[Job | Array]) -> None:
    """Warn of the objectives that accepted jobs are not expected to keep."""
    for job in accepted:
        if isinstance(job, Job) and job.submitted_objectives:
            from cotenant.cli.objective_views import warnings_of  # few jobs have objectives

            for line in warnings_of(job.submitted_objectives):
                note(f"warning: {job.id or job.spec.name or 'the job'}: {line}")


def print_accepted(accepted: Sequence[Job | Array], as_json: bool, dry_run: bool, waited: bool) -> None:
    """Print the ids of accepted jobs, or the jobs as JSON."""
    jobs = [one for one in accepted if isinstance(one, Job)]
    if as_json:
        from cotenant.cli import views

        now = time.time()
        views.print_json([views.job_or_array_view(one, now) for one in accepted])
    elif dry_run:
        print("the job is valid" if len(accepted) == 1 else f"all {len(accepted)} jobs are valid")
    elif not waited:
        for one in accepted:
            print(one.id)
    for job in jobs if not waited else ():
        if job.HasField("refusal") and job.refusal.code == "NEVER_FITS":
            note(f"note: {job.id} waits: {job.refusal.code}: {job.refusal.detail}")
    if waited:
        from cotenant.cli.jobs.submit_wait import check_outcomes

        check_outcomes(jobs)
