"""`cotenant rerun`: new jobs like earlier ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from cotenant.cli.annotations import options, typer
from cotenant.cli.connection import Mesh, with_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.jobs.earlier_job import draft_like
from cotenant.cli.jobs.job_file import Draft
from cotenant.cli.jobs.submit import create, print_accepted, rejection
from cotenant.cli.name_lookup import find_jobs_and_arrays
from cotenant.cli.source_positions import MapNode, SourcePosition
from cotenant.codec.errors import from_error
from cotenant.deferred import grpc
from cotenant.v1.array_service_pb2 import Array
from cotenant.v1.job_pb2 import Job

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
