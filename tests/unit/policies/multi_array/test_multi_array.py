"""What `multi-array` reserves, lends and reclaims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.policies.slow_multi_array import SlowMultiArray

from cotenant.conformance.worlds import picture, rng
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobKind, JobSpec, Locality
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.gang_allocation import Victim
from cotenant.core.policy.cluster_view import ClusterView, RunningJob
from cotenant.core.scheduling import cycle
from cotenant.policies.multi_array.borrowing import NodeOccupancy
from cotenant.policies.multi_array.policy import MultiArray
from cotenant.policies.multi_array.split import Demand as DemandOverTime
from cotenant.policies.multi_array.split import Held, split

OPTIONS = MultiArray.Options(warm_up_seconds=10.0, trial_cores=0)


def gang_of(job_id: str, gpus: int, cores: int, replicas: int = 1, *, preemptible: bool = True) -> Gang:
    kind = JobKind.TRAINING if gpus else JobKind.CPU
    part = Part("worker", replicas, Demand(gpus * 1000, cores))
    return Gang(job_id, (part,), kind=kind, spec=JobSpec(kind=kind, preemptible=preemptible))


@dataclass
class Floor(ClusterView):
    """A cluster that carries out a cycle's plan at once."""

    ledger: Ledger
    policy: MultiArray
    now: float = 0.0
    there: dict[str, RunningJob] = field(default_factory=dict)

    def running_jobs(self) -> Mapping[str, RunningJob]:
        return self.there

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        return [one for one in self.there.values() if any(holding.node == node for holding in one.holdings)]

    def ask(self, *gangs: Gang, victims: Sequence[Victim] = ()) -> cycle.Plan:
        before = picture(self.ledger)
        self.now += 1.0
        plan = cycle.place(gangs, self.ledger, self.policy, rng(), cluster_view=self, victims=victims)
        assert picture(self.ledger) == before
        for job_id in (*plan.stops, *plan.reclaimed, *(move.gang.job_id for move in plan.moves)):
            self.end(job_id)
        for start in (*plan.starts, *plan.moves):
            for holding in start.holdings:
                self.ledger.hold(holding)
            self.there[start.gang.job_id] = RunningJob(
                start.gang, start.holdings, self.now, reclaimable=start.reclaimable
            )
        return plan

    def end(self, job_id: str) -> None:
        for holding in self.there.pop(job_id).holdings:
            self.ledger.release(holding)

    def lent(self) -> set[str]:
        return {job_id for job_id, one in self.there.items() if one.reclaimable}


def floor(*shapes: NodeShape, options: MultiArray.Options = OPTIONS) -> Floor:
    return Floor(Ledger(shapes), MultiArray(options))


def split_by(place: Floor, cores: int) -> Floor:
    """Keep all GPUs busy with this many cores each, until the split follows."""
    for node, shape in enumerate(place.ledger.shapes):
        for gpu in range(shape.gpus):
            assert place.ask(gang_of(f"past-{node}-{gpu}", 1, cores)).starts
    for _ in range(2):
        place.now += 20.0
        place.ask(gang_of("nobody", 99, 1))
    for job_id in list(place.there):
        place.end(job_id)
    return place


def test_cpu_jobs_have_what_is_not_reserved_and_borrow_the_rest() -> None:
    place = split_by(floor(NodeShape(4, 24)), cores=4)
    place.ask(gang_of("own", 0, 8), gang_of("borrows", 0, 8), gang_of("borrows-too", 0, 8))
    assert place.lent() == {"borrows", "borrows-too"}


def test_a_gpu_job_reclaims_from_the_newest_borrower_only() -> None:
    place = split_by(floor(NodeShape(4, 24)), cores=4)
    for name in ("own", "first", "second"):
        place.ask(gang_of(name, 0, 8))
    plan = place.ask(gang_of("gpu", 1, 4))
    assert plan.reclaimed == ("second",)
    assert [start.needs_room for start in plan.starts] == [True]
    assert set(place.there) == {"own", "first", "gpu"}


def test_a_borrower_moves_where_there_is_room() -> None:
    place = split_by(floor(NodeShape(4, 16), NodeShape(0, 8)), cores=4)
    place.ask(gang_of("elsewhere", 0, 8))
    for name in ("borrows", "borrows-too"):
        place.ask(gang_of(name, 0, 8))
    place.end("elsewhere")
    plan = place.ask(gang_of("gpu", 1, 4))
    assert [move.gang.job_id for move in plan.moves] == ["borrows-too"]
    assert not plan.reclaimed
    assert place.lent() == {"borrows"}


def test_a_nonpreemptible_job_does_not_borrow() -> None:
    place = split_by(floor(NodeShape(4, 24)), cores=4)
    plan = place.ask(*(gang_of(name, 0, 8, preemptible=False) for name in ("own", "waits")))
    assert set(place.there) == {"own"}
    assert "reserved" in plan.refusals["waits"].detail


def test_small_gangs_borrow_gpus_and_make_room_for_large_gangs() -> None:
    place = floor(NodeShape(4, 24), NodeShape(4, 24))
    for number in range(8):
        place.ask(gang_of(f"small-{number}", 1, 1))
    assert place.lent() == {f"small-{number}" for number in range(4, 8)}
    plan = place.ask(gang_of("large", 4, 4))
    assert set(plan.reclaimed) == {f"small-{number}" for number in range(4, 8)}
    assert set(place.there) == {*(f"small-{number}" for number in range(4)), "large"}


def test_nothing_is_reclaimed_for_a_gang_that_would_not_fit() -> None:
    place = split_by(floor(NodeShape(4, 24)), cores=4)
    place.ask(gang_of("own", 0, 8), gang_of("borrows", 0, 8))
    plan = place.ask(gang_of("gpu", 1, 20))
    assert not plan.reclaimed
    assert "gpu" in plan.refusals


def test_gangs_with_gpus_take_no_cores_of_cpu_jobs_that_wait_for_long() -> None:
    place = split_by(floor(NodeShape(4, 24)), cores=4)
    late = Gang("late", gang_of("", 0, 1).parts, waited_seconds=3600.0)
    place.ask(late)
    plan = place.ask(gang_of("wide", 4, 20))
    assert "wait 60 min on average" in plan.refusals["wide"].detail
    assert plan.valid_seconds < 600.0
    place.now += 2 * OPTIONS.guard_seconds
    assert place.ask(gang_of("wide", 4, 20)).starts


def test_the_split_moves_after_the_warm_up_then_after_twice_as_long_up_to_the_interval() -> None:
    """Refusals for reserved cores hold until then."""
    options = MultiArray.Options(warm_up_seconds=10.0, resize_seconds=35.0, lend_cores=False, trial_seconds=math.inf)
    place = floor(NodeShape(4, 24), options=options)
    moves, foretold = [], []
    for _ in range(100):
        before = getattr(place.policy, "_split", None)
        refusal = place.ask(gang_of("waits", 0, 12)).refusals["waits"]
        if place.policy._split is not before:
            moves.append(place.now)
        foretold.append(place.now + refusal.holds_seconds)
    assert moves == [1.0, 11.0, 31.0, 66.0]
    assert sorted(set(foretold)) == [11.0, 31.0, 66.0, 101.0]


def test_other_nodes_are_split_at_once_and_the_same_nodes_when_it_is_time() -> None:
    place = floor(NodeShape(4, 24))
    place.ask(gang_of("a", 1, 4))
    split = place.policy._split
    for shapes, split_again in (([NodeShape(4, 24)], False), ([NodeShape(4, 24), NodeShape(2, 8)], True)):
        place = Floor(Ledger(shapes), place.policy, place.now)
        place.ask(gang_of("b", 1, 1))
        assert (place.policy._split is not split) == split_again
        assert len(place.policy._split.reserved) == len(shapes)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_split_follows_what_was_held_between_cycles_and_how_often_it_is_asked_changes_nothing(seed: int) -> None:
    """The slow twin: what was held from cycle to cycle, counted anew, and a schedule of splits kept beside it."""
    chance = np.random.default_rng(seed)
    shapes = [NodeShape(4, 24), NodeShape(8, 32), NodeShape(0, 12)]
    options = MultiArray.Options(warm_up_seconds=10.0, resize_seconds=35.0, cpu_wait_seconds=math.inf)
    place, twin = floor(*shapes, options=options), DemandOverTime(35.0)
    held, before, gap, due = Held(), None, 10.0, math.inf
    expected = None
    for turn in range(20):
        for job_id in sorted(place.there):
            if chance.random() < 0.3:
                place.end(job_id)
        now = place.now + 1.0
        if before is None:
            due = now + gap
        else:
            twin.add(now - before, held)
        counted = NodeOccupancy(place.ledger, options.large_gpus)
        counted.update(place.occupancies())
        held, before = counted.held, now
        if expected is None or now >= due:
            if now >= due:
                gap = min(2 * gap, 35.0)
                due = now + gap
            expected = split(Ledger(shapes), twin, options.large_gpus)
        some = [some_gang(f"job-{turn}-{number}", chance) for number in range(int(chance.integers(1, 4)))]
        place.ask(*some)
        assert place.now == now
        assert place.policy._split.reserved.tolist() == expected.reserved.tolist()
        assert place.policy._split.large.tolist() == expected.large.tolist()
        place.now += float(chance.choice([0.0, 2.0, 15.0]))


def test_a_clock_that_was_set_back_delays_the_next_split_by_its_interval() -> None:
    place = floor(NodeShape(4, 24), options=MultiArray.Options(warm_up_seconds=10.0, resize_seconds=1000.0))
    place.now = 500.0
    place.ask(gang_of("a", 1, 4))
    first, place.now = place.policy._split, 99.0
    for now, again in ((100.0, False), (109.0, False), (110.0, True)):
        place.now = now - 1.0
        place.ask(gang_of(f"at-{now:g}", 1, 1))
        assert (place.policy._split is not first) == again


def test_gangs_get_the_same_answer_only_with_the_same_needs_level_and_preemptibility() -> None:
    policy, gang = MultiArray(), gang_of("a", 1, 4)
    same = replace(gang_of("b", 1, 4), waited_seconds=99.0, tenant="other")
    others = [
        gang_of("a", 1, 5),
        gang_of("a", 1, 4, replicas=2),
        gang_of("a", 1, 4, preemptible=False),
        replace(gang, locality=Locality.SERVER),
    ]
    assert policy.equivalence_key(gang) == policy.equivalence_key(same)
    assert len({policy.equivalence_key(one) for one in (gang, *others)}) == 1 + len(others)
    assert policy.equivalence_key(replace(gang, spec=None)) == policy.equivalence_key(gang), "preemptible unless said"
    assert policy.equivalence_seconds(gang) == math.inf


def test_the_guard_keeps_cores_only_beyond_the_mean_wait_that_is_allowed() -> None:
    for waited, guarded in ((OPTIONS.cpu_wait_seconds, False), (OPTIONS.cpu_wait_seconds + 0.5, True)):
        place = split_by(floor(NodeShape(4, 24)), cores=4)
        place.ask(replace(gang_of("late", 0, 1), waited_seconds=waited))
        assert ("wide" in place.ask(gang_of("wide", 4, 20)).refusals) == guarded


@pytest.mark.parametrize(("lend_gpus", "preemptible"), [(True, True), (True, False), (False, True)])
def test_only_preemptible_small_gangs_borrow_gpus_and_only_where_gpus_are_lent(
    lend_gpus: bool, preemptible: bool
) -> None:
    options = replace(OPTIONS, lend_gpus=lend_gpus)
    place = floor(NodeShape(4, 24), NodeShape(4, 24), options=options)
    for number in range(8):
        place.ask(gang_of(f"small-{number}", 1, 1, preemptible=preemptible))
    assert len(place.there) == (8 if lend_gpus else 4)
    assert len(place.lent()) == (4 if lend_gpus and preemptible else 0)


@pytest.mark.parametrize(("trial_cores", "fits"), [(0, True), (2, True), (3, False)])
def test_idle_cores_beside_young_jobs_with_gpus_are_not_lent_until_they_are_tuned(trial_cores: int, fits: bool) -> None:
    """Of 24 cores 16 are reserved; two young jobs with GPUs hold 8 of them."""
    options = replace(OPTIONS, trial_cores=trial_cores, trial_seconds=60.0)
    place = split_by(floor(NodeShape(4, 24), options=options), cores=4)
    for name in ("young", "younger"):
        assert place.ask(gang_of(name, 1, 4)).starts
    assert place.ask(gang_of("own", 0, 8)).starts
    plan = place.ask(gang_of("borrows", 0, 4))
    assert bool(plan.starts) == fits
    if not fits:
        assert "jobs on them are being tuned" in plan.refusals["borrows"].detail
        place.now += 60.0
        assert place.ask(gang_of("borrows", 0, 4)).starts


JOBS = st.tuples(st.sampled_from([0, 0, 1, 1, 2, 4]), st.integers(1, 6), st.booleans())


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.sampled_from([NodeShape(4, 24), NodeShape(2, 12), NodeShape(0, 12), NodeShape(8, 32)]),
        min_size=1,
        max_size=3,
    ),
    st.lists(JOBS, min_size=1, max_size=25),
    st.lists(st.integers(0, 30), max_size=10),
    st.integers(1, 4),
)
def test_reserved_resources_are_available_and_own_resources_kept(
    shapes: list[NodeShape], jobs: list[tuple[int, int, bool]], ends: list[int], each: int
) -> None:
    place = split_by(floor(*shapes), cores=min([each, *(shape.cores // shape.gpus for shape in shapes if shape.gpus)]))
    names = count()
    for number, (gpus, cores, preemptible) in enumerate(jobs):
        firm = {job_id for job_id, one in place.there.items() if not one.reclaimable}
        plan = place.ask(gang_of(f"job{next(names)}", gpus, cores, preemptible=preemptible))
        assert not firm & {*plan.reclaimed, *plan.stops, *(move.gang.job_id for move in plan.moves)}
        if number in ends and place.there:
            place.end(min(place.there))
    split = place.policy._split  # what is reserved
    for node, shape in enumerate(shapes):
        mine = [one for one in place.jobs_on(node) if not one.gang.gpu_milli and not one.reclaimable]
        firm_cores = sum(holding.cores for one in mine for holding in one.holdings if holding.node == node)
        homeless = any(
            one.gang.cores > max(shape.cores - int(split.reserved[n]) for n, shape in enumerate(shapes)) for one in mine
        )
        assert homeless or firm_cores <= shape.cores - int(split.reserved[node])
    by_gpus = np.zeros(len(shapes), dtype=np.int64)
    for one in place.there.values():
        for holding in one.holdings if one.gang.gpu_milli else ():
            by_gpus[holding.node] += holding.cores
    able = [
        node
        for node in range(len(shapes))
        if place.ledger.free_gpus[node] and split.reserved[node] - by_gpus[node] >= 1
    ]
    mine = [
        one
        for one in place.there.values()
        if not one.gang.gpu_milli and not (one.gang.spec and one.gang.spec.preemptible)
    ]
    if able and not mine:
        answer = place.ask(gang_of("reserved", 1, 1))
        assert answer.starts, answer.refusals


SHAPES = [
    NodeShape(4, 12, memory_bytes=40),
    NodeShape(2, 6, memory_bytes=20),
    NodeShape(0, 12, memory_bytes=40),
    NodeShape(4, 12, memory_bytes=40, shareable=True),
]


def some_gang(job_id: str, chance: np.random.Generator) -> Gang:
    """Return a gang, mostly without GPUs; a few have two roles."""
    cpus = chance.random() < 0.6
    parts = tuple(
        Part(
            "worker",
            int(chance.integers(1, 4)),
            Demand(
                0 if cpus else int(chance.choice([500, 1000, 1000, 2000, 4000])),
                int(chance.integers(1, 6)),
                memory_bytes=int(chance.choice([0, 0, 10])),
            ),
        )
        for _ in range(1 + (chance.random() < 0.2))
    )
    kind = JobKind.CPU if cpus else JobKind.TRAINING
    spec = JobSpec(kind=kind, preemptible=chance.random() < 0.95)
    return Gang(job_id, parts, kind=kind, spec=spec, waited_seconds=float(chance.choice([0.0, 0.0, 2000.0])))


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_incremental_occupancy_decides_like_a_full_count(seed: int) -> None:
    chance = np.random.default_rng(seed)
    shapes = [SHAPES[kind] for kind in chance.integers(0, len(SHAPES), size=int(chance.integers(2, 9)))]
    options = MultiArray.Options(
        warm_up_seconds=100.0, trial_seconds=500.0, lend_gpus=chance.random() < 0.8, cpu_wait_seconds=900.0
    )
    quick, slow = (Floor(Ledger(shapes), policy(options)) for policy in (MultiArray, SlowMultiArray))
    if options.lend_gpus and chance.random() < 0.7:
        split_by(quick, 2)
        split_by(slow, 2)
    for turn in range(10):
        gangs = [some_gang(f"job-{turn}-{number}", chance) for number in range(int(chance.integers(2, 9)))]
        names = sorted(quick.there)
        for job_id in names:
            if chance.random() < 0.15:
                quick.end(job_id)
                slow.end(job_id)
        victims = [Victim(name, quick.there[name].holdings) for name in sorted(quick.there) if chance.random() < 0.1]
        seconds, shut = float(chance.choice([0.0, 30.0, 600.0])), chance.random(len(shapes)) < 0.1
        for place in (quick, slow):
            place.now += seconds
            place.ledger.open[:] = ~shut
        assert quick.ask(*gangs, victims=victims) == slow.ask(*gangs, victims=victims)
    assert picture(quick.ledger) == picture(slow.ledger)
    assert quick.there == slow.there


@given(st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1)), max_size=6))
def test_the_share_that_is_rarely_exceeded_is_no_less_than_the_mean_and_at_most_all(
    spans: list[tuple[float, float]],
) -> None:
    demand = DemandOverTime(memory_seconds=1e9)
    for seconds, busy in spans:
        demand.add(seconds, Held(busy=busy))
    total = sum(seconds for seconds, _ in spans)
    mean = sum(seconds * busy for seconds, busy in spans) / total if spans else 1.0
    assert mean - 1e-5 <= demand.busy_share <= 1.0
    if len({busy for _, busy in spans}) == 1:
        assert demand.busy_share == pytest.approx(mean, abs=1e-5), "without deviations"
