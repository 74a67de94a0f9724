"""Cluster view: what running attempts hold, for placement policies that need more than free resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotenant.codec import estimates, specs
from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.estimate import as_of
from cotenant.core.model.gang import Gang
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.policy.cluster_view import ClusterView, Occupancy, RunningJob
from cotenant.core.scheduling import cycle
from cotenant.services.placement.attempts.tracked_attempt import own_cores_of
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt

HELD = frozenset({AttemptState.ASSIGNED, AttemptState.RUNNING})


@dataclass(frozen=True, slots=True)
class StopCosts:
    """Assumed cost of stopping a job whose checkpoints are unknown: the run since the last checkpoint, and a restart.

    A job loses its run time since its start, but at most `checkpoint_seconds`: jobs are assumed to save their work
    about that often, or within their grace [C].
    """

    checkpoint_seconds: float = 300.0
    restart_seconds: float = 60.0

    def of(self, ran_seconds: float) -> float:
        """Return the seconds of run time that a stop costs.

        >>> StopCosts().of(20), StopCosts().of(7200)
        (80.0, 360.0)
        """
        return min(max(0.0, ran_seconds), self.checkpoint_seconds) + self.restart_seconds


STOP_COSTS = StopCosts()


class LiveClusterView(ClusterView):
    """The attempts that hold resources and are not stopping, each decoded for policies on first use.

    Times are unix seconds. A stopping attempt is not part of the view: what it holds counts as free. An attempt that is
    being resized, or that has a disconnected agent, is not preemptible for now.
    """

    def __init__(self, cluster: Cluster, costs: StopCosts, now: float) -> None:
        self.now = now
        self._cluster, self._costs = cluster, costs
        self._known: dict[str, RunningJob] = {}

    def running_jobs(self) -> Mapping[str, RunningJob]:
        """Return all running jobs, by job id."""
        return {live.key[0]: self._resident(live) for live in self._cluster.attempts.values() if live.state in HELD}

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        """Return the running jobs on a node."""
        there = self._cluster.on_node(self._cluster.node_at(node).id)
        return [self._resident(live) for live in there if live.state in HELD]

    def running_job(self, job_id: str) -> RunningJob:
        """Return one running job."""
        return self._resident(self._cluster.attempts[job_id])

    def stays(self) -> Mapping[str, Occupancy]:
        """Return what each job holds; unchanged holdings are the same objects as in the last cycle."""
        there = (live for live in self._cluster.attempts.values() if live.state in HELD)
        return {live.key[0]: _stay(live, self._cluster.firm_holdings(live)) for live in there}

    def _resident(self, live: LiveAttempt) -> RunningJob:
        known = self._known.get(live.key[0])
        if known is None:
            known = self._known[live.key[0]] = self._made(live)
        return known

    def _made(self, live: LiveAttempt) -> RunningJob:
        gang, since = _gang(live), since_seconds(live)
        if gang.estimate.predictable:
            gang = replace(gang, estimate=as_of(gang.estimate, self.now - max(since, live.estimate_seconds)))
        return RunningJob(
            gang,
            self._cluster.firm_holdings(live),
            since,
            preemptible=specs.is_preemptible(live.record.spec) and self._cluster.can_resize(live),
            stop_cost_seconds=self._costs.of(self.now - since),
            reclaimable=live.reclaimable,
        )


def _gang(live: LiveAttempt) -> Gang:
    if live.gang is None:
        spec = specs.spec_from_wire(live.record.spec)
        estimate = estimates.estimate_from_wire(live.record.estimate)
        live.gang = cycle.gang_with(live.key[0], spec, estimate, own_cores_of(live, spec), live.attempt.sizing)
    return live.gang


def _stay(live: LiveAttempt, holdings: tuple[Holding, ...]) -> Occupancy:
    """Return what an attempt holds: the cached object if it is unchanged."""
    known, since, lent = live.stay, since_seconds(live), live.reclaimable
    if known and (known.holdings, known.since_seconds, known.reclaimable) == (holdings, since, lent):
        return known
    live.stay = Occupancy(_gang(live).gpu_milli, holdings, since, lent)
    return live.stay


def since_seconds(live: LiveAttempt) -> float:
    """Return when an attempt started, or else was assigned, in unix seconds."""
    attempt = live.attempt
    return specs.seconds(attempt.start_time if attempt.HasField("start_time") else attempt.assign_time)
