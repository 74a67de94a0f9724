"""`cotenant explain`: why a job is in its state, what would change it, and when it will probably start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from cotenant.cli import units, views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.estimate_view import estimate_card, estimate_view
from cotenant.cli.name_lookup import find_job, phase_of
from cotenant.cli.outcome import sanitize
from cotenant.cli.render import Column, plain_lines, print_card
from cotenant.codec.job_events import kind_of
from cotenant.codec.specs import seconds
from cotenant.core.model.lifecycle import ENDED
from cotenant.v1.job_service_pb2 import ExplainJobRequest, ExplainJobResponse, JobAhead

EVENTS = (Column("AGE", right=True), Column("EVENT"), Column("DETAIL"))


AWAITED = {  # what a job waits for that waits for neither resources nor another job
    "ARRAY_LIMIT": "the limit of its array",
    "BACK_OFF": "its next try",
    "BEGIN_TIME": "its begin time",
    "SECRETS": "a secret of its tenant",
    "SUSPENDED": "being resumed",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(context: typer.Context, job_id: options.JobId, as_json: options.AsJson = False) -> None:
    """Explain why a job is in its state, what would change it, and when it will probably start.

    \b
    Example:
      cotenant explain ID
    """

    async def work(mesh: Mesh) -> Any:
        job = await find_job(mesh, job_id)
        return await mesh.jobs.ExplainJob(ExplainJobRequest(id=job.id))

    answer = with_mesh(Flags.of(context), work, unary=True)
    now = time.time()
    if as_json:
        views.print_json(explanation_view(answer, now))
        return
    print(sanitize(answer.summary))
    print_card(_card(answer))
    if answer.events:
        print()
        rows = [
            [_ago(now - seconds(event.time)), kind_of(event).replace("_", " "), sanitize(event.detail)]
            for event in answer.events
        ]
        print("\n".join(plain_lines(EVENTS, rows)))


def explanation_view(answer: ExplainJobResponse, now: float) -> views.View:
    """Return the explanation as `--json` prints it."""
    return {
        "job": views.job_view(answer.job, now),
        "summary": answer.summary,
        "position": answer.position or None,
        "waiting": answer.waiting,
        "queue_policy": answer.queue_policy,
        "level": answer.level,
        "score": answer.score,
        "votes": {one.name: one.value for one in answer.votes},
        "sizing": answer.sizing,
        "estimate": estimate_view(answer.estimate) if answer.HasField("estimate") else None,
        "wait": views.wait_of(answer.job),
        "forecast": views.forecast_view(answer.forecast) if answer.HasField("forecast") else None,
        "outlook": answer.outlook or None,
        "ahead": [views.ahead_view(one) for one in answer.ahead],
        "ahead_count": answer.ahead_count,
        "ending": [views.ahead_view(one) for one in answer.ending],
        "events": [
            {"time": views.time_of(event, "time"), "kind": kind_of(event), "detail": event.detail}
            for event in answer.events
        ],
    }


def _card(answer: ExplainJobResponse) -> Iterator[tuple[str, str]]:
    refusal = answer.job.refusal
    if answer.job.HasField("refusal") and refusal.detail not in answer.summary:
        yield "reason", f"{refusal.code}: {refusal.detail}"
    if answer.job.HasField("refusal") and refusal.remedy not in answer.summary:
        yield "remedy", refusal.remedy
    if wait := views.wait_of(answer.job):
        read = views.refusal_of(refusal)
        wanted = f", at topology level {read.locality}" if read and read.locality else ""
        yield "waits for", AWAITED.get(refusal.code, wait.replace("_", " ")) + wanted
    if answer.position:
        score = f", level {answer.level}, score {answer.score:.10g} by {answer.queue_policy}"
        yield "position", f"{answer.position} of {answer.waiting} waiting jobs{score if answer.queue_policy else ''}"
    for vote in answer.votes:
        yield "ordered by", f"{vote.name}: {vote.value:.6g}"
    if answer.objectives:
        from cotenant.cli.objective_views import objective_lines, objective_view  # few jobs have objectives

        yield from (("objective", line) for line in objective_lines(map(objective_view, answer.objectives)))
    yield "outlook", answer.outlook
    yield from ahead_lines("ahead", answer.ahead, answer.ahead_count)
    yield from ahead_lines("waits for end of", answer.ending, answer.forecast.ending_count)
    yield "cores", answer.sizing
    if answer.HasField("estimate") and phase_of(answer.job) not in ENDED:
        yield from estimate_card(estimate_view(answer.estimate))


def ahead_lines(title: str, jobs: Sequence[JobAhead], count: int) -> Iterator[tuple[str, str]]:
    """Yield a line for each job that another job waits for or would delay, then how many more there are."""
    for job in jobs:
        name = f" ({job.name})" if job.name else ""
        later = f", {units.short_seconds(seconds(job.later))} later" if job.HasField("later") else ""
        yield title, f"{job.job_id}{name}: {job.needs}{later}"
    if count > len(jobs):
        yield title, f"… and {count - len(jobs)} more"


def _ago(seconds: float) -> str:
    return f"{units.short_seconds(seconds)} ago"
