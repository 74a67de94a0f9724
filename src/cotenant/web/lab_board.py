"""The page of the policy lab before a run: what a snapshot would have, and the policies that can be tried on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from cotenant.cli.connection import Mesh
from cotenant.cli.pages import pages
from cotenant.cli.research.snapshot import jobs_filter
from cotenant.core.policy.profiles import PROFILES
from cotenant.v1.job_service_pb2 import ListJobsRequest
from cotenant.v1.policy_service_pb2 import ListPoliciesRequest
from cotenant.v1.tenant_service_pb2 import ListQueuesRequest
from cotenant.web.boards import Ask, BoardKind, part
from cotenant.web.queue_board import free, queue_rows
from cotenant.web.rows import Row

SECONDS = 5.0
JOBS_MAX = 7_000  # in a snapshot that the lab takes: five preemptive policies then fit into their processor time
RUN_JOBS, RUN_SECONDS, RUN_GROWTH = 500, 3.3, 4 / 3  # of one policy that preempts; one that does not takes a third
OTHERS_MAX = 4  # policies beside those in use
TRIED = {"cotenant.queue_policies": "queue", "cotenant.placement_policies": "placement"}
SHOWN = {**TRIED, "cotenant.cpu_allocators": "allocator"}  # decide in a simulation of a snapshot


async def read(ask: Ask) -> Mapping[str, Row]:
    """Return the jobs, nodes and rules that a snapshot would have, and the policies."""
    jobs, nodes, queues, policies = await asyncio.gather(
        part(ask(count_jobs)), part(ask(free)), part(ask(queue_rows)), part(ask(_policies))
    )
    found = {"jobs": jobs, "nodes": nodes, "queues": queues, "policies": policies}
    return {
        **{name: {"rows": one.rows, "trouble": one.trouble} for name, one in found.items()},
        "profiles": {"rows": [{"name": one.name, "summary": one.summary} for one in PROFILES.values()], "trouble": ""},
        "limits": {
            "jobs_max": JOBS_MAX,
            "others_max": OTHERS_MAX,
            "policy_seconds": round(policy_seconds(sum(one["seen"] for one in jobs.rows)), 1),
        },
    }


KIND = BoardKind(read, SECONDS)


def policy_seconds(jobs: int) -> float:
    """Return about how much processor time the simulation of one policy takes at most, in seconds, with so many jobs.

    >>> [round(policy_seconds(jobs)) for jobs in (500, 2_000, 7_000)]
    [3, 21, 111]
    """
    seconds: float = RUN_SECONDS * (jobs / RUN_JOBS) ** RUN_GROWTH
    return seconds


async def count_jobs(mesh: Mesh) -> list[Row]:
    """Return one row: how many jobs wait or hold resources, of those that the principal sees and of all others.

    The queue counts all jobs before and after the list is read: a job that came or ended in between hides nothing.
    """
    before = await _in_queue(mesh)
    listed = await mesh.jobs.ListJobs(ListJobsRequest(filter=jobs_filter(), page_size=1))
    after = await _in_queue(mesh)
    return [{"seen": listed.total_size, "hidden": max(0, min(before, after) - listed.total_size)}]


async def _in_queue(mesh: Mesh) -> int:
    answer = await mesh.tenants.ListQueues(ListQueuesRequest())
    return sum(one.waiting + one.running for one in answer.queues)


async def _policies(mesh: Mesh) -> list[Row]:
    """Return the installed policies that decide in a simulation, each once."""
    found: dict[tuple[str, str], Row] = {}
    for stub in mesh.policies().values():
        async for page in pages(stub.ListPolicies, ListPoliciesRequest()):
            for one in page.policies:
                if (group := SHOWN.get(one.group)) and one.healthy:
                    row = found.setdefault((group, one.name), {"group": group, "name": one.name, "active": False})
                    row["summary"] = one.summary
                    row["active"] |= one.active
    return [found[key] for key in sorted(found)]
