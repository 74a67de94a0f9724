"""Where every promise is kept, the neighbours' too."""

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
from cotenant.core.placement.unschedulable import no_place, plain_shortage
from cotenant.core.policy.cluster_view import NOBODY, Scene
from cotenant.core.policy.protocols import needs
from cotenant.policies.qos.neighbours import Neighbours
from cotenant.policies.qos.search import ALL, Found, Heeded, Search, fewest_nodes
from cotenant.policies.qos.speed_bounds import NOTHING, ROUNDING, Outlook, outlook, promises

REMEMBERED_MAX = 1024
STRETCH_MAX = 1e6


@dataclass(slots=True)
class _Roomless:
    """What was free, `at` a mark of the ledger, when there was no room for some gangs; until the `mark` no more was."""

    at: int
    mark: int
    free: tuple[Counts, ...]
    open: NDArray[np.bool_]

    @classmethod
    def now(cls, ledger: Ledger) -> _Roomless:
        """Note what is free."""
        return cls(ledger.mark, ledger.mark, tuple([one.copy() for one in _free(ledger)]), ledger.open.copy())

    def holds(self, ledger: Ledger) -> bool:
        """Tell whether nowhere more is free than then; where GPUs are shared that cannot be told."""
        if not np.array_equal(self.open, ledger.open):
            return False
        if self.mark != ledger.mark:
            if ledger.sharing.any() or any(
                (now > then).any() for now, then in zip(_free(ledger), self.free, strict=True)
            ):
                return False
            self.mark = ledger.mark
        return True


def _free(ledger: Ledger) -> tuple[Counts, ...]:
    return ledger.free_gpus, ledger.free_cores, ledger.free_memory


class KeepsPromises:
    """Of the placements that keep every promise, the neighbours' too, choose the most packed, or the fastest one.

    That is how GENIE places (Chen et al., TPDS 2020 [D]): placements are enumerated, one node first, then several; kept
    are those in which a gang makes its promised rate, its deadline or its latency, and none of those who run already
    falls below its own. GENIE then takes the one of fewest GPU-seconds, which is the fastest, for a gang holds the same
    GPUs everywhere (`prefer=fastest`). Unless that is asked for, the one on the fewest nodes is taken, and of these the
    one that leaves the least in fragments, by best fit: more jobs keep their promises that way [R], for the quiet
    servers stay free for those who need them.

    Rates and times are those that a predictor told by candidate allocations (`core.placing.outlook`); what neighbours
    leave of them follows Philly's measurements (`core.placing.interference`, `core.placing.neighbours`). A job that
    promises nothing goes where nobody's promise breaks. So does one whose promise no placement could keep, even on an
    empty cluster, for lost causes should hold up nobody [R]. Where nothing is known of a job, nothing can be judged,
    and it is placed as close together as there is room for. Of what spreads a gang so far that it takes more than a
    quarter more GPU-seconds (`stretch_max`) nothing is taken: what it would waste others' promises need [R].

    Two servers would halve the speed, and the job promises more:

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
        """What is believed of neighbours, and what is chosen of that which keeps all promises.

        interference: what gangs on one server cost each other: as `philly` measured, or `none`.
        prefer: the most `packed` placement: the fewest nodes, and of these those with the least that is free; or the
          `fastest`, which takes the fewest GPU-seconds.
        stretch_max: a gang waits rather than be spread over nodes on which it would take more than so many times the
          GPU-seconds that it takes on the fewest, unless it asks for `anywhere`.
        """

        interference: Literal["philly", "none"] = "philly"
        prefer: Literal["packed", "fastest"] = "packed"
        stretch_max: float = 1.25

        def check(self) -> Iterator[Violation]:
            """Name what makes no sense."""
            if not 1 <= self.stretch_max <= STRETCH_MAX:
                yield Violation("stretch_max", f"must be from 1 to {STRETCH_MAX:g}, not {self.stretch_max:g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._crowds = self.options.interference != "none"
        self._packed = self.options.prefer == "packed"
        self._scene: Scene = NOBODY
        self._neighbours: Neighbours | None = None
        self._refused: dict[Hashable, tuple[Refusal, _Roomless]] = {}  # by what gangs need, for the lack of room
        self._last: _Roomless | None = None

    def see(self, scene: Scene) -> None:
        """Note who is where, and what time it is."""
        self._scene = scene

    def alike(self, gang: Gang) -> Hashable:
        """Gangs that need the same, suffer alike from distance and promise nothing; who promises has nobody like it."""
        spec = gang.spec
        if spec is not None and promises(spec):
            return needs(gang), gang.job_id
        if not _spreadable(gang) or not gang.estimate.candidates:
            return needs(gang)
        return needs(gang), tuple([one.rate_per_second for one in gang.estimate.candidates])

    def alike_seconds(self, gang: Gang) -> float:
        """For ever; that a deadline comes closer is told by the refusal."""
        return math.inf

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer places in which all promises are kept; else say whose stands in the way."""
        near = self._near(ledger)
        needed = needs(gang)
        if (known := self._refused.get(needed)) and known[1].holds(ledger):
            return known[0]
        if refusal := plain_shortage(gang, ledger, within=gang.locality or Locality.ANYWHERE):
            return self._noted(needed, refusal, ledger)
        judged = not self._packed or promises(gang.spec)  # else how fast it would be decides nothing
        view = outlook(gang, self._scene.now) if judged else NOTHING
        if view.bound and view.hopeless(fewest_nodes(gang, ledger)):
            view = replace(view, promises=False)
        most = self._nodes_max(gang, view, ledger)
        search = Search(gang, view, ledger, near, crowds=self._crowds, packed=self._packed, nodes_max=most)
        if found := search.best(ALL):
            return found.offer
        if close := search.best(Heeded(own=False, kind=False)):
            return self._broken(search, close)
        if far := search.best(Heeded(own=False, kind=False, near=False)):
            return self._too_far(search, far)
        return self._no_place(gang, ledger)

    def _nodes_max(self, gang: Gang, view: Outlook, ledger: Ledger) -> float:
        """On how many nodes a gang takes no more than the allowed multiple of the GPU-seconds of the fewest."""
        if gang.locality is Locality.ANYWHERE or not _spreadable(gang):
            return math.inf
        paces = view.paces or outlook(gang, self._scene.now).paces
        if len(paces) < 2 or (len(gang.parts) > 1 and not could_hold_all(gang, ledger)):
            return math.inf
        fewest = fewest_nodes(gang, ledger)
        best = next((pace.speed for pace in paces if pace.nodes >= fewest), 0.0)
        worth = [pace.nodes for pace in paces if pace.speed * self.options.stretch_max >= best * (1 - ROUNDING)]
        return math.inf if worth[-1] == paces[-1].nodes else max(worth[-1], fewest)

    def _no_place(self, gang: Gang, ledger: Ledger) -> Refusal:
        """Say that there is no place, whoever promises what, and remember it."""
        refusal = no_place(gang, ledger, within=gang.locality or Locality.ANYWHERE)
        return self._noted(needs(gang), refusal, ledger)

    def _noted(self, needed: Hashable, refusal: Refusal, ledger: Ledger) -> Refusal:
        if len(self._refused) >= REMEMBERED_MAX:
            self._refused.clear()
        last = self._last
        if last is None or last.at != ledger.mark or not np.array_equal(last.open, ledger.open):
            last = self._last = _Roomless.now(ledger)
        self._refused[needed] = refusal, last
        return refusal

    def bears(self, nodes: Sequence[int], ledger: Ledger) -> bool:
        """Tell whether all on some nodes keep their promises beside each other."""
        near = self._near(ledger)
        return not self._crowds or bool((near.spare_milli[list(nodes)] >= 0).all())

    def _near(self, ledger: Ledger) -> Neighbours:
        if self._neighbours is None or self._neighbours.ledger is not ledger:
            self._neighbours, self._refused, self._last = Neighbours(ledger), {}, None
        self._neighbours.follow(self._scene)
        return self._neighbours

    def _too_far(self, search: Search, far: Found) -> Refusal:
        """Say how many GPU-seconds the gang would take where there is room, and where it would take the fewest."""
        near = int(search.nodes_max)
        where = "one server" if near == 1 else f"{near} servers"
        paces = outlook(search.gang, self._scene.now).paces
        slow = next((pace for pace in paces if pace.nodes >= far.nodes), paces[-1])
        times = paces[0].speed / slow.speed
        detail = (
            f"would take {times:.3g} times as many GPU-seconds on {far.nodes} servers as on the fewest;"
            f" {self.options.stretch_max:g} times are allowed, so it waits for {where}: {_room_in_words(search)}"
        )
        alone = search.best(Heeded(near=False)) is not None  # else some promise stands in the way as well
        remedy = f"jobs on {where} finish" + (", or the job asks for locality anywhere" if alone else "")
        numbers = {"times": times, "nodes": float(far.nodes), "best_node_replicas": float(_room(search))}
        return Refusal(Code.QOS, detail, remedy, numbers, search.gang.locality)

    def _broken(self, search: Search, anywhere: Found) -> Refusal:
        """Say whose promise every placement would break."""
        told: list[str] = []
        remedies: list[str] = []
        numbers: dict[str, float] = {}
        holds = math.inf
        kind = search.best(Heeded(own=False))
        own = search.best(Heeded(kind=False)) if kind is None else None
        if kind is not None or own is None:
            words, numbers = _own_in_words(search, kind or anywhere)
            told.append(words)
            remedies.append("jobs on one server finish, or the job promises less")
            holds = _hopeless_in(search, self._scene.now)
        if kind is None:
            names = _slowed(search, own or anywhere, self._scene)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            told.append(f"would slow {shown} below what {'it promises' if len(names) == 1 else 'they promise'}")
            numbers["slowed_jobs"] = float(len(names))
            remedies.append(f"{shown} {'finishes' if len(names) == 1 else 'finish'}")
        return Refusal(Code.QOS, "; ".join(told), ", or ".join(remedies), numbers, search.gang.locality, False, holds)


def _spreadable(gang: Gang) -> bool:
    return sum(part.replicas for part in gang.parts) > 1


def _own_in_words(search: Search, found: Found) -> tuple[str, dict[str, float]]:
    """Tell how the gang would run, and what it promises."""
    view = search.view
    pace, best = view.on(found.nodes), view.paces[0]
    speed = pace.speed * found.left if pace else 0.0
    where = "on one server" if found.nodes == 1 else f"on {found.nodes} servers"
    numbers = {"speed": speed, "nodes": float(found.nodes)}
    asked: str
    if view.latency_seconds:
        told = f"would answer too late {where}, beside its neighbours"
        asked = f"its QoS asks for {view.latency_seconds:g} s"
    elif view.rate_min_per_second and speed < view.rate_min_per_second * (1 - ROUNDING):
        told = f"would run at {_rate(speed)} {where}" if pace else f"nobody knows how it would run {where}"
        asked = f"its QoS asks for {view.rate_min_per_second:g}"
        numbers["wanted"] = view.rate_min_per_second
    else:
        late = (pace.share / max(found.left, ROUNDING) - 1) * 100 if pace else math.inf
        told = f"would need {late:.0f} % more time {where} than its deadline leaves"
        told = told if pace else f"nobody knows how it would run {where}"
        asked = "its QoS asks for an end by its deadline"
    if view.latency_seconds or not view.rate_min_per_second:
        better = "on servers without other gangs it would be in time"
    else:
        better = f"on {'one server' if best.nodes < 2 else 'the fewest servers'} it would run at {best.speed:.3g}"
    numbers["best_node_replicas"] = float(_room(search))
    return f"{told}; {asked}; {better}: {_room_in_words(search)}", numbers


def _room_in_words(search: Search) -> str:
    replicas = _chief(search).replicas
    return f"the best has room for {_room(search)} of {plural(replicas, 'replica')}"


def _room(search: Search) -> int:
    """How many replicas with the most GPUs the node has room for that has room for most."""
    part = _chief(search)
    return int(np.minimum(search.ledger.room(part.demand), part.replicas).max(initial=0))


def _chief(search: Search) -> Part:
    return max(search.gang.parts, key=lambda part: part.demand.gpu_milli)


def _slowed(search: Search, found: Found, scene: Scene) -> list[str]:
    """Name those whose promise a placement breaks."""
    names = search.neighbours.broken_by(scene, search.own_milli(found.offer)) if search.crowds else []
    if search.parted and not names:
        names = search.neighbours.shared_with(scene, [share.node for share in found.offer])
    return names


def _hopeless_in(search: Search, now: float) -> float:
    """In how long no placement can make the deadline any more, so that the gang goes anywhere."""
    view = search.view
    if math.isinf(view.until) or not view.paces:
        return math.inf
    return max(0.0, (view.until - now) * (1 - view.paces[0].share))


def _rate(speed: float) -> str:
    return f"{speed:.3g} steps/s"
