"""Speeds of a gang on one node, on two, and so on, and the share of each that its objective needs.

Theory of operation. A predictor judged some allocations (`cotenant.core.prediction.speed_table`). Spreading a gang
never makes it faster, nor do fewer cores: so a judgment on as many nodes or more, with as many cores or fewer, bounds a
placement from below, and the best such bound is used [R]. An objective then is a share of that speed which neighbors
must leave:

- a rate: the required rate, divided by the judged one;
- a deadline: the remaining work at the judged speed, divided by the remaining time. A job that never falls below that
  share is done in time, so the share stays the same while it runs;
- a latency: the share of their speed that its replicas need to answer their batches in time
  (`cotenant.core.sizing.replica_sizing`).

A share above 1 cannot be met there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.model.estimate import Candidate, CandidateEstimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.placement.candidate_allocations import SERVER_ROLE, largest_role
from cotenant.core.prediction.speed_table import Judged, SpeedTable
from cotenant.core.sizing.replica_sizing import share_needed

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Pace:
    """An undisturbed speed on at most this many nodes, and the share of it that meets the objective.

    `speed` is in steps per second; if no rate is known, the inverse of the remaining seconds.
    """

    nodes: float
    speed: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeedBounds:
    """The speeds of a gang, the fewest nodes first; none if unknown. `until` is its deadline."""

    paces: tuple[Pace, ...] = ()
    has_objective: bool = False
    rate_min_per_second: float = 0.0
    until: float = math.inf
    latency_seconds: float = 0.0

    def on(self, nodes: int) -> Pace | None:
        """Return the speed on this many nodes; None if unknown."""
        return next((pace for pace in self.paces if pace.nodes >= nodes), None)

    @property
    def bound(self) -> bool:
        """Whether it is known which placements meet the objective."""
        return self.has_objective and bool(self.paces)

    def share(self, nodes: int) -> float:
        """Return the share of the speed on this many nodes that the objective needs; 0 if none or unknown."""
        if not self.bound:
            return 0.0
        pace = self.on(nodes)
        return pace.share if pace else math.inf

    def unattainable(self, nodes: int) -> bool:
        """Return whether no placement on this many nodes or more could meet the objective."""
        return self.bound and self.share(nodes) > 1 + ROUNDING


UNKNOWN_BOUNDS = SpeedBounds()


def has_objective(spec: JobSpec | None) -> bool:
    """Return whether a job has an objective."""
    if spec is None:
        return False
    return bool(spec.qos.rate_min_per_second or spec.qos.latency_seconds) or spec.deadline_seconds is not None


def speed_bounds(gang: Gang, now: float) -> SpeedBounds:
    """Return a gang's speeds if it started now, by its estimate; the objective comes from its spec."""
    spec = gang.spec
    if spec is None:
        return UNKNOWN_BOUNDS
    qos = spec.qos
    until = math.inf if spec.deadline_seconds is None else spec.deadline_seconds
    bound = has_objective(spec)
    if not bound:
        return (
            SpeedBounds(tuple([pace for pace, _ in _paces(gang, spec)])) if gang.estimate.candidates else UNKNOWN_BOUNDS
        )
    paces = tuple([_with_share(pace, left, spec, now, until) for pace, left in _paces(gang, spec)])
    if qos.latency_seconds:
        paces = _with_latency_share(gang, paces)
    elif qos.rate_min_per_second and not SpeedTable.of(gang.estimate).rates:
        paces = ()  # a rate objective is not judged by the remaining time
    return SpeedBounds(paces, bound, qos.rate_min_per_second, until, qos.latency_seconds)


def _with_share(pace: Pace, left_seconds: float | None, spec: JobSpec, now: float, until: float) -> Pace:
    share = spec.qos.rate_min_per_second / pace.speed
    if until < math.inf and left_seconds is not None:
        share = max(share, left_seconds / (until - now) if until > now else math.inf)
    return Pace(pace.nodes, pace.speed, share)


def _paces(gang: Gang, spec: JobSpec) -> list[tuple[Pace, float | None]]:
    """Return the undisturbed speeds, and the job's remaining time at each."""
    judged = _usable(gang, spec)
    told = gang.estimate.remaining_seconds
    if not judged:
        return [(Pace(math.inf, 1 / max(told, ROUNDING)), told)] if told is not None else []
    own = _rate(judged[0][1])
    judged.sort(key=lambda one: -one[0].nodes)
    paces: list[tuple[Pace, float | None]] = []
    best = judged[0][1]
    for allocation, one in judged:  # from the most nodes down, so that the best so far holds for fewer as well
        best = one if _rate(one) > _rate(best) else best
        left = best.remaining_seconds
        if left is None and told is not None:
            left = told * own / _rate(best)
        if paces and paces[-1][0].nodes == allocation.nodes:
            paces.pop()
        paces.append((Pace(allocation.nodes, _rate(best)), left))
    return paces[::-1]


def _usable(gang: Gang, spec: JobSpec) -> list[Judged]:
    """Return the judged allocations that are no better than what the gang will hold."""
    part = gang.parts[spec.roles.index(largest_role(spec))]
    rates = [
        (one.allocation, one)
        for one in gang.estimate.candidates
        if one.allocation and one.rate_per_second and one.allocation.gpu_type in ("", part.demand.gpu_type)
    ]
    if not rates:
        return []
    servers = sum(role.replicas for role in spec.roles if role.name == SERVER_ROLE) if len(spec.roles) > 1 else 0
    cores = part.demand.cores or rates[0][0].cores  # a job that requests no cores is assumed to have enough

    def fits(one: Candidate) -> bool:
        team = not one.servers or (one.servers, one.workers) == (servers, spec.replicas - servers)
        return one.cores <= cores and team

    return [(one, told) for one, told in rates if fits(one)]


def _with_latency_share(gang: Gang, paces: tuple[Pace, ...]) -> tuple[Pace, ...]:
    """Return a service's speeds, judged by the latency of its replicas; none if that is unknown."""
    if gang.spec is None:
        return ()
    share = share_needed(gang.spec, gang.estimate, sum(part.replicas for part in gang.parts))
    if share is None:
        return ()
    return tuple(Pace(pace.nodes, pace.speed, share) for pace in paces or (Pace(math.inf, 1.0),))


def _rate(one: CandidateEstimate) -> float:
    return one.rate_per_second or 0.0
