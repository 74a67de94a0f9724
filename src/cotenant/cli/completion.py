"""Shell completion of ids. An unreachable or slow mesh completes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from cotenant.cli.connection import Mesh, open_mesh
from cotenant.cli.flags import Flags
from cotenant.cli.name_lookup import phase_of
from cotenant.cli.outcome import sanitize
from cotenant.cli.views import node_state
from cotenant.rpc.access import AccessError
from cotenant.v1.job_service_pb2 import ListJobsRequest
from cotenant.v1.node_service_pb2 import ListNodesRequest

COMPLETIONS_MAX = 200
Completions = list[tuple[str, str]]


def job_ids(flags: Flags, incomplete: str, seconds_max: float) -> Completions:
    """Return the newest jobs whose ids start with the text."""

    async def ask(mesh: Mesh) -> Completions:
        page = await mesh.jobs.ListJobs(ListJobsRequest(page_size=COMPLETIONS_MAX))
        return [(job.id, sanitize(f"{phase_of(job)} {job.spec.name}".strip())) for job in page.jobs]

    return _complete(flags, ask, incomplete, seconds_max)


def node_ids(flags: Flags, incomplete: str, seconds_max: float) -> Completions:
    """Return the nodes whose ids start with the text."""

    async def ask(mesh: Mesh) -> Completions:
        page = await mesh.nodes.ListNodes(ListNodesRequest(page_size=COMPLETIONS_MAX))
        return [(node.id, node_state(node)) for node in page.nodes]

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
