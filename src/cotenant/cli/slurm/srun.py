"""`srun`: runs a command as a job and prints its output; within a job, runs it once for each task."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cotenant.cli.slurm.job_spec import SHELL, Script, srun_program, submission_of
from cotenant.cli.slurm.options import Given, merged, read_arguments, read_environment
from cotenant.cli.slurm.outcome import SlurmError, warn
from cotenant.cli.slurm.sbatch import help_text, submit, tell_unfollowed
from cotenant.cli.slurm.users import user_name
from cotenant.core.model.job_number import number_of
from cotenant.v1.job_pb2 import JOB_PHASE_QUEUED, JOB_PHASE_RUNNING, Job

NAME = "srun"
IN_JOB = ("SLURM_JOB_ID", "COTENANT_JOB_ID")
SCRIPT = '#!/bin/sh\nexec srun "$@"\n'
NOWHERE = "/dev/null"  # the output of the job itself, which its log has
OF_TASKS = ("output", "error")


def main(words: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Raises:
        SlurmError: an option is invalid, or the mesh refuses the job.
    """
    if all(variable in os.environ for variable in IN_JOB):
        sys.stdout.flush()
        os.execv(SHELL, [SHELL, "-c", srun_program(), NAME, *words])
    given, command = read_arguments(NAME, words)
    if "help" in given or "usage" in given:
        print(help_text().replace("sbatch", NAME))
        return 0
    if not command:
        raise SlurmError("No command given to execute.")
    options = merged(read_environment(os.environ), given)
    tell_unfollowed(NAME, options, [])
    job_id = submit(submission_of(*_job(options, command), user_name(), lambda text: warn(NAME, text)))
    return _follow(job_id)


def _job(options: Given, command: Sequence[str]) -> tuple[Given, Script]:
    """Return the job that runs the command: a script that runs it once for each task."""
    of_tasks = [f"--{name}={options[name]}" for name in OF_TASKS if name in options]
    kept = {name: value for name, value in options.items() if name not in (*OF_TASKS, "array", "wrap")}
    script = Script(SCRIPT, os.path.basename(command[0]), [*of_tasks, "--", *command])
    return {**kept, "output": NOWHERE}, script


def _follow(job_id: str) -> int:
    """Print the output of the job, and cancel it at Ctrl-C."""
    from cotenant.cli.slurm.waiting import exit_code_of, follow_job

    number, waited = number_of(job_id), [False]

    def on_change(job: Job) -> None:
        if job.phase == JOB_PHASE_QUEUED and job.HasField("refusal") and not waited[0]:
            waited[0] = True
            print(f"srun: job {number} queued and waiting for resources", file=sys.stderr)
        elif job.phase == JOB_PHASE_RUNNING and waited[0]:
            waited[0] = False
            print(f"srun: job {number} has been allocated resources", file=sys.stderr)

    try:
        return exit_code_of(follow_job(job_id, on_change))
    except KeyboardInterrupt:
        from cotenant.cli.slurm.scancel import main as cancel

        cancel([str(number)])
        raise
