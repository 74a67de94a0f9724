"""`sbatch`: submits a batch script."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.outcome import CommandError, is_text
from cotenant.cli.slurm.job_spec import Script, Submission, submission_of
from cotenant.cli.slurm.options import (
    OPTIONS,
    Given,
    merged,
    read_arguments,
    read_directives,
    read_environment,
)
from cotenant.cli.slurm.outcome import FAILED, SlurmError, of_mesh, warn
from cotenant.cli.slurm.times import MINUTE
from cotenant.cli.slurm.users import user_name
from cotenant.codec.times import seconds, timestamp
from cotenant.core.model.job_number import number_of
from cotenant.v1.job_pb2 import (
    DEPENDENCY_CONDITION_AFTER,
    JOB_PHASE_QUEUED,
    JOB_PHASE_RUNNING,
    JOB_PHASE_STARTING,
    JOB_PHASE_STOPPING,
    JOB_PHASE_SUSPENDED,
    JobSpec,
)
from cotenant.v1.job_service_pb2 import CreateJobRequest, JobFilter, ListJobsRequest

NAME = "sbatch"
STRICT = "COTENANT_SLURM_STRICT"  # refuse what is not followed, instead of warning
SUBMISSION_FAILED = "Batch job submission failed: "
LIVE = (
    JOB_PHASE_QUEUED,
    JOB_PHASE_STARTING,
    JOB_PHASE_RUNNING,
    JOB_PHASE_STOPPING,
    JOB_PHASE_SUSPENDED,
)
HELP = """\
Usage: sbatch [OPTIONS(0)...] [ : [OPTIONS(N)...]] script(0) [args(0)...]

Submits a batch script to Cotenant. Options may also be in #SBATCH lines of the script, and in SBATCH_ variables.
Followed: {followed}.
Known, but not followed; sbatch warns of them, and refuses them with --strict or COTENANT_SLURM_STRICT=1:
{told}."""


def main(words: Sequence[str]) -> int:
    """Submit a batch script and return the exit code.

    Raises:
        SlurmError: the script or an option is invalid, or the mesh refuses the job.
        CommandError: the mesh cannot be reached.
    """
    given, rest = read_arguments(NAME, words)
    if "help" in given or "usage" in given:
        print(help_text())
        return 0
    submission, options = prepare(given, rest)
    job_id = submit(submission, test_only="test-only" in options)
    if "test-only" in options:
        shape = submission.shape
        print(
            f"sbatch: Job {number_of(job_id) if job_id else 0} to start using {shape.tasks} processors", file=sys.stderr
        )
        return 0
    _print_accepted(job_id, options)
    return _wait(job_id) if "wait" in options else 0


def prepare(given: Given, rest: Sequence[str]) -> tuple[Submission, Given]:
    """Return the job of a command line's options and other words, and all options of command line and script.

    Raises:
        SlurmError: the script or an option is invalid.
    """
    script = _script(given, rest)
    directives, unknown = read_directives(script.text) if "wrap" not in given else ({}, [])
    options = merged(directives, read_environment(os.environ), given)
    tell_unfollowed(NAME, options, unknown)
    quiet = "quiet" in options
    submission = submission_of(options, script, user_name(), lambda text: None if quiet else warn(NAME, text))
    return submission, options


def help_text() -> str:
    """Return the help."""
    followed = [f"--{name}" for name, option in OPTIONS.items() if not option.meaning]
    told = [f"--{name} ({option.meaning})" for name, option in OPTIONS.items() if option.meaning]
    return HELP.format(followed=", ".join(followed), told=", ".join(told))


def _print_accepted(job_id: str, options: Given) -> None:
    number = number_of(job_id)
    if "parsable" in options:
        print(number)
    elif "quiet" not in options:
        print(f"Submitted batch job {number}")


def _script(given: Given, rest: Sequence[str]) -> Script:
    """Return the script to submit.

    Raises:
        SlurmError: it cannot be read, or is no script.
    """
    if "wrap" in given:
        if rest:
            raise SlurmError("Script arguments not permitted with --wrap option")
        return Script(f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{given['wrap']}\n", "wrap")
    if rest and rest[0] != "-":
        name, arguments = os.path.basename(rest[0]), rest[1:]
        try:
            with open(rest[0], encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
        except OSError:
            raise SlurmError(f"Unable to open file {rest[0]}") from None
    else:
        text, name, arguments = sys.stdin.read(), NAME, rest[1:]
    check_script(text)
    return Script(text, name, arguments)


def check_script(text: str) -> None:
    """Check that a text is a batch script.

    Raises:
        SlurmError: it is not.
    """
    if not text.strip():
        raise SlurmError("Batch script is empty!")
    if not text.startswith("#!"):
        raise SlurmError(
            "This does not look like a batch script.  The first",
            "line must start with #! followed by the path to an interpreter.",
            "For instance: #!/bin/sh",
        )
    if "\r\n" in text:
        raise SlurmError(
            "Batch script contains DOS line breaks (\\r\\n)", "instead of expected UNIX line breaks (\\n)."
        )
    if "\0" in text or not is_text(text):
        raise SlurmError("The script is not UTF-8 text.")


def tell_unfollowed(command: str, options: Given, unknown: Sequence[str]) -> None:
    """Name the options that are not followed, in one warning.

    Raises:
        SlurmError: there are some, and the caller is strict.
    """
    told = [
        f"--{name}{f'={value}' if value else ''} ({OPTIONS[name].meaning})"
        for name, value in options.items()
        if OPTIONS[name].meaning
    ]
    told += [f"{word} (no option of Slurm)" for word in unknown]
    if not told:
        return
    text = f"not followed by Cotenant: {', '.join(told)}"
    if "strict" in options or os.environ.get(STRICT, "0") not in ("", "0"):
        raise SlurmError(text)
    if "quiet" not in options:
        warn(command, text)


def submit(submission: Submission, *, test_only: bool = False) -> str:
    """Submit a job or array, and return its id.

    Raises:
        SlurmError: the mesh refuses it, or cannot be reached.
    """
    spec, request_id = submission.spec, os.urandom(16).hex()

    async def work(mesh: Mesh) -> Any:
        if submission.singleton:
            wanted = JobFilter(own_only=True, name=spec.name, phases=LIVE)
            earlier = await mesh.jobs.ListJobs(ListJobsRequest(filter=wanted, page_size=1000))
            for job_id in dict.fromkeys(job.spec.array_task.array_id or job.id for job in earlier.jobs):
                spec.dependencies.add(id=job_id, condition=DEPENDENCY_CONDITION_AFTER)
        for job_id, minutes in submission.delays:
            await _delay(mesh, spec, job_id, minutes)
        if not spec.HasField("array"):
            request = CreateJobRequest(spec=spec, request_id=request_id, validate_only=test_only)
            return (await mesh.jobs.CreateJob(request)).job
        from cotenant.v1.array_service_pb2 import CreateArrayRequest

        whole = CreateArrayRequest(spec=spec, request_id=request_id, validate_only=test_only)
        return (await mesh.arrays.CreateArray(whole)).array

    try:
        return str(with_mesh(Flags(), work, unary=True).id)
    except CommandError as error:
        raise of_mesh(error, SUBMISSION_FAILED) from None


def _wait(job_id: str) -> int:
    """Wait until a job, or all jobs of an array, have ended; return the exit code."""
    from cotenant.cli.slurm.waiting import wait_for

    return FAILED if any(code for code in wait_for(job_id)) else 0


async def _delay(mesh: Mesh, spec: JobSpec, job_id: str, minutes: int) -> None:
    """Set the earliest start of a job: some minutes after the start of another job, or of all tasks of an array.

    Raises:
        SlurmError: the other has not started, so the time is unknown.
    """
    from cotenant.cli.slurm.finding import find_one  # few jobs have a delay

    failed = f"{SUBMISSION_FAILED}Job dependency problem: "
    starts = [seconds(job.attempt.start_time) for job in await find_one(mesh, job_id, failed)]
    if not all(starts):
        raise SlurmError(
            f"{failed}after:{number_of(job_id)}+{minutes}: the job has not started; here a delay is counted from the "
            "start of a job that runs or has ended",
            "hint: submit it then, or use --begin",
        )
    begin = max(starts) + minutes * MINUTE
    if begin > max(time.time(), seconds(spec.begin_time)):
        spec.begin_time.CopyFrom(timestamp(begin))
