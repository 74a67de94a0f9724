"""Who holds what now, for placement policies that look at more than what is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotenant.codec import estimates, specs
from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.estimate import as_of
from cotenant.core.model.gang import Gang
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.policy.cluster_view import Resident, Scene, Stay
from cotenant.core.scheduling import cycle
from cotenant.services.placement.attempts.tracked_attempt import own_cores_of
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Live

HELD = frozenset({AttemptState.ASSIGNED, AttemptState.RUNNING})


@dataclass(frozen=True, slots=True)
class StopCosts:
    """What a stop is taken to cost a job, of whose checkpoints nobody tells: the run since the last one, and a restart.

    A job loses what it has run since its start, or `checkpoint_seconds` where that is less: jobs are taken to save
    their work about that often, or within their grace [C].
    """

    checkpoint_seconds: float = 300.0
    restart_seconds: float = 60.0

    def of(self, ran_seconds: float) -> float:
        """Seconds of run time that a stop costs.

        >>> StopCosts().of(20), StopCosts().of(7200)
        (80.0, 360.0)
        """
        return min(max(0.0, ran_seconds), self.checkpoint_seconds) + self.restart_seconds


STOP_COSTS = StopCosts()


class Moment(Scene):
    """The attempts that hold something at a moment and do not stop, each made a resident only when somebody looks.

    Times are unix seconds. One that stops is not there any more, in a policy's eyes: what it holds counts as free. One
    whose cores are being changed, or one of whose agents is away, is not preemptible for now.
    """

    def __init__(self, cluster: Cluster, costs: StopCosts, now: float) -> None:
        self.now = now
        self._cluster, self._costs = cluster, costs
        self._known: dict[str, Resident] = {}

    def residents(self) -> Mapping[str, Resident]:
        """Give all that hold something, by job id."""
        return {live.key[0]: self._resident(live) for live in self._cluster.attempts.values() if live.state in HELD}

    def on(self, node: int) -> Sequence[Resident]:
        """Give those on a node."""
        there = self._cluster.on_node(self._cluster.node_at(node).id)
        return [self._resident(live) for live in there if live.state in HELD]

    def resident(self, job_id: str) -> Resident:
        """Give one that holds something."""
        return self._resident(self._cluster.attempts[job_id])

    def stays(self) -> Mapping[str, Stay]:
        """Say of all what they hold: the objects of the last cycle, but for those that hold something else now."""
        there = (live for live in self._cluster.attempts.values() if live.state in HELD)
        return {live.key[0]: _stay(live, self._cluster.firm(live)) for live in there}

    def _resident(self, live: Live) -> Resident:
        known = self._known.get(live.key[0])
        if known is None:
            known = self._known[live.key[0]] = self._made(live)
        return known

    def _made(self, live: Live) -> Resident:
        gang, since = _gang(live), since_seconds(live)
        if gang.estimate.predictable:
            gang = replace(gang, estimate=as_of(gang.estimate, self.now - max(since, live.told_seconds)))
        return Resident(
            gang,
            self._cluster.firm(live),
            since,
            preemptible=not live.record.spec.not_preemptible and self._cluster.can_resize(live),
            stop_cost_seconds=self._costs.of(self.now - since),
            reclaimable=live.reclaimable,
        )


def _gang(live: Live) -> Gang:
    if live.gang is None:
        spec = specs.spec_from_wire(live.record.spec)
        estimate = estimates.estimate_from_wire(live.record.estimate)
        live.gang = cycle.gang_with(live.key[0], spec, estimate, own_cores_of(live, spec), live.attempt.sizing)
    return live.gang


def _stay(live: Live, holdings: tuple[Holding, ...]) -> Stay:
    """Say what an attempt holds; the object that it has, where that is still so."""
    known, since, lent = live.stay, since_seconds(live), live.reclaimable
    if known and (known.holdings, known.since_seconds, known.reclaimable) == (holdings, since, lent):
        return known
    live.stay = Stay(_gang(live).gpu_milli, holdings, since, lent)
    return live.stay


def since_seconds(live: Live) -> float:
    """When an attempt began to run, or else was given its places, in unix seconds."""
    attempt = live.attempt
    return specs.seconds(attempt.start_time if attempt.HasField("start_time") else attempt.assign_time)
