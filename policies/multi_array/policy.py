"""CPU jobs and GPU jobs side by side, each with reserved resources: CODA's multi-array scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import Locality
from cotenant.core.model.refusal import Code, Refusal, format_duration, plural
from cotenant.core.model.validation import Violation
from cotenant.core.placement.assembly import place_on_best, place_on_fewest
from cotenant.core.placement.gang_allocation import take
from cotenant.core.placement.packing import able_to_hold, could_hold_all
from cotenant.core.placement.scores import BEST_FIT, ELSEWHERE, Weights, marked
from cotenant.core.placement.unschedulable import no_place, quick_shortage
from cotenant.core.policy.cluster_view import EMPTY_CLUSTER, ClusterView, Reclaim, RunningJob
from cotenant.policies.multi_array.borrowing import NodeOccupancy, counting, make_room
from cotenant.policies.multi_array.mean_waits import MeanWaits
from cotenant.policies.multi_array.split import Array, Demand, Held, array_of, split


class MultiArray:
    """Keep arrays of cores and of GPUs for CPU jobs, small gangs and large gangs, which lend idle resources.

    The multi-array job scheduler of CODA (Zhao et al., ICDCS 2020 [P]); its parameters, and how 2 and 3 GPUs count, are
    our reconstruction [R]. Each GPU reserves the cores that its jobs are expected to need (N*); the rest of a node
    belongs to the CPU array, as do nodes without GPUs. CPU jobs go there first. If that is not enough they borrow idle
    reserved cores, until a job with GPUs comes: the newest borrowers give way, to other places if there is room, else
    back to the queue. Gangs of fewer than 4 GPUs, most of which have one, belong to the array of small gangs, and
    borrow GPUs from that of large gangs on the same terms. Large gangs may take idle nodes of the small array for as
    long as they run. A gang is kept on one node if a node could hold it.

    Jobs with GPUs may take idle cores of the CPU array too, unless CPU jobs have to wait for long (the guard).

    >>> from cotenant.core.model.gang import Demand as Wanted, Part
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=4, cores=24), NodeShape(gpus=0, cores=24)])
    >>> policy, chance = MultiArray(), np.random.default_rng(0)
    >>> for cores in (16, 16):
    ...     gang = Gang("cpu", (Part("worker", 1, Wanted(cores=cores)),))
    ...     offer = policy.place(gang, ledger, chance)
    ...     print([share.node for share in offer], policy.lends(gang, offer, ledger))
    ...     _ = ledger.take(offer[0].node, Wanted(cores=cores))
    [1] False
    [0] True
    """

    name = "multi-array"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How the cluster is split, and which jobs may borrow.

        large_gpus: gangs of this many GPUs or more belong to the array of large gangs.
        resize_seconds: interval at which the split follows demand; demand older than this counts a third.
        warm_up_seconds: time until the first split; then twice as long, and so on up to resize_seconds.
        lend_cores: whether CPU jobs borrow reserved cores.
        lend_gpus: whether small gangs borrow GPUs of the large gangs' array.
        trial_cores: idle cores beside each busy GPU that are not lent, so that its job can try more cores.
        trial_seconds: time after a job's start for which those cores are kept; may be infinite.
        cpu_wait_seconds: mean wait of CPU jobs above which gangs with GPUs take none of their cores; may be infinite.
        guard_seconds: time over which that mean is taken.
        """

        large_gpus: int = 4
        resize_seconds: float = 14_400.0
        warm_up_seconds: float = 300.0
        lend_cores: bool = True
        lend_gpus: bool = True
        trial_cores: int = 1
        trial_seconds: float = 900.0
        cpu_wait_seconds: float = 600.0
        guard_seconds: float = 3600.0

        def check(self) -> Iterator[Violation]:
            """Yield a violation for each invalid option."""
            if self.large_gpus < 2:
                yield Violation("large_gpus", f"must be 2 or more, not {self.large_gpus}")
            if self.trial_cores < 0:
                yield Violation("trial_cores", f"must be 0 or more, not {self.trial_cores}")
            for name in ("resize_seconds", "warm_up_seconds", "guard_seconds"):
                if not 1 <= getattr(self, name) < math.inf:
                    yield Violation(name, f"must be 1 or more, not {getattr(self, name):g}")
            for name in ("trial_seconds", "cpu_wait_seconds"):
                if not getattr(self, name) >= 0:
                    yield Violation(name, f"must be 0 or more, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._demand = Demand(self.options.resize_seconds)
        self._waits = MeanWaits(self.options.guard_seconds)
        self._cluster_view: ClusterView = EMPTY_CLUSTER
        self._there: NodeOccupancy | None = None  # the jobs at the last refresh
        self._looked = False  # since the cluster view was set
        self._held = Held()
        self._counted_at: float | None = None
        self._gap_seconds = min(self.options.warm_up_seconds, self.options.resize_seconds)
        self._resizes_at = math.inf
        self._shapes: object = None  # of the nodes that were split

    def begin_cycle(self, cluster_view: ClusterView) -> None:
        """Note the cluster view; it is read at the first query."""
        self._cluster_view, self._looked = cluster_view, False

    def equivalence_key(self, gang: Gang) -> Hashable:
        """Group gangs with the same needs that are equally preemptible."""
        return gang.parts, gang.locality, _preemptible(gang)

    def equivalence_seconds(self, gang: Gang) -> float:
        """Return infinity: waits make no difference."""
        return math.inf

    def _refresh(self, ledger: Ledger) -> NodeOccupancy:
        """Count running jobs, and what was held since the last count; split the cluster if it is time."""
        now, there = self._cluster_view.now, self._there
        same = there is not None and (self._shapes is ledger.shapes or self._shapes == ledger.shapes)
        if self._looked and same and there is not None:
            return there
        if there is None or not same:
            there = self._there = NodeOccupancy(ledger, self.options.large_gpus)
        there.update(self._cluster_view.occupancies())
        if self._counted_at is None or now < self._counted_at:
            self._resizes_at = now + self._gap_seconds
        elif now > self._counted_at:
            self._demand.add(now - self._counted_at, self._held)
        self._held, self._counted_at = there.held, now
        if not same or now >= self._resizes_at:
            if now >= self._resizes_at:
                self._gap_seconds = min(2 * self._gap_seconds, self.options.resize_seconds)
                self._resizes_at = now + self._gap_seconds
            self._split = split(ledger, self._demand, self.options.large_gpus)
            self._large_first: Weights = {**BEST_FIT, marked(~self._split.large): ELSEWHERE}
            self._small_first: Weights = {**BEST_FIT, marked(~self._split.small): ELSEWHERE}
            self._unreserved: Counts = ledger.total_cores - self._split.reserved
        self._shapes, self._looked = ledger.shapes, True
        return there

    # Places ----------------------------------------------------------------------------------------------------

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer a place in the gang's own array, else in an array that lends to it."""
        there, with_gpus = self._refresh(ledger), gang.gpu_milli > 0
        by_wish = gang.locality is Locality.SERVER or not with_gpus  # gangs with GPUs ignore racks
        within = gang.locality if by_wish and gang.locality else Locality.ANYWHERE
        refusal = quick_shortage(gang, ledger, within=within)
        if not with_gpus:
            offer = None if refusal else self._for_cpus(gang, ledger, there)
            if offer is None:
                self._waits.refused(gang.job_id, self._cluster_view.now, gang.waited_seconds)
            return refusal or offer or self._no_cores(gang, ledger)
        if refusal:
            return refusal
        kept = self._kept(ledger, there)
        with nullcontext() if kept is None else counting(ledger, -kept):
            offer = self._for_gpus(gang, ledger)
        if offer is not None:
            return offer
        if kept is not None and kept.any() and self._for_gpus(gang, ledger) is not None:
            return self._guard_refusal()
        return no_place(gang, ledger, within=_within(gang, ledger))

    def _for_cpus(self, gang: Gang, ledger: Ledger, there: NodeOccupancy) -> Offer | None:
        """Place a gang without GPUs on the CPU array's cores; else on lent cores."""
        own = ledger.total_cores - ledger.free_cores  # in place from here on, for there are many nodes
        np.minimum(there.firm, own, out=own)
        np.subtract(self._unreserved, own, out=own)
        np.minimum(own, ledger.free_cores, out=own)
        if own.max(initial=0) >= min(
            part.demand.cores for part in gang.parts
        ):  # else there is no room for a single replica
            own -= ledger.free_cores
            with counting(ledger, np.maximum(own, -ledger.free_cores, out=own)):
                if (offer := _cores_for(gang, ledger)) is not None:
                    return offer
        if not _preemptible(gang):
            return _cores_for(gang, ledger) if self._exceeds_cpu_array(gang, ledger) else None
        if not self.options.lend_cores:
            return None
        young = there.young_gpus(self._cluster_view.now - self.options.trial_seconds)
        kept = self.options.trial_cores * np.minimum(young, ledger.total_gpus - ledger.free_gpus)
        with counting(ledger, -np.minimum(kept, ledger.free_cores)):
            return _cores_for(gang, ledger)

    def _exceeds_cpu_array(self, gang: Gang, ledger: Ledger) -> bool:
        """Return whether the CPU array could not hold a gang even if it were empty."""
        own = ledger.total_cores - self._split.reserved
        with counting(ledger, own - ledger.free_cores, ledger.total[2:] - ledger.free[2:]):
            return _cores_for(gang, ledger) is None

    def _no_cores(self, gang: Gang, ledger: Ledger) -> Refusal:
        if _cores_for(gang, ledger) is None:
            return no_place(gang, ledger, within=gang.locality or Locality.ANYWHERE)
        why = "it is not preemptible" if not _preemptible(gang) else "jobs on them are being tuned"
        if _preemptible(gang) and not self.options.lend_cores:
            why = "none are lent"
        free = int(ledger.free_cores[ledger.open].sum())
        return Refusal(
            Code.CAPACITY,
            f"needs {plural(gang.cores, 'core')}; {free} are free, but they are reserved for jobs with GPUs: {why}",
            "CPU jobs finish, or demand moves the split between the arrays",
            {"wanted_cores": float(gang.cores), "free_cores": float(free)},
            holds_seconds=max(1.0, min(self._resizes_at - self._cluster_view.now, self.options.trial_seconds)),
        )

    def _for_gpus(self, gang: Gang, ledger: Ledger, within: NDArray[np.bool_] | None = None) -> Offer | None:
        """Place a gang on one node of its array, else of another; on several if no node could hold it."""
        large = array_of(gang.gpu_milli, self.options.large_gpus) is Array.LARGE
        home = self._split.large if large else self._split.small
        allowed = within
        if not (large or self.options.lend_gpus):
            allowed = home if within is None else within & home
        able = able_to_hold(gang, ledger)
        if allowed is not None:
            able &= allowed
        if (offer := place_on_best(gang, ledger, able, self._large_first if large else self._small_first)) is not None:
            return offer
        if _within(gang, ledger) is Locality.SERVER:
            return None
        return place_on_fewest(gang, ledger, home if allowed is None else home & allowed) or place_on_fewest(
            gang, ledger, allowed
        )

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        """Return whether a gang exceeds its own array there, and count it among the running jobs."""
        there = self._refresh(ledger)
        array = array_of(gang.gpu_milli, self.options.large_gpus)
        if array is not Array.CPU:
            borrows = array is Array.SMALL and _preemptible(gang)
            return borrows and any(bool(self._split.large[share.node]) for share in offer)
        if gang.job_id not in there:
            self._waits.started(gang.job_id, self._cluster_view.now, gang.waited_seconds)
        cores: dict[int, int] = {}
        for share in offer:
            cores[share.node] = cores.get(share.node, 0) + gang.parts[share.part].demand.cores * share.replicas
        if _preemptible(gang):
            own = {node: int(ledger.total_cores[node] - self._split.reserved[node]) for node in cores}
            if any(count and there.firm[node] + count > own[node] for node, count in cores.items()):
                return True
        for node, count in cores.items():
            there.expect(node, count)
        return False

    # The guard ---------------------------------------------------------------------------------------------------

    def _kept(self, ledger: Ledger, there: NodeOccupancy, lent: Counts | int = 0) -> Counts | None:
        """Return the free cores of each node that gangs with GPUs may not take; `lent` cores count as free.

        None if they may take all.
        """
        if self._waits.mean(self._cluster_view.now) <= self.options.cpu_wait_seconds:
            return None
        free = ledger.free_cores + lent
        held = ledger.total_cores - ledger.free_cores
        if not held.any():
            return None
        by_gpus = np.maximum(held - there.firm - there.lent_cores, 0)
        kept: Counts = free - np.clip(self._split.reserved - by_gpus, 0, free)
        return kept

    def _guard_refusal(self) -> Refusal:
        mean, most = self._waits.mean(self._cluster_view.now), self.options.cpu_wait_seconds
        told = f"CPU jobs wait {format_duration(mean)} on average, more than {format_duration(most)}"
        return Refusal(
            Code.CAPACITY,
            f"needs more cores than are reserved for GPUs, and the cores of CPU jobs are not lent: {told}",
            "jobs with GPUs finish, or CPU jobs wait less",
            {"cpu_wait_seconds": mean, "cpu_wait_seconds_most": most},
            holds_seconds=max(1.0, self.options.guard_seconds / 60),
        )

    # Taking back -------------------------------------------------------------------------------------------------

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        """Reclaim lent cores for a gang with GPUs, and lent GPUs for a large gang."""
        there = self._refresh(ledger)
        if not gang.gpu_milli:
            return None
        large = array_of(gang.gpu_milli, self.options.large_gpus) is Array.LARGE
        able = there.borrowers
        able.exclude(fixed)
        if not able.any(gpus=large):
            return None
        with able.without_gpus(ledger) if large else nullcontext():
            kept = self._kept(ledger, there, able.cores)
            with counting(ledger, able.cores if kept is None else able.cores - kept, able.amounts):
                offer = self._for_gpus(gang, ledger)
        if offer is None:
            return None

        def on(node: int) -> Iterator[RunningJob]:
            return (self._cluster_view.running_job(job_id) for job_id in able.on(node, gpus=large))

        return self._make_room(gang, offer, on, ledger, there)

    def _make_room(
        self,
        gang: Gang,
        offer: Offer,
        able: Callable[[int], Iterable[RunningJob]],
        ledger: Ledger,
        there: NodeOccupancy,
    ) -> Reclaim | None:
        moves: list[tuple[RunningJob, Offer]] = []
        stops: list[RunningJob] = []
        with ledger.rolled_back():
            gone = make_room(gang, offer, able, ledger)
            if gone is None:
                return None
            for running_job in gone:
                if running_job.gang.gpu_milli:
                    there_is = self._for_gpus(running_job.gang, ledger, self._split.small)
                else:
                    there_is = self._for_cpus(running_job.gang, ledger, there)
                if there_is is None:
                    stops.append(running_job)
                else:
                    take(ledger, running_job.gang, there_is)
                    moves.append((running_job, there_is))
        return Reclaim(offer, tuple(stops), tuple(moves))


def _preemptible(gang: Gang) -> bool:
    return gang.spec is None or gang.spec.preemptible


def _within(gang: Gang, ledger: Ledger) -> Locality:
    """Return the level at which a gang with GPUs waits for its place."""
    if gang.locality is Locality.SERVER:
        return Locality.SERVER
    alone = gang.locality is not Locality.ANYWHERE and could_hold_all(gang, ledger)
    return Locality.SERVER if alone else Locality.ANYWHERE


def _cores_for(gang: Gang, ledger: Ledger) -> Offer | None:
    """Place a gang without GPUs where it strands the fewest GPUs."""
    if gang.locality is not Locality.SERVER:
        return place_on_fewest(gang, ledger)
    return place_on_best(gang, ledger, able_to_hold(gang, ledger))
