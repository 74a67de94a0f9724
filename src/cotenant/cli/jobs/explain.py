"""`cotenant explain`: why a job stands where it stands."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from cotenant.cli import options, units, views
from cotenant.cli.connection import Mesh, reach
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.estimate_view import estimate_card, estimate_view
from cotenant.cli.name_lookup import find_job, phase_of
from cotenant.cli.outcome import harmless
from cotenant.cli.render import Column, plain_lines, print_card
from cotenant.codec.specs import seconds
from cotenant.core.model.lifecycle import ENDED
from cotenant.v1.job_service_pb2 import ExplainJobRequest, ExplainJobResponse, JobAhead

EVENTS = (Column("SINCE", right=True), Column("WHAT"), Column("DETAIL"))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(context: typer.Context, job_id: options.JobId, as_json: options.AsJson = False) -> None:
    """Tell why a job stands where it stands, what would change it, and when it will probably start.

    \b
    Example:
      cotenant explain ID
    """

    async def work(mesh: Mesh) -> Any:
        job = await find_job(mesh, job_id)
        return await mesh.jobs.ExplainJob(ExplainJobRequest(id=job.id))

    told = reach(Flags.of(context), work)
    now = time.time()
    if as_json:
        views.print_json(explained_view(told, now))
        return
    print(harmless(told.summary))
    print_card(_card(told))
    if told.events:
        print()
        rows = [[_ago(now - seconds(event.time)), event.what, harmless(event.detail)] for event in told.events]
        print("\n".join(plain_lines(EVENTS, rows)))


def explained_view(told: ExplainJobResponse, now: float) -> views.View:
    """Tell the same for programs."""
    return {
        "job": views.job_view(told.job, now),
        "summary": told.summary,
        "position": told.position or None,
        "waiting": told.waiting,
        "queue_policy": told.queue_policy,
        "level": told.level,
        "score": told.score,
        "sizing": told.sizing,
        "estimate": estimate_view(told.estimate) if told.HasField("estimate") else None,
        "wait": views.wait_of(told.job),
        "forecast": views.forecast_view(told.forecast) if told.HasField("forecast") else None,
        "outlook": told.outlook or None,
        "ahead": [views.ahead_view(one) for one in told.ahead],
        "ahead_count": told.ahead_count,
        "ending": [views.ahead_view(one) for one in told.ending],
        "events": [
            {"time": views.time_of(event, "time"), "what": event.what, "detail": event.detail} for event in told.events
        ],
    }


def _card(told: ExplainJobResponse) -> Iterator[tuple[str, str]]:
    refusal = told.job.refusal
    if told.job.HasField("refusal") and refusal.detail not in told.summary:
        yield "reason", f"{refusal.code}: {refusal.detail}"
    if told.job.HasField("refusal") and refusal.remedy not in told.summary:
        yield "remedy", refusal.remedy
    if wait := views.wait_of(told.job):
        read = views.refusal_of(refusal)
        wanted = f", wanted at the level {read.locality}" if read and read.locality else ""
        yield "waits for", wait.replace("_", " ") + wanted
    if told.position:
        policy = f", level {told.level}, score {told.score:.10g} by {told.queue_policy}" if told.queue_policy else ""
        yield "position", f"{told.position} of {told.waiting} that wait{policy}"
    yield "outlook", told.outlook
    yield from ahead_card("ahead", told.ahead, told.ahead_count)
    yield from ahead_card("waits for end", told.ending, told.forecast.ending_count)
    yield "cores", told.sizing
    if told.HasField("estimate") and phase_of(told.job) not in ENDED:
        yield from estimate_card(estimate_view(told.estimate))


def ahead_card(title: str, some: Sequence[JobAhead], count: int) -> Iterator[tuple[str, str]]:
    """Name jobs that matter to another one, a line each, and how many more there are."""
    for job in some:
        name = f" ({job.name})" if job.name else ""
        later = f", {units.short_seconds(seconds(job.later))} later" if job.HasField("later") else ""
        yield title, f"{job.job_id}{name}: {job.needs}{later}"
    if count > len(some):
        yield title, f"… and {count - len(some)} more"


def _ago(seconds: float) -> str:
    return f"{units.short_seconds(seconds)} ago"
