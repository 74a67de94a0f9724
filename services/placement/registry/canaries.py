"""Chooses the queued job that is tried on a held node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cotenant.codec.tenants import tenant_of
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.gang_allocation import hold_all
from cotenant.core.placement.node_avoidance import taking_work
from cotenant.core.policy.cluster_view import Scene
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Node
from cotenant.services.placement.cluster.request_decoding import Informed, gang_of
from cotenant.v1 import placement_service_pb2 as placement_pb2

CANDIDATES_MAX = 200  # the first in the queue's order; a node that none of them suits is tried later


def canaries(
    cluster: Cluster,
    due: Sequence[Node],
    request: placement_pb2.PlanPlacementRequest,
    policy: PlacementPolicy,
    allocator: CpuAllocator,
    informed: Informed,
    scene: Scene,
    promised: Mapping[str, cycle.Start],
) -> dict[str, cycle.Start]:
    """Return the start of one job on each of the held nodes, where one fits; nothing is held after.

    The first job in the queue's order that the policy would place there goes: by the same fit as any other start, with
    the node open and all others closed, and without making room. Where no job fits there alone, a gang goes that needs
    the node beside open ones, or beside others that are due: it could wait for ever for a smaller job to come.
    """
    ledger, shapes = cluster.ledger, cluster.shapes()
    candidates = [one for one in request.candidates if one.job_id not in promised][:CANDIDATES_MAX]
    gangs = [gang_of(candidate, allocator, shapes, informed) for candidate in candidates]
    headroom = cluster.headroom(Headroom(map(tenant_of, request.tenants)))
    chosen: dict[str, cycle.Start] = {}
    with ledger.undone():
        for start in promised.values():
            hold_all(ledger, start.holdings)
        for node, together in [*((one, False) for one in due), *((one, True) for one in due)]:
            if any(node.number in _numbers(start) for start in chosen.values()):
                continue
            nodes = ledger.open.copy() if together else np.zeros(len(ledger), dtype=np.bool_)
            nodes[[one.number for one in due] if together else node.number] = True
            left = [gang for gang in gangs if gang.job_id not in chosen]
            with taking_work(ledger, nodes):
                rng = np.random.default_rng(request.seed)
                outcome = cycle.place(left, ledger, policy, rng, headroom=headroom.copy(), scene=scene)
            first = next((one for one in outcome.starts if _tries(one, node.number)), None)
            if first is not None and hold_all(ledger, first.holdings):
                headroom.take(first.gang.tenant, first.gang.gpu_milli, first.gang.cores)
                chosen[first.gang.job_id] = first
    return chosen


def _numbers(start: cycle.Start) -> set[int]:
    return {holding.node for holding in start.holdings}


def _tries(start: cycle.Start, number: int) -> bool:
    """Return whether a start uses a node, and needs nobody to make room."""
    return not start.needs_room and not start.moves and number in _numbers(start)
