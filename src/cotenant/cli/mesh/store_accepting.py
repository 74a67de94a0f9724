"""`cotenant store accept-regression`: gather evidence, list losses, ask for confirmation, write."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from cotenant.cli import views
from cotenant.cli.annotations import typer
from cotenant.cli.connection import open_mesh as open_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.mesh.settings import ARCHIVE_FILE
from cotenant.cli.mesh.store_evidence import StoreEvidence, gather_evidence
from cotenant.cli.mesh.store_losses import Plan, archived, found_on_nodes, plan
from cotenant.cli.name_lookup import all_jobs
from cotenant.cli.outcome import CommandError, ExitCode, note, usage_error
from cotenant.cli.render import Column, print_table
from cotenant.deferred import grpc
from cotenant.rpc.access import AccessError
from cotenant.store.open import open_raw
from cotenant.store.port import Store, StoreInUse, StoreUnavailable
from cotenant.store.regression_acceptance import accept
from cotenant.store.schema import NewerSchema
from cotenant.store.witness import compare_store
from cotenant.v1 import job_pb2
from cotenant.v1.job_service_pb2 import GetJobRequest

COLUMNS = (Column("JOB"), Column("EFFECT"), Column("REASON", elastic=True))
OUTCOME_TEXTS = {
    "adopted": "keeps running",
    "queued_again": "is requeued",
    "runs_again": "runs again",
    "written_again": "is written back",
}


class RegressionAcceptance:
    """One run of `accept-regression`."""

    def __init__(self, flags: Flags, state_dir: Path, url: str) -> None:
        self._flags, self._state_dir, self._url = flags, state_dir, url

    async def run(self, *, dry_run: bool, ask: bool, as_json: bool) -> None:
        """List what is lost or changed, ask for confirmation, and accept the store.

        Raises:
            CommandError: the store cannot be read, or the user declined.
        """
        evidence = await gather_evidence(self._flags, self._state_dir, self._url)
        if evidence.look is None:
            busy = "the mesh has" in evidence.why_not
            hint = "stop `cotenant up` first; jobs keep running" if busy else ""
            raise CommandError(evidence.why_not, hint=hint, code=ExitCode.FAILED if busy else ExitCode.UNREACHABLE)
        if not _is_wrong(evidence):
            self._print_trusted(as_json)
            return
        async with _open_store(self._url) as raw:
            listing = await raw.list("")
            jobs = await self._jobs_in_memory()
            active = [one.key.removeprefix("queue/jobs/") for one in listing.entries if "queue/jobs/" in one.key]
            found = archived(self._state_dir / ARCHIVE_FILE, active)
            planned = plan(listing.entries, found_on_nodes(self._state_dir), jobs, found)
            self._show(evidence, planned, as_json=as_json)
            if dry_run:
                return
            if ask:
                _confirm(self._url)
            revision = await accept(raw, [one.memory for one in evidence.witnesses], planned.changes)
        note(f"accepted the store, which continues at revision {revision}; services and agents resume by themselves")

    async def _jobs_in_memory(self) -> dict[str, job_pb2.Job]:
        """Return the jobs in the memory of the running mesh; none if no mesh runs."""
        try:
            async with open_mesh(self._flags) as mesh:
                ids = [job.id async for job in all_jobs(mesh)]
                return {job_id: (await mesh.jobs.GetJob(GetJobRequest(id=job_id))).job for job_id in ids}
        except (AccessError, CommandError, grpc.aio.AioRpcError):
            return {}

    def _show(self, evidence: StoreEvidence, planned: Plan, *, as_json: bool) -> None:
        if as_json:
            views.print_json({"accepts": self._url, "jobs": [asdict(one) for one in planned.losses]})
            return
        note(f"problem: {_is_wrong(evidence)[0]}")
        rows = [[one.job_id, OUTCOME_TEXTS[one.what], one.detail] for one in planned.losses]
        print_table(COLUMNS, rows, nothing="nothing is known to be missing in the store")
        note("acknowledged writes since then that are not listed here are lost: no reachable witness remembers them")

    def _print_trusted(self, as_json: bool) -> None:
        if as_json:
            views.print_json({"accepts": None, "jobs": []})
        else:
            note("the store matches all witnesses: nothing to accept")


def _is_wrong(evidence: StoreEvidence) -> list[str]:
    """Return the problems of the store without duplicates."""
    assert evidence.look
    texts = [one["problem"] for one in evidence.trusts if one["problem"]]
    if evidence.look.verdict:
        texts.append(evidence.look.verdict.text)
    judged = (compare_store(one.memory, evidence.look.seen, one.name) for one in evidence.witnesses)
    texts += [verdict.text for verdict in judged if verdict]
    return list(dict.fromkeys(texts))


def _confirm(url: str) -> None:
    if not sys.stdin.isatty():
        raise usage_error("accepting an older store needs confirmation", hint="pass --yes in scripts")
    if not typer.confirm(f"Accept {url} as it is?"):
        raise CommandError("nothing changed")


@asynccontextmanager
async def _open_store(url: str) -> AsyncIterator[Store]:
    """Open the store without checks; translate its errors for users."""
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
