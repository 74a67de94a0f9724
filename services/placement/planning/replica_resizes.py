"""Resizes of elastic jobs: chooses the places of their next generations while their attempts still run.

Theory of operation. A generation is an attempt. Its places are chosen as if what the present one holds were free, its
own nodes first, and reserved for the job's next attempt (`tentative_reservations`); then the present one is stopped.
What it holds is released when it has ended, and the places are held by the start after that, so nothing ever belongs to
two generations. The stop is one commit, which also says the new number of replicas: a placement or a queue that is
killed before it finds the old generation, and one that is killed after it starts the job with the new number. A
placement that starts anew chooses the places of attempts that were stopped for a resize again (`Unreserved`), and the
queue asks for a resized job before all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.gang import Gang
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.model.refusal import Code, Refusal, policy_failed
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView
from cotenant.core.policy.protocols import CpuAllocator, PlacementPolicy
from cotenant.core.scheduling import cycle
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt
from cotenant.services.placement.cluster.request_decoding import Enrich, gang_of
from cotenant.v1 import job_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Resized:
    """An attempt that is to stop, and the start of the job's next one."""

    live: LiveAttempt
    start: cycle.Start
    replicas: int
    reason: str


def decide_resizes(
    cluster: Cluster,
    request: placement_pb2.ResizeReplicasRequest,
    policy: PlacementPolicy,
    allocator: CpuAllocator,
    enrich: Enrich,
    cluster_view: ClusterView = EMPTY_CLUSTER,
    promised: Iterable[cycle.Start] = (),
) -> tuple[list[Resized], dict[str, Refusal]]:
    """Return the resizes that have places, in order, and why the other jobs keep their number; nothing is held.

    What an earlier resize releases is free for a later one, except the places of its next generation. `promised` starts
    keep their places.
    """
    found: list[Resized] = []
    refusals: dict[str, Refusal] = {}
    taken = [holding for start in promised for holding in start.holdings]
    shapes, rng = cluster.open_shapes(), np.random.default_rng(request.seed)
    for resize in request.resizes:
        job_id, live = resize.next.job_id, cluster.attempts.get(resize.next.job_id)
        if live is None or not _may_resize(cluster, live, resize.next.number):
            refusals[job_id] = Refusal(
                Code.NOT_YET_CONSIDERED, "its attempt does not run on connected nodes now", "the next cycle asks again"
            )
            continue
        gang = gang_of(resize.next, allocator, shapes, enrich)
        leaving = [*cluster.leaving(), *cluster.firm_holdings(live)]
        leaving += [holding for done in found for holding in cluster.firm_holdings(done.live)]
        outcome = _place(cluster, gang, live, leaving, taken, policy, rng, cluster_view)
        if isinstance(outcome, Refusal):
            refusals[job_id] = outcome
            continue
        taken += outcome.holdings
        found.append(Resized(live, outcome, resize.replicas, resize.reason))
    return found, refusals


def _may_resize(cluster: Cluster, live: LiveAttempt, number: int) -> bool:
    """Return whether an attempt is that of an elastic job, the one before this number, and can be resized now."""
    elastic = any(role.HasField("elastic") for role in live.record.spec.roles)
    return elastic and live.key[1] == number - 1 and cluster.can_resize(live)


class Unreserved:
    """Attempts that a placement before this one stopped for a resize, and whose next places are not reserved yet.

    They get them in the first plan in which nodes with room are connected.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._attempts = cluster, cluster.attempts
        self._left: dict[tuple[str, int], None] = {}

    def take(
        self,
        policy: PlacementPolicy,
        allocator: CpuAllocator,
        enrich: Enrich,
        rng: np.random.Generator,
        promised: Iterable[cycle.Start] = (),
    ) -> list[Resized]:
        """Return those that have places now, each once."""
        cluster = self._cluster
        if self._attempts is not cluster.attempts:  # the state was loaded
            self._attempts = cluster.attempts
            resized = (live for live in cluster.attempts.values() if live.attempt.next_replicas)
            self._left = {live.key: None for live in resized}
        if not self._left:
            return []
        taken = [holding for start in promised for holding in start.holdings]
        shapes, found = cluster.open_shapes(), list[Resized]()
        for job_id, number in list(self._left):
            live = cluster.attempts.get(job_id)
            if live is None or live.key[1] != number or not _goes_on(live):
                del self._left[job_id, number]
                continue
            gang = gang_of(_candidate_of(live), allocator, shapes, enrich)
            outcome = _place(cluster, gang, live, cluster.leaving(), taken, policy, rng, EMPTY_CLUSTER)
            if isinstance(outcome, cycle.Start):
                del self._left[job_id, number]
                taken += outcome.holdings
                found.append(Resized(live, outcome, live.attempt.next_replicas, live.attempt.stop_detail))
        return found


def _goes_on(live: LiveAttempt) -> bool:
    resized = live.attempt.stop_reason == job_pb2.STOP_REASON_RESIZED
    return resized and live.state in (AttemptState.STOPPING, AttemptState.STOPPED)


def _candidate_of(live: LiveAttempt) -> placement_pb2.Candidate:
    """Return the next generation of an attempt that was stopped for a resize."""
    candidate = placement_pb2.Candidate(
        job_id=live.key[0], number=live.key[1] + 1, spec=live.record.spec, estimate=live.record.estimate
    )
    role = next(role for role in candidate.spec.roles if role.HasField("elastic"))
    role.replicas = live.attempt.next_replicas
    return candidate


def _place(
    cluster: Cluster,
    gang: Gang,
    live: LiveAttempt,
    leaving: Sequence[Holding],
    taken: Sequence[Holding],
    policy: PlacementPolicy,
    rng: np.random.Generator,
    cluster_view: ClusterView,
) -> cycle.Start | Refusal:
    """Return the start of an attempt's next generation, on its own nodes if they have room, or the refusal."""

    def broken(gang: Gang, error: Exception) -> Refusal:
        log.error("policy_failed", policy=policy.name, job=gang.job_id, error=f"{type(error).__name__}: {error}")
        return policy_failed(policy.name, error)

    ledger = cluster.ledger
    every, own = ledger.open.copy(), np.zeros_like(ledger.open)
    own[[cluster.nodes[node_id].number for node_id in live.nodes if node_id in cluster.nodes]] = True
    try:
        for nodes in (every & own, every):
            ledger.open[:] = nodes
            plan = cycle.place(
                [gang],
                ledger,
                policy,
                rng,
                leaving=leaving,
                promised=taken,
                cluster_view=cluster_view,
                on_broken=broken,
            )
            if plan.starts:
                return plan.starts[0]
    finally:
        ledger.open[:] = every
    return plan.refusals[gang.job_id]
