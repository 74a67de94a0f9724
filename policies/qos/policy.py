"""Placement that meets every objective, including the neighbors'."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.model.validation import Violation
from cotenant.core.placement.packing import could_hold_all
from cotenant.core.placement.unschedulable import no_place, quick_shortage
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView
from cotenant.core.policy.protocols import default_equivalence_key
from cotenant.policies.qos.neighbours import Neighbours
from cotenant.policies.qos.search import ALL_CONSTRAINTS, Constraints, Found, Search, fewest_nodes
from cotenant.policies.qos.speed_bounds import ROUNDING, UNKNOWN_BOUNDS, SpeedBounds, has_objective, speed_bounds

REMEMBERED_MAX = 1024
STRETCH_MAX = 1e6


@dataclass(slots=True)
class _RefusedState:
    """Free resources `at` a mark of the ledger, when gangs were refused; no more was free until `mark`."""

    at: int
    mark: int
    free: Counts
    open: NDArray[np.bool_]

    @classmethod
    def now(cls, ledger: Ledger) -> _RefusedState:
        """Copy the free resources."""
        return cls(ledger.mark, ledger.mark, ledger.free.copy(), ledger.open.copy())

    def holds(self, ledger: Ledger) -> bool:
        """Return whether no node has more free than then; always False with shared GPUs."""
        if not np.array_equal(self.open, ledger.open):
            return False
        if self.mark != ledger.mark:
            if ledger.sharing.any() or (ledger.free > self.free).any():
                return False
            self.mark = ledger.mark
        return True


class KeepsPromises:
    """Of the placements that meet every objective, the neighbors' too, choose the most packed, or the fastest.

    That is how GENIE places (Chen et al., TPDS 2020 [D]): placements are enumerated, one node first, then several; kept
    are those in which a gang meets its rate, its deadline or its latency, and no running job falls below its own. GENIE
    then takes the placement with the fewest GPU-seconds, which is the fastest, since a gang holds the same GPUs
    everywhere (`prefer=fastest`). By default, the placement on the fewest nodes is taken, and of these the one that
    leaves the least fragmentation, by best fit: more jobs meet their objectives that way [R], because quiet servers
    stay free for jobs that need them.

    Rates and times are predictions by candidate allocation (`cotenant.policies.qos.speed_bounds`); what neighbors leave
    of them follows Philly's measurements (`cotenant.core.placement.interference`, `cotenant.policies.qos.neighbours`).
    A job without objectives goes where no other job's objective is violated. So does a job whose objective no placement
    could meet, even on an empty cluster, because it should delay no other job [R]. A job without predictions cannot be
    judged, and is placed as close together as possible. Placements that spread a gang so far that it takes over a
    quarter more GPU-seconds (`stretch_max`) are not taken: other objectives need what that would waste [R].

    Two servers would halve the speed, and the job's objective is higher:

    >>> from cotenant.core.placement.candidate_allocations import Candidate
    >>> from cotenant.core.model.estimate import CandidateEstimate, Estimate
    >>> from cotenant.core.model.gang import Demand, Part
    >>> from cotenant.core.model.job import JobSpec, Qos, Request, Role
    >>> from cotenant.core.model.node import NodeShape
    >>> role = Role("worker", 4, Request(gpu_milli=1000, cores=0))
    >>> told = [CandidateEstimate(rate, allocation=Candidate(0, 1000, nodes)) for nodes, rate in ((1, 4.4), (2, 3.6))]
    >>> gang = Gang(
    ...     "a",
    ...     (Part("worker", 4, Demand(1000)),),
    ...     spec=JobSpec(roles=(role,), qos=Qos(rate_min_per_second=4.0)),
    ...     estimate=Estimate(candidates=tuple(told)),
    ... )
    >>> ledger = Ledger([NodeShape(gpus=4, cores=8)] * 2)
    >>> for node in (0, 1):
    ...     _ = ledger.take(node, Demand(gpu_milli=1000), 2)
    >>> print(KeepsPromises().place(gang, ledger, np.random.default_rng(0)))
    QOS: would run at 3.6 steps/s on 2 servers; its QoS asks for 4; on one server it would run at 4.4: the best has \
room for 2 of 4 replicas
    """

    name = "qos"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """The interference model, and the choice among placements that meet all objectives.

        interference: mutual slowdown of gangs on one server: as measured by `philly`, or `none`.
        prefer: the most `packed` placement: the fewest nodes, and of these those with the least free; or the `fastest`,
          which takes the fewest GPU-seconds.
        stretch_max: a gang waits rather than take more than this multiple of the GPU-seconds that it takes on the
          fewest nodes, unless its locality is `anywhere`.
        """

        interference: Literal["philly", "none"] = "philly"
        prefer: Literal["packed", "fastest"] = "packed"
        stretch_max: float = 1.25

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if not 1 <= self.stretch_max <= STRETCH_MAX:
                yield Violation("stretch_max", f"must be from 1 to {STRETCH_MAX:g}, not {self.stretch_max:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._interferes = self.options.interference != "none"
        self._packed = self.options.prefer == "packed"
        self._cluster_view: ClusterView = EMPTY_CLUSTER
        self._neighbours: Neighbours | None = None
        self._refused: dict[Hashable, tuple[Refusal, _RefusedState]] = {}  # by the needs of gangs, for lack of room
        self._last: _RefusedState | None = None

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        """Note the running jobs and the time."""
        self._cluster_view = cluster_view

    def equivalence_key(self, gang: Gang) -> Hashable:
        """Group gangs with equal needs and equal speeds but no objective; a gang with an objective is its own class."""
        spec = gang.spec
        if spec is not None and has_objective(spec):
            return default_equivalence_key(gang), gang.job_id
        if not _spreadable(gang) or not gang.estimate.candidates:
            return default_equivalence_key(gang)
        return default_equivalence_key(gang), tuple([one.rate_per_second for one in gang.estimate.candidates])

    def equivalence_seconds(self, gang: Gang) -> float:
        """Return infinity; the refusal expires as a deadline comes closer."""
        return math.inf

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer places in which all objectives are met; else refuse with the objective that would be violated."""
        near = self._near(ledger)
        needed = default_equivalence_key(gang)
        if (known := self._refused.get(needed)) and known[1].holds(ledger):
            return known[0]
        if refusal := quick_shortage(gang, ledger, within=gang.locality or Locality.ANYWHERE):
            return self._remember(needed, refusal, ledger)
        judged = not self._packed or has_objective(gang.spec)  # else its speed decides nothing
        view = speed_bounds(gang, self._cluster_view.now) if judged else UNKNOWN_BOUNDS
        if view.bound and view.unattainable(fewest_nodes(gang, ledger)):
            view = replace(view, has_objective=False)
        most = self._nodes_max(gang, view, ledger)
        search = Search(gang, view, ledger, near, interferes=self._interferes, packed=self._packed, nodes_max=most)
        if found := search.best(ALL_CONSTRAINTS):
            return found.offer
        if close := search.best(Constraints(own=False, neighbors=False)):
            return self._violation(search, close)
        if far := search.best(Constraints(own=False, neighbors=False, nodes_limit=False)):
            return self._too_far(search, far)
        return self._no_place(gang, ledger)

    def _nodes_max(self, gang: Gang, view: SpeedBounds, ledger: Ledger) -> float:
        """Return the number of nodes on which a gang stays within the allowed multiple of the minimum GPU-seconds."""
        if gang.locality is Locality.ANYWHERE or not _spreadable(gang):
            return math.inf
        paces = view.paces or speed_bounds(gang, self._cluster_view.now).paces
        if len(paces) < 2 or (len(gang.parts) > 1 and not could_hold_all(gang, ledger)):
            return math.inf
        fewest = fewest_nodes(gang, ledger)
        best = next((pace.speed for pace in paces if pace.nodes >= fewest), 0.0)
        worth = [pace.nodes for pace in paces if pace.speed * self.options.stretch_max >= best * (1 - ROUNDING)]
        return math.inf if worth[-1] == paces[-1].nodes else max(worth[-1], fewest)

    def _no_place(self, gang: Gang, ledger: Ledger) -> Refusal:
        """Refuse for lack of room, whatever the objectives, and remember that."""
        refusal = no_place(gang, ledger, within=gang.locality or Locality.ANYWHERE)
        return self._remember(default_equivalence_key(gang), refusal, ledger)

    def _remember(self, needed: Hashable, refusal: Refusal, ledger: Ledger) -> Refusal:
        if len(self._refused) >= REMEMBERED_MAX:
            self._refused.clear()
        last = self._last
        if last is None or last.at != ledger.mark or not np.array_equal(last.open, ledger.open):
            last = self._last = _RefusedState.now(ledger)
        self._refused[needed] = refusal, last
        return refusal

    def can_coexist(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        """Return whether all jobs on some nodes meet their objectives side by side."""
        near = self._near(ledger)
        return not self._interferes or bool((near.spare_milli[list(nodes)] >= 0).all())

    def _near(self, ledger: Ledger) -> Neighbours:
        if self._neighbours is None or self._neighbours.ledger is not ledger:
            self._neighbours, self._refused, self._last = Neighbours(ledger), {}, None
        self._neighbours.update(self._cluster_view)
        return self._neighbours

    def _too_far(self, search: Search, far: Found) -> Refusal:
        """Refuse with the GPU-seconds the gang would take where there is room, and where it would take the fewest."""
        near = int(search.nodes_max)
        where = "one server" if near == 1 else f"{near} servers"
        paces = speed_bounds(search.gang, self._cluster_view.now).paces
        slow = next((pace for pace in paces if pace.nodes >= far.nodes), paces[-1])
        times = paces[0].speed / slow.speed
        detail = (
            f"would take {times:.3g} times as many GPU-seconds on {far.nodes} servers as on the fewest;"
            f" {self.options.stretch_max:g} times are allowed, so it waits for {where}: {_room_text(search)}"
        )
        alone = search.best(Constraints(nodes_limit=False)) is not None  # else an objective stands in the way as well
        remedy = f"jobs on {where} finish" + (", or the job asks for locality anywhere" if alone else "")
        numbers = {"times": times, "nodes": float(far.nodes), "best_node_replicas": float(_room(search))}
        return Refusal(Code.QOS, detail, remedy, numbers, search.gang.locality)

    def _violation(self, search: Search, anywhere: Found) -> Refusal:
        """Refuse with the objectives that every placement would violate."""
        told: list[str] = []
        remedies: list[str] = []
        numbers: dict[str, float] = {}
        holds = math.inf
        sparing = search.best(Constraints(own=False))
        own = search.best(Constraints(neighbors=False)) if sparing is None else None
        if sparing is not None or own is None:
            words, numbers = _own_objective_text(search, sparing or anywhere)
            told.append(words)
            remedies.append("jobs on one server finish, or the job lowers its objective")
            holds = _unattainable_in(search, self._cluster_view.now)
        if sparing is None:
            names = _slowed(search, own or anywhere, self._cluster_view)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            told.append(f"would slow {shown} below {'its objective' if len(names) == 1 else 'their objectives'}")
            numbers["slowed_jobs"] = float(len(names))
            remedies.append(f"{shown} {'finishes' if len(names) == 1 else 'finish'}")
        return Refusal(Code.QOS, "; ".join(told), ", or ".join(remedies), numbers, search.gang.locality, False, holds)


def _spreadable(gang: Gang) -> bool:
    return sum(part.replicas for part in gang.parts) > 1


def _own_objective_text(search: Search, found: Found) -> tuple[str, dict[str, float]]:
    """Return how the gang would run compared with its objective, and the numbers."""
    view = search.view
    pace, best = view.on(found.nodes), view.paces[0]
    speed = pace.speed * found.left if pace else 0.0
    where = "on one server" if found.nodes == 1 else f"on {found.nodes} servers"
    numbers = {"speed": speed, "nodes": float(found.nodes)}
    asked: str
    if view.latency_seconds:
        told = f"would answer too late {where}, beside its neighbors"
        asked = f"its QoS asks for {view.latency_seconds:g} s"
    elif view.rate_min_per_second and speed < view.rate_min_per_second * (1 - ROUNDING):
        told = f"would run at {_rate(speed)} {where}" if pace else f"its speed {where} is unknown"
        asked = f"its QoS asks for {view.rate_min_per_second:g}"
        numbers["wanted"] = view.rate_min_per_second
    else:
        late = (pace.share / max(found.left, ROUNDING) - 1) * 100 if pace else math.inf
        told = f"would need {late:.0f} % more time {where} than its deadline leaves"
        told = told if pace else f"its speed {where} is unknown"
        asked = "its QoS asks for an end by its deadline"
    if view.latency_seconds or not view.rate_min_per_second:
        better = "on servers without other gangs it would be in time"
    else:
        better = f"on {'one server' if best.nodes < 2 else 'the fewest servers'} it would run at {best.speed:.3g}"
    numbers["best_node_replicas"] = float(_room(search))
    return f"{told}; {asked}; {better}: {_room_text(search)}", numbers


def _room_text(search: Search) -> str:
    replicas = _chief(search).replicas
    return f"the best has room for {_room(search)} of {plural(replicas, 'replica')}"


def _room(search: Search) -> int:
    """Return how many replicas with the most GPUs fit on the node with the most room."""
    part = _chief(search)
    return int(np.minimum(search.ledger.room(part.demand), part.replicas).max(initial=0))


def _chief(search: Search) -> Part:
    return max(search.gang.parts, key=lambda part: part.demand.gpu_milli)


def _slowed(search: Search, found: Found, cluster_view: ClusterView) -> list[str]:
    """Return the jobs whose objective a placement violates."""
    names = search.neighbours.violated_by(cluster_view, search.own_milli(found.offer)) if search.interferes else []
    if search.parted and not names:
        names = search.neighbours.shared_with(cluster_view, [share.node for share in found.offer])
    return names


def _unattainable_in(search: Search, now: float) -> float:
    """Return in how long no placement can meet the deadline, so that the gang may go anywhere."""
    view = search.view
    if math.isinf(view.until) or not view.paces:
        return math.inf
    return max(0.0, (view.until - now) * (1 - view.paces[0].share))


def _rate(speed: float) -> str:
    return f"{speed:.3g} steps/s"
