"""`cotenant whatif`: what would happen to jobs if they were submitted now."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Annotated, Any

from cotenant.cli import views
from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.estimate_view import estimate_card, estimate_view
from cotenant.cli.jobs.explain import ahead_lines
from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.jobs.job_options import read_whatif_drafts, with_job_options
from cotenant.cli.jobs.show import held_resources
from cotenant.cli.jobs.submit import create, rejection, resolve_ids
from cotenant.cli.jobs.submit_order import order_steps
from cotenant.cli.objective_views import objective_lines, objective_view
from cotenant.cli.render import print_card
from cotenant.cli.source_positions import MapNode
from cotenant.codec.errors import Problem, from_error
from cotenant.deferred import grpc
from cotenant.v1.job_service_pb2 import SimulateJobRequest, SimulateJobResponse


def register(app: typer.Typer) -> None:
    """Add the command."""
    from cotenant.cli.lazy import TailCommand  # derived from typer's

    app.command("whatif", cls=TailCommand)(with_job_options(whatif))


def whatif(
    context: typer.Context,
    job: MapNode,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Job files; - is stdin.", show_default=False)
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what would happen to jobs if they were submitted now; nothing is changed.

    Shows whether and where they would start at once, or why and until about when they would wait; when they would
    finish; and which jobs they would preempt or delay. Several jobs, from one or more files, are treated as submitted
    together in this order.

    \b
    Examples:
      cotenant whatif job.yaml
      cotenant whatif --gpus 8 --locality server -- python3 train.py
    """
    drafts = read_whatif_drafts(files or [], job, time.time())
    answers = with_mesh(Flags.of(context), lambda mesh: _simulated(mesh, drafts))
    if as_json:
        views.print_json([answer_view(draft.spec.name, answer) for draft, answer in zip(drafts, answers, strict=True)])
        return
    alone = len(drafts) == 1
    for draft, answer in zip(drafts, answers, strict=True):
        print_card(
            [
                *_card(answer_view(draft.spec.name, answer), answer),
                *(_effects_on_others(answer) if alone else ()),
                *_places(answer),
            ]
        )
        if not alone:
            print()
    if not alone:
        print_card(_effects_on_others(answers[0]))


async def _simulated(mesh: Mesh, drafts: list[Draft]) -> list[SimulateJobResponse]:
    """Return the answers for all jobs, simulated together; only dependencies on existing jobs count."""
    steps = sorted(await resolve_ids(mesh, order_steps(drafts)), key=lambda step: step.number)
    drafts = [replace(step.draft, spec=step.spec({})) for step in steps]
    first, *more = (draft.to_wire(draft.spec) for draft in drafts)
    try:
        answer: Any = await mesh.jobs.SimulateJob(SimulateJobRequest(spec=first, more=more))
    except grpc.aio.AioRpcError as error:
        problems = [problem async for problem in _problems(mesh, drafts)] if more else []
        raise rejection(problems or [(drafts[0], from_error(error))]) from error
    return [answer, *answer.more]


async def _problems(mesh: Mesh, drafts: list[Draft]) -> AsyncIterator[tuple[Draft, Problem]]:
    """Yield the jobs that would be rejected, with the reasons."""
    for draft in drafts:
        try:
            await create(mesh, draft.to_wire(draft.spec), validate_only=True)
        except grpc.aio.AioRpcError as error:
            yield draft, from_error(error)


def answer_view(name: str, answer: SimulateJobResponse) -> views.View:
    """Return the answer for a job of this name, as `--json` prints it."""
    return {
        "name": name,
        "starts_now": answer.starts_now,
        "position": answer.position or None,
        "allocations": [views.allocation_view(one) for one in answer.allocations],
        "outlook": answer.outlook or None,
        "objectives": [objective_view(one) for one in answer.objectives],
        "forecast": views.forecast_view(answer.forecast) if answer.HasField("forecast") else None,
        "ending": [views.ahead_view(one) for one in answer.ending],
        "preempted_job_ids": list(answer.preempted_job_ids),
        "delayed": [views.ahead_view(one) for one in answer.delayed],
        "delayed_count": answer.delayed_count,
        "reason": views.reason_view(answer.refusal) if answer.HasField("refusal") else None,
        "estimate": estimate_view(answer.estimate) if answer.HasField("estimate") else None,
    }


def _card(view: views.View, answer: SimulateJobResponse) -> Iterator[tuple[str, str]]:
    yield "name", view["name"]
    yield "starts now", "yes" if view["starts_now"] else "no"
    yield "outlook", answer.outlook
    yield from (("objective", line) for line in objective_lines(view["objectives"]))
    if view["reason"]:
        yield "would wait for", f"{view['reason']['code']}: {view['reason']['detail']}"
        yield "remedy", view["reason"]["remedy"]
    yield from ahead_lines("waits for end of", answer.ending, answer.forecast.ending_count)
    if view["position"]:
        yield "position", str(view["position"])
    if view["estimate"] and view["estimate"]["predictable"]:
        yield from estimate_card(view["estimate"])


def _effects_on_others(answer: SimulateJobResponse) -> Iterator[tuple[str, str]]:
    """Yield the effects of all jobs together on other jobs."""
    yield "would preempt", ", ".join(answer.preempted_job_ids)
    yield from ahead_lines("would delay", answer.delayed, answer.delayed_count)


def _places(answer: SimulateJobResponse) -> Iterator[tuple[str, str]]:
    for allocation in map(views.allocation_view, answer.allocations):
        for task in allocation["tasks"]:
            yield f"rank {task['rank']}", f"{allocation['node']}: {held_resources(task)}"
