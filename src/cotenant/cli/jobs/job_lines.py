"""The phase of a job, how it ended and how a process of it ended, each on one line."""

from __future__ import annotations

from cotenant.cli import units, views
from cotenant.cli.jobs.list_jobs import where
from cotenant.cli.name_lookup import phase_of
from cotenant.core.model.lifecycle import ENDED, Phase
from cotenant.core.model.refusal import Code
from cotenant.v1.job_pb2 import Job


def phase_line(job: Job) -> str:
    """Return a job's phase, with its nodes or the reason to wait, on one line."""
    view = views.job_view(job, now=0.0)
    phase, place = view["phase"], where(view)
    if phase in ENDED:
        return outcome_line(job)
    if phase == Phase.QUEUED and view["reason"]:
        reason = view["reason"]
        return (
            "queued" if reason["code"] == Code.NOT_YET_CONSIDERED else f"queued: {reason['code']}: {reason['detail']}"
        )
    if phase in (Phase.STARTING, Phase.RUNNING):
        return f"{phase} on {place}"
    return f"{phase}: {place}" if place else str(phase)


def outcome_line(job: Job) -> str:
    """Return how a job ended, on one line.

    >>> from cotenant.v1.job_pb2 import Attempt, ExitStatus, JobPhase
    >>> exit = ExitStatus(code=3, rank=1, node_id="n2")
    >>> outcome_line(Job(phase=JobPhase.JOB_PHASE_FAILED, attempt=Attempt(number=1, exit=exit)))
    'failed: rank 1 on n2 exited with code 3'
    """
    phase = phase_of(job)
    if phase == Phase.SUCCEEDED:
        return f"succeeded after {units.short_seconds(views.run_seconds(job, 0.0))}"
    exit_text = exit_line(views.exit_view(job.attempt.exit)) if job.attempt.HasField("exit") else ""
    reason = job.phase_reason or job.attempt.message or exit_text
    return f"{phase}: {reason}" if reason and phase == Phase.FAILED else str(phase)


def exit_line(status: views.View) -> str:
    """Return how a process ended, as text.

    >>> exit_line({"code": 0, "signal": 9, "out_of_memory": True, "rank": 0, "node": "n1"})
    'rank 0 on n1 ran out of memory (signal 9)'
    """
    process = f"rank {status['rank']} on {status['node']}" if status["node"] else f"rank {status['rank']}"
    if status["out_of_memory"]:
        return f"{process} ran out of memory (signal {status['signal'] or 9})"
    if status["signal"]:
        return f"{process} was killed by signal {status['signal']}"
    return f"{process} exited with code {status['code']}"
