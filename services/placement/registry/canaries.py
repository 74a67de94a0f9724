"""Choice of canaries: waiting jobs that are tried on held nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cotenant.codec.tenants import tenant_of
from cotenant.core.model.tenancy import Headroom
from cotenant.core.placement.constraint import only_open
from cotenant.core.placement.gang_allocation import hold_all
from cotenant.core.policy.cluster_view import ClusterView
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Node
from cotenant.services.placement.cluster.request_decoding import Enrich, gang_of

CANDIDATES_MAX = 200  # considered in the queue's order; a node that fits none of them is tried later


def canaries(
    cluster: Cluster,
    due: Sequence[Node],
    request: placement_pb2.PlanPlacementRequest,
    policy: PlacementPolicy,
    allocator: CpuAllocator,
    enrich: Enrich,
    cluster_view: ClusterView,
    promised: Mapping[str, cycle.Start],
) -> dict[str, cycle.Start]:
    """Return the start of one job on each due node that fits one; nothing is held afterwards.

    The canary is the first job in the queue's order that the policy would place on the node: by the same rules as any
    other start, with the node open and all others closed, and without making room. If no job fits there alone, the
    canary is a gang that needs the node together with open or other due nodes, which might otherwise wait forever.
    """
    ledger, shapes = cluster.ledger, cluster.shapes()
    candidates = [one for one in request.candidates if one.job_id not in promised][:CANDIDATES_MAX]
    gangs = [gang_of(candidate, allocator, shapes, enrich) for candidate in candidates]
    headroom = cluster.headroom(Headroom(map(tenant_of, request.tenants)))
    chosen: dict[str, cycle.Start] = {}
    with ledger.rolled_back():
        for start in promised.values():
            hold_all(ledger, start.holdings)
        for node, together in [*((one, False) for one in due), *((one, True) for one in due)]:
            if any(node.number in _numbers(start) for start in chosen.values()):
                continue
            nodes = ledger.open.copy() if together else np.zeros(len(ledger), dtype=np.bool_)
            nodes[[one.number for one in due] if together else node.number] = True
            left = [gang for gang in gangs if gang.job_id not in chosen]
            with only_open(ledger, nodes):
                rng = np.random.default_rng(request.seed)
                outcome = cycle.place(left, ledger, policy, rng, headroom=headroom.copy(), cluster_view=cluster_view)
            first = next((one for one in outcome.starts if _tries(one, node.number)), None)
            if first is not None and hold_all(ledger, first.holdings):
                headroom.take(first.gang.tenant, first.gang.gpu_milli, first.gang.cores)
                chosen[first.gang.job_id] = first
    return chosen


def _numbers(start: cycle.Start) -> set[int]:
    return {holding.node for holding in start.holdings}


def _tries(start: cycle.Start, number: int) -> bool:
    """Return whether a start uses a node without making room."""
    return not start.needs_room and not start.moves and number in _numbers(start)
