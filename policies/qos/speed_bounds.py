"""How a gang would run on one node, on two, and so on, and how much of that it needs to keep what it promises.

Theory of operation. A predictor judged some allocations (`core.predicting.paces`). Spreading a gang never makes it
faster, nor do fewer cores: so what was judged on as many nodes or more, with as many cores or fewer, bounds a placement
from below, and the best such bound stands for it [R]. A promise then is a share of that speed which neighbours must
leave:
- a rate: the promised one, divided by the judged one;
- a deadline: the work that is left at the judged pace, divided by the time that is left. A job that never falls below
  that share is done in time, so the share stays the same while it runs;
- a latency: what of their speed its replicas need for their batches to be answered in time (`core.placing.serving`).
A share above 1 cannot be kept there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.model.estimate import Candidate, CandidateEstimate
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.node import is_of_type
from cotenant.core.placement.candidate_allocations import SERVER_ROLE, chief
from cotenant.core.prediction.speed_table import Judged, Paces
from cotenant.core.sizing.replica_sizing import share_needed

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Pace:
    """How a gang runs undisturbed on so many nodes at most, and the share of that which keeps its promise.

    `speed` is in steps per second; where no rate is known, one over the seconds that are left.
    """

    nodes: float
    speed: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """The paces of a gang, the fewest nodes first; none where nothing is known. `until` is its deadline."""

    paces: tuple[Pace, ...] = ()
    promises: bool = False
    rate_min_per_second: float = 0.0
    until: float = math.inf
    latency_seconds: float = 0.0

    def on(self, nodes: int) -> Pace | None:
        """Give the pace on so many nodes; None where nobody judged so many."""
        return next((pace for pace in self.paces if pace.nodes >= nodes), None)

    @property
    def bound(self) -> bool:
        """Whether it can be told what placements keep its promise."""
        return self.promises and bool(self.paces)

    def share(self, nodes: int) -> float:
        """The share of its speed that its promise needs on so many nodes: 0 where it has none, or nobody can tell."""
        if not self.bound:
            return 0.0
        pace = self.on(nodes)
        return pace.share if pace else math.inf

    def hopeless(self, nodes: int) -> bool:
        """Tell whether no placement on so many nodes or more could keep the promise."""
        return self.bound and self.share(nodes) > 1 + ROUNDING


NOTHING = Outlook()


def promises(spec: JobSpec | None) -> bool:
    """Tell whether a job promises its user anything."""
    if spec is None:
        return False
    return bool(spec.qos.rate_min_per_second or spec.qos.latency_seconds) or spec.deadline_seconds is not None


def outlook(gang: Gang, now: float) -> Outlook:
    """Tell how a gang would run if it started now, as far as its estimate says; the promise is its spec's."""
    spec = gang.spec
    if spec is None:
        return NOTHING
    qos = spec.qos
    until = math.inf if spec.deadline_seconds is None else spec.deadline_seconds
    bound = promises(spec)
    if not bound:
        return Outlook(tuple([pace for pace, _ in _paces(gang, spec)])) if gang.estimate.candidates else NOTHING
    paces = tuple([_with_share(pace, left, spec, now, until) for pace, left in _paces(gang, spec)])
    if qos.latency_seconds:
        paces = _answering(gang, paces)
    elif qos.rate_min_per_second and not Paces.of(gang.estimate).rates:
        paces = ()  # a promised rate is not judged by the time that is left
    return Outlook(paces, bound, qos.rate_min_per_second, until, qos.latency_seconds)


def _with_share(pace: Pace, left_seconds: float | None, spec: JobSpec, now: float, until: float) -> Pace:
    share = spec.qos.rate_min_per_second / pace.speed
    if until < math.inf and left_seconds is not None:
        share = max(share, left_seconds / (until - now) if until > now else math.inf)
    return Pace(pace.nodes, pace.speed, share)


def _paces(gang: Gang, spec: JobSpec) -> list[tuple[Pace, float | None]]:
    """Give the undisturbed paces, and how long the rest of the job takes at each."""
    judged = _usable(gang, spec)
    told = gang.estimate.remaining_seconds
    if not judged:
        return [(Pace(math.inf, 1 / max(told, ROUNDING)), told)] if told is not None else []
    own = _rate(judged[0][1])
    judged.sort(key=lambda one: -one[0].nodes)
    paces: list[tuple[Pace, float | None]] = []
    best = judged[0][1]
    for allocation, one in judged:  # from the most nodes on, so that the best so far holds for fewer as well
        best = one if _rate(one) > _rate(best) else best
        left = best.remaining_seconds
        if left is None and told is not None:
            left = told * own / _rate(best)
        if paces and paces[-1][0].nodes == allocation.nodes:
            paces.pop()
        paces.append((Pace(allocation.nodes, _rate(best)), left))
    return paces[::-1]


def _usable(gang: Gang, spec: JobSpec) -> list[Judged]:
    """Name the judged allocations that are no better than what the gang will hold."""
    rates = [(one.allocation, one) for one in gang.estimate.candidates if one.allocation and one.rate_per_second]
    if not rates:
        return []
    part = gang.parts[spec.roles.index(chief(spec))]
    servers = sum(role.replicas for role in spec.roles if role.name == SERVER_ROLE) if len(spec.roles) > 1 else 0
    cores = part.demand.cores or rates[0][0].cores  # a job that asks for no cores is taken to have what it needs

    def fits(one: Candidate) -> bool:
        team = not one.servers or (one.servers, one.workers) == (servers, spec.replicas - servers)
        kind = not one.gpu_type or one.gpu_type == part.demand.gpu_type
        return one.cores <= cores and team and (kind or is_of_type(one.gpu_type, part.demand.gpu_type))

    return [(one, told) for one, told in rates if fits(one)]


def _answering(gang: Gang, paces: tuple[Pace, ...]) -> tuple[Pace, ...]:
    """Judge a service by the latency of as many replicas as it has; nothing is known where that is not."""
    if gang.spec is None:
        return ()
    share = share_needed(gang.spec, gang.estimate, sum(part.replicas for part in gang.parts))
    if share is None:
        return ()
    return tuple(Pace(pace.nodes, pace.speed, share) for pace in paces or (Pace(math.inf, 1.0),))


def _rate(one: CandidateEstimate) -> float:
    return one.rate_per_second or 0.0
