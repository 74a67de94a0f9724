"""What `cotenant store accept-regression` does: finds out, lists, asks, and writes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import grpc.aio
import typer

from cotenant.cli import views
from cotenant.cli.connection import opened as mesh_opened
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.settings import ARCHIVE_FILE
from cotenant.cli.mesh.store import Known, find_out
from cotenant.cli.mesh.store_losses import Plan, archived, found_on_nodes, plan
from cotenant.cli.name_lookup import all_jobs
from cotenant.cli.outcome import CommandError, ExitCode, note, usage
from cotenant.cli.render import Column, print_table
from cotenant.rpc.access import NoAccess
from cotenant.store.open import open_raw
from cotenant.store.port import Store, StoreInUse, StoreUnavailable
from cotenant.store.regression_acceptance import accept
from cotenant.store.schema import NewerSchema
from cotenant.store.witness import judge
from cotenant.v1 import job_pb2
from cotenant.v1.job_service_pb2 import GetJobRequest

COLUMNS = (Column("JOB"), Column("WHAT HAPPENS"), Column("WHY", elastic=True))
IN_WORDS = {
    "adopted": "keeps running",
    "queued_again": "is queued again",
    "runs_again": "runs again",
    "written_again": "is written again",
}


class Accepting:
    """One run of the command."""

    def __init__(self, flags: Flags, state_dir: Path, url: str) -> None:
        self._flags, self._state_dir, self._url = flags, state_dir, url

    async def run(self, *, dry_run: bool, ask: bool, as_json: bool) -> None:
        """List what is lost or changes, ask, and have the store accepted.

        Raises:
            CommandError: the store cannot be asked, nothing is wrong with it, or nobody agreed.
        """
        known = await find_out(self._flags, self._state_dir, self._url)
        if known.look is None:
            busy = "the mesh has" in known.why_not
            hint = "stop `cotenant up` first; jobs keep running" if busy else ""
            raise CommandError(known.why_not, hint=hint, code=ExitCode.FAILED if busy else ExitCode.UNREACHABLE)
        if not _is_wrong(known):
            self._say_trusted(as_json)
            return
        async with _raw(self._url) as raw:
            listing = await raw.list("")
            jobs = await self._jobs_in_memory()
            active = [one.key.removeprefix("queue/jobs/") for one in listing.entries if "queue/jobs/" in one.key]
            found = archived(self._state_dir / ARCHIVE_FILE, active)
            planned = plan(listing.entries, found_on_nodes(self._state_dir), jobs, found)
            self._show(known, planned, as_json=as_json)
            if dry_run:
                return
            if ask:
                _ask(self._url)
            goes_on = await accept(raw, [one.memory for one in known.witnesses], planned.changes)
        note(f"the store is accepted, and goes on from revision {goes_on}; members and agents follow by themselves")

    async def _jobs_in_memory(self) -> dict[str, job_pb2.Job]:
        """Return the jobs that the running mesh has in memory; none where it does not run."""
        try:
            async with mesh_opened(self._flags) as mesh:
                ids = [job.id async for job in all_jobs(mesh)]
                return {job_id: (await mesh.jobs.GetJob(GetJobRequest(id=job_id))).job for job_id in ids}
        except (NoAccess, CommandError, grpc.aio.AioRpcError):
            return {}

    def _show(self, known: Known, planned: Plan, *, as_json: bool) -> None:
        if as_json:
            views.print_json({"accepts": self._url, "jobs": [asdict(one) for one in planned.losses]})
            return
        note(f"problem: {_is_wrong(known)[0]}")
        rows = [[one.job_id, IN_WORDS[one.what], one.detail] for one in planned.losses]
        print_table(COLUMNS, rows, nothing="nothing is known that the store lacks")
        note("what was acknowledged since then and is not listed here is lost: nobody reachable remembers it")

    def _say_trusted(self, as_json: bool) -> None:
        if as_json:
            views.print_json({"accepts": None, "jobs": []})
        else:
            note("the store is what everybody remembers: there is nothing to accept")


def _is_wrong(known: Known) -> list[str]:
    """Return what is wrong with the store, each once."""
    assert known.look
    texts = [one["problem"] for one in known.trusts if one["problem"]]
    if known.look.verdict:
        texts.append(known.look.verdict.text)
    judged = (judge(one.memory, known.look.seen, one.name) for one in known.witnesses)
    texts += [verdict.text for verdict in judged if verdict]
    return list(dict.fromkeys(texts))


def _ask(url: str) -> None:
    if not sys.stdin.isatty():
        raise usage("accepting an older store needs an answer", hint="pass --yes where nobody can be asked")
    if not typer.confirm(f"Go on with {url} as it is?"):
        raise CommandError("nothing was changed")


@asynccontextmanager
async def _raw(url: str) -> AsyncIterator[Store]:
    """Open the store as it is; what it refuses is told in a user's words."""
    try:
        raw = await open_raw(url)
        try:
            yield raw
        finally:
            await raw.close()
    except StoreInUse as error:
        raise CommandError(str(error), hint="stop `cotenant up` first; jobs keep running") from None
    except StoreUnavailable as error:
        raise CommandError(str(error), code=ExitCode.UNREACHABLE) from None
    except NewerSchema as error:
        raise CommandError(str(error)) from None
