"""The page of incidents: who slowed whom on which node, what was done and when, and how far the victim recovered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from cotenant.cli.connection import Mesh
from cotenant.cli.nodes.incidents import recent_incidents
from cotenant.codec.specs import seconds
from cotenant.v1.contention_service_pb2 import (
    AttemptSample,
    Incident,
    ListIncidentsRequest,
    ListSamplesRequest,
    NodeSample,
)
from cotenant.v1.policy_service_pb2 import ListPoliciesRequest
from cotenant.web.boards import Ask, BoardKind, part
from cotenant.web.rows import Row

SECONDS = 2.0
INCIDENTS_MAX = 1000
SAMPLES_MAX = 1000
GROUP = "cotenant.contention_policies"
DAY_SECONDS = 86400
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)Z ")


async def read(ask: Ask) -> Mapping[str, Row]:
    """Return the incidents, the nodes of the open ones as they are now, and the policy that acts."""
    incidents, policies = await asyncio.gather(part(ask(_incidents)), part(ask(_policies)))
    rows = {f"incident {one['node']} {one['number']}": one for one in incidents.rows}
    nodes = {one["node"] for one in incidents.rows if one["end"] is None}
    samples = await part(ask(_samples)) if nodes else None
    for one in samples.rows if samples else ():
        if one["node"] in nodes:
            rows[f"node {one['node']}"] = one
    active = [one["name"] for one in policies.rows if one["active"]]
    return {**rows, "state": {"trouble": incidents.trouble, "policy": active[0] if active else ""}}


KIND = BoardKind(read, SECONDS)


async def _incidents(mesh: Mesh) -> list[Row]:
    found = await recent_incidents(mesh, ListIncidentsRequest(), INCIDENTS_MAX)
    return [incident_row(one) for one in found]


def incident_row(incident: Incident) -> Row:
    """Return an incident with the times of its actions. It is the same as long as nothing happens."""
    start = seconds(incident.start_time)
    return {
        "number": incident.id,  # each replica counts its own nodes' incidents
        "node": incident.node_id,
        "victim": incident.victim_job_id,
        "suspect": incident.suspect_job_id,
        "start": start,
        "end": seconds(incident.end_time) if incident.HasField("end_time") else None,
        "slowdown": incident.slowdown,
        "recovered": incident.recovered or None,
        "actions": [timed(text, start) for text in incident.actions],
        "outcome": incident.outcome,
    }


def timed(action: str, start: float) -> tuple[float | None, str]:
    """Return when an action was taken, and what it was: it begins with the time of day, at or after the start.

    >>> timed("00:00:05Z suspended: memory bandwidth", 86390.2)
    (86405.0, 'suspended: memory bandwidth')
    >>> timed("suspended", 1.0)
    (None, 'suspended')
    """
    found = _CLOCK.match(action)
    if not found:
        return None, action
    hours, minutes, second = map(int, found.groups())
    of_day = 3600 * hours + 60 * minutes + second
    after = (of_day - int(start)) % DAY_SECONDS
    return float(int(start) + after), action[found.end() :]


async def _samples(mesh: Mesh) -> list[Row]:
    async def listed(contention: Any) -> list[NodeSample]:
        return list((await contention.ListSamples(ListSamplesRequest(page_size=SAMPLES_MAX))).samples)

    return [sample_row(one) for one in await mesh.call_contention_replicas(listed)]


def sample_row(sample: NodeSample) -> Row:
    """Return what a node and its attempts were measured to do last."""
    peak = sample.memory_bandwidth_peak_bytes_per_second
    used = sample.memory_bandwidth_bytes_per_second
    return {
        "node": sample.node_id,
        "cpu_stalled_percent": sample.cpu.some_avg10 if sample.HasField("cpu") else None,
        "cpu_percent": sample.cpu_percent,
        "bandwidth_share": used / peak if used >= 0 and peak > 0 else None,
        "attempts": {one.job_id: _attempt_row(one) for one in sample.attempts},
    }


def _attempt_row(one: AttemptSample) -> Row:
    return {
        "rate": one.rate_per_second or None,
        "expected": one.expected_rate_per_second or None,
        "cores_used": one.cores_used,
        "cores": one.cores,
        "bandwidth": max(0.0, one.memory_bandwidth_bytes_per_second) or None,
    }


async def _policies(mesh: Mesh) -> list[Row]:
    answer = await mesh.policies()["contention"].ListPolicies(ListPoliciesRequest(group=GROUP))
    return [{"name": one.name, "active": one.active} for one in answer.policies]
