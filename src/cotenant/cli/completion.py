"""Shell completion of ids. An unreachable or slow mesh completes nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cotenant.cli.arrays import SEPARATOR, leading_phase
from cotenant.cli.connection import Mesh, open_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import sanitize
from cotenant.cli.views import node_state
from cotenant.deferred import asyncio, grpc
from cotenant.rpc.access import AccessError
from cotenant.v1.array_service_pb2 import ListArraysRequest
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest
from cotenant.v1.node_service_pb2 import ListNodesRequest
from cotenant.v1.schedule_service_pb2 import ListSchedulesRequest
from cotenant.v1.secret_service_pb2 import ListSecretsRequest

COMPLETIONS_MAX = 200
Completions = list[tuple[str, str]]


def job_ids(flags: Flags, incomplete: str, seconds_max: float) -> Completions:
    """Return the newest jobs and arrays whose ids start with the text; after an array's id and `_`, its jobs."""
    head, separator, _ = incomplete.rpartition(SEPARATOR)

    async def ask(mesh: Mesh) -> Completions:
        wanted = JobFilter(array_id=head) if separator else JobFilter(standalone_only=True)
        jobs = (await mesh.jobs.ListJobs(ListJobsRequest(filter=wanted, page_size=COMPLETIONS_MAX))).jobs
        found = [(job.id, sanitize(f"{phase_of(job)} {job.spec.name}".strip())) for job in jobs]
        if separator:
            return found
        arrays = (await mesh.arrays.ListArrays(ListArraysRequest(page_size=COMPLETIONS_MAX))).arrays
        found += [(array.id, sanitize(f"{leading_phase(array)} {array.spec.name}".strip())) for array in arrays]
        return sorted(found, reverse=True)[:COMPLETIONS_MAX]

    return _complete(flags, ask, incomplete, seconds_max)


def node_ids(flags: Flags, incomplete: str, seconds_max: float) -> Completions:
    """Return the nodes whose ids start with the text."""

    async def ask(mesh: Mesh) -> Completions:
        page = await mesh.nodes.ListNodes(ListNodesRequest(page_size=COMPLETIONS_MAX))
        return [(node.id, node_state(node)) for node in page.nodes]

    return _complete(flags, ask, incomplete, seconds_max)


def secret_names(flags: Flags, incomplete: str, seconds_max: float) -> Completions:
    """Return the secrets whose names start with the text, with their tenants."""

    async def ask(mesh: Mesh) -> Completions:
        page = await mesh.secrets.ListSecrets(ListSecretsRequest(page_size=COMPLETIONS_MAX))
        return [(secret.name, secret.tenant) for secret in page.secrets]

    return _complete(flags, ask, incomplete, seconds_max)


def schedule_ids(flags: Flags, incomplete: str, seconds_max: float) -> Completions:
    """Return the schedules whose ids start with the text, with the names of their jobs."""

    async def ask(mesh: Mesh) -> Completions:
        page = await mesh.schedules.ListSchedules(ListSchedulesRequest(page_size=COMPLETIONS_MAX))
        return [(schedule.id, sanitize(f"{schedule.every} {schedule.spec.name}")) for schedule in page.schedules]

    return _complete(flags, ask, incomplete, seconds_max)


def _complete(
    flags: Flags, ask: Callable[[Mesh], Awaitable[Completions]], incomplete: str, seconds_max: float
) -> Completions:
    async def session() -> Completions:
        async with asyncio.timeout(seconds_max), open_mesh(flags) as mesh:
            return await ask(mesh)

    try:
        return [item for item in asyncio.run(session()) if item[0].startswith(incomplete)]
    except (AccessError, grpc.aio.AioRpcError, TimeoutError):
        return []  # a shell cannot show an error
