"""CPU jobs and GPU jobs beside each other, each with what is reserved for it: CODA's multi-array scheduler."""

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
from cotenant.core.model.refusal import Code, Refusal, plural, span_in_words
from cotenant.core.model.validation import Violation
from cotenant.core.placement.gang_allocation import take
from cotenant.core.placement.packing import able_to_hold, best_place, could_hold_all, on_fewest
from cotenant.core.placement.unschedulable import no_place, plain_shortage
from cotenant.core.policy.cluster_view import NOBODY, Reclaim, Resident, Scene
from cotenant.policies.multi_array.borrowing import Residence, counting, room_by
from cotenant.policies.multi_array.mean_waits import Waits
from cotenant.policies.multi_array.split import Array, Demand, Held, array_of, split


class MultiArray:
    """Keep arrays of cores and of GPUs for CPU jobs, small gangs and large ones, which lend each other what is idle.

    The multi-array job scheduler of CODA (Zhao et al., ICDCS 2020 [P]); its figures, and what 2 and 3 GPUs are, are our
    reconstruction [R]. Each GPU has the cores reserved that jobs on it are expected to need (N*); what is left of a
    node belongs to the CPU array, as do nodes without GPUs. CPU jobs go there first. Where that does not do they borrow
    reserved cores that are idle, until a job with GPUs comes: the newest borrowers give way, elsewhere if there is
    room, else back to the queue. Gangs of fewer than 4 GPUs, most of which have one, belong to the array of small
    gangs, and borrow GPUs from that of large ones on the same terms. Large gangs may have idle nodes of the small array
    for as long as they run. A gang is kept on one node where one could hold it.

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
        """How the cluster is split, and who may borrow.

        large_gpus: gangs of so many GPUs, and more, belong to the array of large gangs.
        resize_seconds: the split follows demand so often, and what is older by that counts a third.
        warm_up_seconds: it does so first after that time, then after twice as much, and so on up to resize_seconds.
        lend_cores: whether CPU jobs borrow reserved cores.
        lend_gpus: whether small gangs borrow GPUs of the large ones' array.
        trial_cores: idle cores beside each busy GPU that are not lent, so that its job can try more cores.
        trial_seconds: for so long after a job has started.
        cpu_wait_seconds: gangs with GPUs take no cores of CPU jobs while those wait for longer on average.
        guard_seconds: the average is taken over so many seconds.
        """

        large_gpus: int = 4
        resize_seconds: float = 604_800.0
        warm_up_seconds: float = 3600.0
        lend_cores: bool = True
        lend_gpus: bool = True
        trial_cores: int = 1
        trial_seconds: float = 900.0
        cpu_wait_seconds: float = 600.0
        guard_seconds: float = 3600.0

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            if self.large_gpus < 2:
                yield Violation("large_gpus", f"must be 2 or more, not {self.large_gpus}")
            if self.trial_cores < 0:
                yield Violation("trial_cores", f"must be 0 or more, not {self.trial_cores}")
            for name in ("resize_seconds", "warm_up_seconds", "guard_seconds"):
                if not 1 <= getattr(self, name) < math.inf:
                    yield Violation(name, f"must be a number from 1 on, not {getattr(self, name):g}")
            for name in ("trial_seconds", "cpu_wait_seconds"):
                if not getattr(self, name) >= 0:
                    yield Violation(name, f"must be 0 or more, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._demand = Demand(self.options.resize_seconds)
        self._waits = Waits(self.options.guard_seconds)
        self._scene: Scene = NOBODY
        self._there: Residence | None = None  # who was there when it was last looked
        self._looked = False  # since the scene was shown
        self._held = Held()
        self._counted_at: float | None = None
        self._gap_seconds = min(self.options.warm_up_seconds, self.options.resize_seconds)
        self._resizes_at = math.inf
        self._shapes: object = None  # of the nodes that were split

    def see(self, scene: Scene) -> None:
        """Take note of who is there; looked at when it is first asked about."""
        self._scene, self._looked = scene, False

    def alike(self, gang: Gang) -> Hashable:
        """Gangs with the same needs that may all be stopped, or none of them."""
        return gang.parts, gang.locality, _preemptible(gang)

    def alike_seconds(self, gang: Gang) -> float:
        """For ever: a wait makes no difference."""
        return math.inf

    def _look(self, ledger: Ledger) -> Residence:
        """Count who is there, and what was held since that was last done; split the cluster where it is time."""
        now, there = self._scene.now, self._there
        same = there is not None and (self._shapes is ledger.shapes or self._shapes == ledger.shapes)
        if self._looked and same and there is not None:
            return there
        if there is None or not same:
            there = self._there = Residence(ledger, self.options.large_gpus)
        there.follow(self._scene.stays())
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
            self._unreserved: Counts = ledger.total_cores - self._split.reserved
        self._shapes, self._looked = ledger.shapes, True
        return there

    # Places ----------------------------------------------------------------------------------------------------

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer a place in the gang's own array, else in one that lends to it."""
        there, with_gpus = self._look(ledger), gang.gpu_milli > 0
        by_wish = (
            gang.locality is Locality.SERVER or not with_gpus
        )  # of GPUs, what is free in one rack is not looked at
        within = gang.locality if by_wish and gang.locality else Locality.ANYWHERE
        refusal = plain_shortage(gang, ledger, within=within)
        if not with_gpus:
            offer = None if refusal else self._for_cpus(gang, ledger, there)
            if offer is None:
                self._waits.refused(gang.job_id, self._scene.now, gang.waited_seconds)
            return refusal or offer or self._no_cores(gang, ledger)
        if refusal:
            return refusal
        kept = self._kept(ledger, there)
        with nullcontext() if kept is None else counting(ledger, -kept):
            offer = self._for_gpus(gang, ledger)
        if offer is not None:
            return offer
        if kept is not None and kept.any() and self._for_gpus(gang, ledger) is not None:
            return self._guarded()
        return no_place(gang, ledger, within=_within(gang, ledger))

    def _for_cpus(self, gang: Gang, ledger: Ledger, there: Residence) -> Offer | None:
        """Put a gang without GPUs on the CPU array's cores; else on those that are lent."""
        own = ledger.total_cores - ledger.free_cores  # in place from here on, for there are many nodes
        np.minimum(there.firm, own, out=own)
        np.subtract(self._unreserved, own, out=own)
        np.minimum(own, ledger.free_cores, out=own)
        if own.max(initial=0) >= min(part.demand.cores for part in gang.parts):  # else not one replica has room
            own -= ledger.free_cores
            with counting(ledger, np.maximum(own, -ledger.free_cores, out=own)):
                if (offer := _cores_for(gang, ledger)) is not None:
                    return offer
        if not _preemptible(gang):
            return _cores_for(gang, ledger) if self._homeless(gang, ledger) else None
        if not self.options.lend_cores:
            return None
        young = there.young_gpus(self._scene.now - self.options.trial_seconds)
        kept = self.options.trial_cores * np.minimum(young, ledger.total_gpus - ledger.free_gpus)
        with counting(ledger, -np.minimum(kept, ledger.free_cores)):
            return _cores_for(gang, ledger)

    def _homeless(self, gang: Gang, ledger: Ledger) -> bool:
        """Tell whether the CPU array could not hold a gang even if it were empty."""
        own = ledger.total_cores - self._split.reserved
        with counting(ledger, own - ledger.free_cores, ledger.total_memory - ledger.free_memory):
            return _cores_for(gang, ledger) is None

    def _no_cores(self, gang: Gang, ledger: Ledger) -> Refusal:
        if _cores_for(gang, ledger) is None:
            return no_place(gang, ledger, within=gang.locality or Locality.ANYWHERE)
        why = "it may not be stopped for others" if not _preemptible(gang) else "jobs on them are being tuned"
        if _preemptible(gang) and not self.options.lend_cores:
            why = "none are lent"
        free = int(ledger.free_cores[ledger.open].sum())
        return Refusal(
            Code.CAPACITY,
            f"needs {plural(gang.cores, 'core')}; {free} are free, but they are reserved for jobs with GPUs: {why}",
            "CPU jobs finish, or demand moves the split between the arrays",
            {"wanted_cores": float(gang.cores), "free_cores": float(free)},
            holds_seconds=max(1.0, min(self._resizes_at - self._scene.now, self.options.trial_seconds)),
        )

    def _for_gpus(self, gang: Gang, ledger: Ledger, within: NDArray[np.bool_] | None = None) -> Offer | None:
        """Put a gang on one node of its array, else of another; on several of them where none could hold it."""
        large = array_of(gang.gpu_milli, self.options.large_gpus) is Array.LARGE
        home = self._split.large if large else self._split.small
        allowed = within
        if not (large or self.options.lend_gpus):
            allowed = home if within is None else within & home
        able = able_to_hold(gang, ledger)
        if allowed is not None:
            able &= allowed
        if able.any():
            for here in (home, ~home):
                if (offer := best_place(gang, ledger, able & here)) is not None:
                    return offer
        if _within(gang, ledger) is Locality.SERVER:
            return None
        return on_fewest(gang, ledger, home if allowed is None else home & allowed) or on_fewest(gang, ledger, allowed)

    def lends(self, gang: Gang, offer: Offer, ledger: Ledger) -> bool:
        """Tell whether a gang has more there than its array's own, and count it among those that are there."""
        there = self._look(ledger)
        array = array_of(gang.gpu_milli, self.options.large_gpus)
        if array is not Array.CPU:
            borrows = array is Array.SMALL and _preemptible(gang)
            return borrows and any(bool(self._split.large[share.node]) for share in offer)
        if gang.job_id not in there:
            self._waits.started(gang.job_id, self._scene.now, gang.waited_seconds)
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

    def _kept(self, ledger: Ledger, there: Residence, lent: Counts | int = 0) -> Counts | None:
        """Count the free cores of each node that gangs with GPUs may not take, `lent` ones being free too.

        None: they may take all.
        """
        if self._waits.mean(self._scene.now) <= self.options.cpu_wait_seconds:
            return None
        free = ledger.free_cores + lent
        held = ledger.total_cores - ledger.free_cores
        if not held.any():
            return None
        by_gpus = np.maximum(held - there.firm - there.lent_cores, 0)
        kept: Counts = free - np.clip(self._split.reserved - by_gpus, 0, free)
        return kept

    def _guarded(self) -> Refusal:
        mean, most = self._waits.mean(self._scene.now), self.options.cpu_wait_seconds
        told = f"CPU jobs wait {span_in_words(mean)} on average, more than {span_in_words(most)}"
        return Refusal(
            Code.CAPACITY,
            f"needs more cores than are reserved for GPUs, and those of CPU jobs are not lent: {told}",
            "jobs with GPUs finish, or CPU jobs wait shorter",
            {"cpu_wait_seconds": mean, "cpu_wait_seconds_most": most},
            holds_seconds=max(1.0, self.options.guard_seconds / 60),
        )

    # Taking back -------------------------------------------------------------------------------------------------

    def reclaim(self, gang: Gang, ledger: Ledger, rng: np.random.Generator, fixed: Collection[str]) -> Reclaim | None:
        """Take back cores that were lent for a gang with GPUs, and GPUs for a large one."""
        there = self._look(ledger)
        if not gang.gpu_milli:
            return None
        large = array_of(gang.gpu_milli, self.options.large_gpus) is Array.LARGE
        able = there.borrowers
        able.leave(fixed)
        if not able.any(gpus=large):
            return None
        with able.without_gpus(ledger) if large else nullcontext():
            kept = self._kept(ledger, there, able.cores)
            with counting(ledger, able.cores if kept is None else able.cores - kept, able.memory):
                offer = self._for_gpus(gang, ledger)
        if offer is None:
            return None

        def on(node: int) -> Iterator[Resident]:
            return (self._scene.resident(job_id) for job_id in able.on(node, gpus=large))

        return self._make_room(gang, offer, on, ledger, there)

    def _make_room(
        self, gang: Gang, offer: Offer, able: Callable[[int], Iterable[Resident]], ledger: Ledger, there: Residence
    ) -> Reclaim | None:
        moves: list[tuple[Resident, Offer]] = []
        stops: list[Resident] = []
        with ledger.undone():
            gone = room_by(gang, offer, able, ledger)
            if gone is None:
                return None
            for resident in gone:
                if resident.gang.gpu_milli:
                    there_is = self._for_gpus(resident.gang, ledger, self._split.small)
                else:
                    there_is = self._for_cpus(resident.gang, ledger, there)
                if there_is is None:
                    stops.append(resident)
                else:
                    take(ledger, resident.gang, there_is)
                    moves.append((resident, there_is))
        return Reclaim(offer, tuple(stops), tuple(moves))


def _preemptible(gang: Gang) -> bool:
    return gang.spec is None or gang.spec.preemptible


def _within(gang: Gang, ledger: Ledger) -> Locality:
    """Name the level at which a gang with GPUs waits for its place."""
    if gang.locality is Locality.SERVER:
        return Locality.SERVER
    alone = gang.locality is not Locality.ANYWHERE and could_hold_all(gang, ledger)
    return Locality.SERVER if alone else Locality.ANYWHERE


def _cores_for(gang: Gang, ledger: Ledger) -> Offer | None:
    """Put a gang without GPUs where it strands the fewest GPUs."""
    if gang.locality is not Locality.SERVER:
        return on_fewest(gang, ledger)
    return best_place(gang, ledger, able_to_hold(gang, ledger))
