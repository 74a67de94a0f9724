"""What a shell offers on TAB. A mesh that is away offers nothing, and a slow one is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from cotenant.cli.connection import Mesh, opened
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import harmless
from cotenant.cli.views import node_state
from cotenant.rpc.access import NoAccess
from cotenant.v1.job_service_pb2 import ListJobsRequest
from cotenant.v1.node_service_pb2 import ListNodesRequest

OFFERED_MAX = 200
Offers = list[tuple[str, str]]


def job_ids(flags: Flags, incomplete: str, seconds_max: float) -> Offers:
    """Offer the newest jobs whose id begins so."""

    async def ask(mesh: Mesh) -> Offers:
        page = await mesh.jobs.ListJobs(ListJobsRequest(page_size=OFFERED_MAX))
        return [(job.id, harmless(f"{phase_of(job)} {job.spec.name}".strip())) for job in page.jobs]

    return _asked(flags, ask, incomplete, seconds_max)


def node_ids(flags: Flags, incomplete: str, seconds_max: float) -> Offers:
    """Offer the nodes whose id begins so."""

    async def ask(mesh: Mesh) -> Offers:
        page = await mesh.nodes.ListNodes(ListNodesRequest(page_size=OFFERED_MAX))
        return [(node.id, node_state(node)) for node in page.nodes]

    return _asked(flags, ask, incomplete, seconds_max)


def _asked(flags: Flags, ask: Callable[[Mesh], Awaitable[Offers]], incomplete: str, seconds_max: float) -> Offers:
    async def session() -> Offers:
        async with asyncio.timeout(seconds_max), opened(flags) as mesh:
            return await ask(mesh)

    try:
        return [offer for offer in asyncio.run(session()) if offer[0].startswith(incomplete)]
    except (NoAccess, grpc.aio.AioRpcError, TimeoutError):
        return []  # a shell has no place for an error
