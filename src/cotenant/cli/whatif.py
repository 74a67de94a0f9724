"""`cotenant whatif`: what one scheduling cycle would do with a job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import grpc.aio
import typer

from cotenant.cli import options, views
from cotenant.cli.flags import Flags
from cotenant.cli.jobfile import Draft
from cotenant.cli.joboptions import TailCommand, read_questions, takes_job
from cotenant.cli.located import Fields
from cotenant.cli.mesh import Mesh, reach
from cotenant.cli.render import print_card
from cotenant.cli.show import held
from cotenant.cli.submit import refused
from cotenant.rpc.errors import from_error
from cotenant.rpc.translate import spec_to_wire
from cotenant.v1.job_service_pb2 import SimulateJobRequest, SimulateJobResponse


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("whatif", cls=TailCommand)(takes_job(whatif))


def whatif(
    context: typer.Context,
    job: Fields,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Job files; - is stdin.", show_default=False)
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Tell what would happen to jobs now, each on its own, without submitting them.

    \b
    Examples:
      cotenant whatif job.yaml
      cotenant whatif --gpus 8 --locality server -- python3 train.py
    """
    drafts = read_questions(files or [], job, time.time())
    answers = reach(Flags.of(context), lambda mesh: _simulated(mesh, drafts))
    if as_json:
        views.print_json([_view(draft, answer) for draft, answer in zip(drafts, answers, strict=True)])
        return
    for index, (draft, answer) in enumerate(zip(drafts, answers, strict=True)):
        if index:
            print()
        print_card(_card(_view(draft, answer)))


async def _simulated(mesh: Mesh, drafts: list[Draft]) -> list[SimulateJobResponse]:
    answers = []
    for draft in drafts:
        try:
            answer: Any = await mesh.jobs.SimulateJob(SimulateJobRequest(spec=spec_to_wire(draft.spec)))
        except grpc.aio.AioRpcError as error:
            raise refused([(draft, from_error(error))]) from error
        answers.append(answer)
    return answers


def _view(draft: Draft, answer: SimulateJobResponse) -> views.View:
    return {
        "name": draft.spec.name,
        "starts_now": answer.starts_now,
        "position": answer.position or None,
        "allocations": [views.allocation_view(one) for one in answer.allocations],
        "preempted_job_ids": list(answer.preempted_job_ids),
        "reason": views.reason_view(answer.refusal) if answer.HasField("refusal") else None,
    }


def _card(view: views.View) -> Iterator[tuple[str, str]]:
    yield "name", view["name"]
    yield "starts now", "yes" if view["starts_now"] else "no"
    if view["reason"]:
        yield "would wait for", f"{view['reason']['code']}: {view['reason']['detail']}"
        yield "remedy", view["reason"]["remedy"]
    if view["position"]:
        yield "position", str(view["position"])
    yield "would preempt", ", ".join(view["preempted_job_ids"])
    for allocation in view["allocations"]:
        for task in allocation["tasks"]:
            yield f"rank {task['rank']}", f"{allocation['node']}: {held(task)}"
