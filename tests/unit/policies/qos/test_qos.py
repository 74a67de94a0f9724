from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant.conformance.worlds import rng
from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobKind, JobSpec, Locality, OpenReplicas, Qos, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal, Wait
from cotenant.core.placement import interference
from cotenant.core.policy.cluster_view import ClusterView, RunningJob
from cotenant.core.scheduling import cycle
from cotenant.core.sizing import replica_sizing
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.qos.policy import KeepsPromises
from cotenant.policies.qos.speed_bounds import speed_bounds
from cotenant.policies.requested import Requested

NOW = 1000.0
Rates = Mapping[int, float]
ALONE = {1: 10.0, 2: 8.0, 4: 5.0}


def job(
    job_id: str,
    gpus: int,
    rates: Rates | None = None,
    qos: Qos = Qos(),  # noqa: B008  # frozen
    deadline: float | None = None,
    seconds: float | None = None,
    locality: Locality | None = None,
    milli: int = 1000,
) -> Gang:
    """A gang of one-GPU replicas with these rates by number of nodes, and this remaining time on the fewest."""
    role = Role("worker", gpus, Request(gpu_milli=milli, cores=0))
    spec = JobSpec(roles=(role,), qos=qos, deadline_seconds=deadline, locality=locality)
    told = tuple(
        CandidateEstimate(rate, allocation=Candidate(0, milli, nodes)) for nodes, rate in (rates or {}).items()
    )
    part = Part("worker", gpus, Demand(milli))
    estimate = Estimate(seconds is not None, 1.0, seconds, candidates=told)
    return Gang(job_id, (part,), locality, spec=spec, estimate=estimate)


@dataclass
class Stage(ClusterView):
    """A cluster with its running jobs."""

    ledger: Ledger
    now: float = NOW
    there: dict[str, RunningJob] = field(default_factory=dict)

    def running_jobs(self) -> Mapping[str, RunningJob]:
        return self.there

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        return [one for one in self.there.values() if any(held.node == node for held in one.holdings)]

    def enter(self, gang: Gang, places: Mapping[int, int]) -> None:
        (part,) = gang.parts
        held = tuple(self.ledger.take(node, part.demand, count) for node, count in places.items())
        self.there[gang.job_id] = RunningJob(gang, held, self.now)

    def ask(self, gang: Gang, policy: KeepsPromises | None = None) -> Offer | Refusal:
        policy = policy or KeepsPromises()
        policy.begin_cycle(self)
        return policy.place(gang, self.ledger, rng())


def fastest() -> KeepsPromises:
    return KeepsPromises(KeepsPromises.Options(prefer="fastest"))


def stage(*gpus: int, racks: Sequence[str] = (), shareable: bool = False) -> Stage:
    return Stage(Ledger([NodeShape(count, 64, shareable=shareable) for count in gpus], racks))


def places(answer: Offer | Refusal) -> dict[int, int]:
    assert not isinstance(answer, Refusal), answer
    counts: dict[int, int] = {}
    for share in answer:
        counts[share.node] = counts.get(share.node, 0) + share.replicas
    return counts


def spots(there: Mapping[str, RunningJob]) -> dict[str, dict[int, int]]:
    return {name: {held.node: held.gpus for held in one.holdings} for name, one in there.items()}


def rate_of(name: str, gang: Gang, spot: Mapping[str, Mapping[int, int]], ledger: Ledger) -> float | None:
    """Return a gang's rate beside all others, by the model, gang by gang and node by node; None if unknown."""
    mine = spot[name]
    usable = {one.allocation.nodes: one.rate_per_second for one in gang.estimate.candidates if one.allocation}
    alone = max((rate for nodes, rate in usable.items() if rate and nodes >= len(mine)), default=None)
    if alone is None or sum(mine.values()) < 2:
        return alone
    worst = 75.6 / 114.8 if len(mine) == 1 else 74.1 / 98.0
    left = 1.0
    for node, own in mine.items():
        others = sum(held.get(node, 0) for other, held in spot.items() if other != name and sum(held.values()) > 1)
        rest = int(ledger.total_gpus[node]) - own
        left = min(left, 1 - (1 - worst) * (others / rest if rest else 0.0))
    return alone * left


def wanted(gang: Gang) -> float:
    """Return the rate that a gang needs to meet its objective."""
    assert gang.spec
    least = gang.spec.qos.rate_min_per_second
    if gang.spec.deadline_seconds is not None and gang.estimate.candidates and gang.estimate.remaining_seconds:
        work = gang.estimate.remaining_seconds * (gang.estimate.candidates[0].rate_per_second or 0.0)
        least = max(least, work / (gang.spec.deadline_seconds - NOW))
    return least


def near(gang: Gang, nodes: int, fewest: int) -> bool:
    """Return whether it takes at most a quarter more GPU-seconds on this many nodes."""
    far, best = (rate_of("x", gang, {"x": dict.fromkeys(range(count), 0)}, Ledger([])) for count in (nodes, fewest))
    return far is None or best is None or 1.25 * far >= best


def keeps_all(there: Mapping[str, Gang], spot: Mapping[str, Mapping[int, int]], ledger: Ledger) -> bool:
    rates = {name: rate_of(name, gang, spot, ledger) for name, gang in there.items()}
    return all(rate is None or rate >= wanted(there[name]) * (1 - 1e-5) for name, rate in rates.items())


def all_places(gpus: int, room: Sequence[int]) -> Iterator[dict[int, int]]:
    for counts in product(*(range(free + 1) for free in room)):
        if sum(counts) == gpus:
            yield {node: count for node, count in enumerate(counts) if count}


@st.composite
def candidates(draw: st.DrawFn, job_id: str) -> Gang:
    steps = draw(st.lists(st.sampled_from([1.0, 0.95, 0.85, 0.6]), min_size=2, max_size=2))
    rates = {1: 10.0, 2: 10.0 * steps[0], 4: 10.0 * steps[0] * steps[1]}
    rate = draw(st.sampled_from([0.0, 0.0, 5.0, 7.0, 8.0, 9.0, 10.0, 12.0]))
    deadline = draw(st.sampled_from([None, None, NOW + 100, NOW + 110, NOW + 150, NOW + 90]))
    return job(job_id, draw(st.integers(1, 6)), rates, Qos(rate_min_per_second=rate), deadline, 100.0)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Stage, list[Gang]]:
    made = stage(*draw(st.lists(st.sampled_from([4, 4, 8, 2]), min_size=1, max_size=3)))
    return made, [draw(candidates(f"job-{number}")) for number in range(draw(st.integers(1, 6)))]


@settings(max_examples=examples(150))
@given(streams())
def test_the_search_finds_the_fastest_placement_that_violates_no_objective(
    given_: tuple[Stage, list[Gang]],
) -> None:
    """A reference that tries every placement and judges every job in it."""
    made, gangs = given_
    policy, thrifty = fastest(), KeepsPromises()
    there: dict[str, Gang] = {}  # of jobs whose objectives are met
    for gang in gangs:
        answer = made.ask(gang, policy)
        (part,) = gang.parts
        empty = [dict(one) for one in all_places(part.replicas, made.ledger.total_gpus.tolist())]
        lost = not any(keeps_all({"x": gang}, {"x": one}, made.ledger) for one in empty)
        promising = replace(gang, spec=JobSpec(roles=gang.spec.roles)) if lost and gang.spec else gang
        others = spots(made.there)
        every = all_places(part.replicas, made.ledger.free_gpus.tolist())
        fewest = min(map(len, empty), default=1)
        kept = [
            one
            for one in every
            if near(gang, len(one), fewest)
            and keeps_all(there | {gang.job_id: promising}, others | {gang.job_id: one}, made.ledger)
        ]
        packed = made.ask(gang, thrifty)
        if isinstance(answer, Refusal):
            assert not kept, f"{answer}, but {kept[0]} keeps all"
            assert isinstance(packed, Refusal)
            continue
        assert places(answer) in kept
        assert places(packed) in kept
        assert len(places(packed)) == min(map(len, kept))
        speeds = [rate_of("x", gang, others | {"x": one}, made.ledger) or 0.0 for one in kept]
        here = rate_of("x", gang, others | {"x": places(answer)}, made.ledger)
        assert here == pytest.approx(max(speeds), rel=1e-4)
        made.enter(gang, places(answer))
        there[gang.job_id] = promising


@settings(max_examples=examples(80))
@given(streams())
def test_a_gang_refused_for_an_objective_starts_once_that_job_is_gone(given_: tuple[Stage, list[Gang]]) -> None:
    made, gangs = given_
    for gang in gangs:
        answer = made.ask(gang)
        if not isinstance(answer, Refusal):
            made.enter(gang, places(answer))
            continue
        if answer.code is not Code.QOS:
            continue
        freed = gang
        if "would run at" in answer.detail or "would need" in answer.detail:
            assert gang.spec
            freed = replace(gang, spec=JobSpec(roles=gang.spec.roles))
        if "would take" in answer.detail:
            freed = replace(gang, locality=Locality.ANYWHERE)
            if "anywhere" not in answer.remedy:
                assert isinstance(made.ask(freed), Refusal), "an objective stands in the way as well"
                continue
        named = {name for name in made.there if f"{name} " in answer.detail or f"{name}," in answer.detail}
        assert freed is not gang or named, answer.detail
        assume("more below" not in answer.detail)
        before = dict(made.there)
        for name in named:
            running_job = made.there[name]
            assert running_job.gang.spec
            freely = replace(running_job.gang, spec=JobSpec(roles=running_job.gang.spec.roles))
            made.there[name] = replace(running_job, gang=freely)
        assert not isinstance(made.ask(freed), Refusal), answer.detail
        made.there = before


def test_the_fewest_gpu_seconds_are_taken_and_equals_go_where_the_least_is_left() -> None:
    made = stage(8, 8, 8)
    made.enter(job("a", 4), {0: 4})
    made.enter(job("single", 1), {1: 1})
    assert places(made.ask(job("new", 4, ALONE), fastest())) == {1: 4}, (
        "no gang there, and less is left than on the empty one"
    )
    assert places(made.ask(job("unknown", 4), fastest())) == {0: 4}, "of which nothing is known: best fit"


def test_packing_takes_the_fullest_server_that_meets_all_objectives() -> None:
    made, thrifty = stage(8, 8, 8), KeepsPromises()
    made.enter(job("a", 4), {0: 4})
    made.enter(job("single", 1), {1: 1})
    assert places(made.ask(job("easy", 4, ALONE), thrifty)) == {0: 4}
    assert places(made.ask(job("strict", 4, ALONE, Qos(rate_min_per_second=9.0)), thrifty)) == {1: 4}


def test_two_quiet_servers_beat_a_crowded_one_if_distance_costs_less() -> None:
    made = stage(8, 4, 4)
    made.enter(job("a", 4), {0: 4})
    made.enter(job("b", 1), {1: 1})
    made.enter(job("c", 1), {2: 1})
    assert places(made.ask(job("near", 4, {1: 10.0, 2: 6.0}), fastest())) == {0: 4}
    assert places(made.ask(job("far", 4, {1: 10.0, 2: 9.5}), fastest())) == {1: 3, 2: 1}


@pytest.mark.parametrize("prefer", ["packed", "fastest"])
def test_of_a_gang_on_two_servers_as_much_is_beside_neighbors_as_its_objective_allows(
    prefer: Literal["packed", "fastest"],
) -> None:
    made, policy = stage(8, 4), KeepsPromises(KeepsPromises.Options(prefer=prefer))
    made.enter(job("neighbor", 2), {0: 2})
    rate = 10 * interference.speed(2, 6, servers=2)  # with 2 of 6 replicas there
    wide = job("new", 6, {1: 10.0, 2: 10.0}, Qos(rate_min_per_second=rate))
    assert places(made.ask(wide, policy)) == {0: 2, 1: 4}
    refusal = made.ask(job("new", 6, {1: 10.0, 2: 10.0}, Qos(rate_min_per_second=rate + 0.01)), policy)
    assert isinstance(refusal, Refusal)
    assert refusal.code is Code.QOS


def test_a_neighbor_tolerates_exactly_as_many_gpus_of_other_gangs_as_its_objective_allows() -> None:
    rate = 10 * interference.speed(4, 6, servers=1)  # beside four of the other six GPUs
    for more, starts in ((0.0, True), (0.01, False)):
        made = stage(8)
        made.enter(job("fragile", 2, ALONE, Qos(rate_min_per_second=rate + more)), {0: 2})
        assert isinstance(made.ask(job("new", 4, ALONE)), tuple) == starts
        assert isinstance(made.ask(job("unknown", 4)), tuple) == starts


def test_a_neighbors_objective_keeps_gangs_away_and_is_named() -> None:
    made = stage(8)
    made.enter(job("fragile", 2, ALONE, Qos(rate_min_per_second=9.0)), {0: 2})
    refusal = made.ask(job("new", 4, ALONE))
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.wait) == (Code.QOS, Wait.FRAGMENTATION)
    assert "would slow fragile below its objective" in refusal.detail
    assert places(made.ask(job("small", 1, ALONE))) == {0: 1}, "single GPUs disturb nobody"
    ignorant = KeepsPromises(KeepsPromises.Options(interference="none"))
    assert places(made.ask(job("new", 4, ALONE), ignorant)) == {0: 4}


def test_gangs_placed_in_one_cycle_respect_each_other() -> None:
    made = stage(8)
    gangs = [job("first", 2, ALONE, Qos(rate_min_per_second=9.0)), job("second", 4, ALONE)]
    plan = cycle.place(gangs, made.ledger, KeepsPromises(), rng(), cluster_view=made)
    assert [start.gang.job_id for start in plan.starts] == ["first"]
    assert "would slow first" in plan.refusals["second"].detail


def test_a_victims_objective_is_ignored_once_its_room_is_taken() -> None:
    made = stage(8)
    made.enter(job("old", 4, ALONE, Qos(rate_min_per_second=10.0)), {0: 4})
    victim = cycle.Victim("old", made.there["old"].holdings)
    plan = cycle.place([job("new", 4, ALONE)], made.ledger, KeepsPromises(), rng(), victims=[victim], cluster_view=made)
    assert (plan.stops, [start.gang.job_id for start in plan.starts]) == (("old",), ["new"])


def test_a_deadline_that_two_servers_would_miss_waits_for_one_with_an_expiry() -> None:
    made = stage(4, 4)
    for node in (0, 1):
        made.enter(job(f"single-{node}", 1), {node: 1})
        made.enter(job(f"other-{node}", 1), {node: 1})
    new = job("new", 4, {1: 10.0, 2: 8.0}, deadline=NOW + 110, seconds=100.0)
    refusal = made.ask(new)
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("would need 14 % more time on 2 servers than its deadline leaves")
    assert refusal.holds_seconds == pytest.approx(10)
    made.now += 11
    assert places(made.ask(new)) == {0: 2, 1: 2}


def test_an_unattainable_objective_binds_no_job() -> None:
    made = stage(4, 4)
    assert places(made.ask(job("new", 4, ALONE, Qos(rate_min_per_second=50.0)))) == {0: 4}
    made.enter(job("lost", 2, ALONE, Qos(rate_min_per_second=50.0)), {0: 2})
    made.enter(job("b", 4), {1: 4})
    assert places(made.ask(job("new", 2, ALONE))) == {0: 2}


def test_across_racks_a_gang_is_slower_than_in_one() -> None:
    made = stage(4, 4, 4, racks=["a", "b", "b"])
    for node, count in ((0, 1), (1, 2), (2, 2)):
        for number in range(count):
            made.enter(job(f"single-{node}-{number}", 1), {node: 1})
    assert places(made.ask(job("new", 4, ALONE))) == {1: 2, 2: 2}
    assert places(Consolidate().place(job("new", 4, locality=Locality.ANYWHERE), made.ledger, rng())) == {0: 3, 1: 1}


CRAWLS = {1: 10.0, 2: 3.0, 4: 3.0}


def halves() -> Stage:
    """Two servers, each with room for half of a gang of four."""
    made = stage(4, 4)
    for node in (0, 1):
        for number in range(2):
            made.enter(job(f"single-{node}-{number}", 1), {node: 1})
    return made


@pytest.mark.parametrize("deadline", [None, NOW + 10_000, NOW + 1])
def test_a_gang_that_would_be_slow_waits_with_or_without_an_objective(
    deadline: float | None,
) -> None:
    made = halves()
    crawling = job("new", 4, CRAWLS, deadline=deadline, seconds=100.0)
    refusal = made.ask(crawling)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.wait) == (Code.QOS, Wait.FRAGMENTATION)
    assert refusal.detail == (
        "would take 3.33 times as many GPU-seconds on 2 servers as on the fewest; 1.25 times are allowed, so it waits"
        " for one server: the best has room for 2 of 4 replicas"
    )
    assert refusal.remedy == "jobs on one server finish, or the job asks for locality anywhere"
    assert refusal.numbers == {"times": pytest.approx(10 / 3), "nodes": 2.0, "best_node_replicas": 2.0}
    lavish = KeepsPromises(KeepsPromises.Options(stretch_max=4.0))
    assert places(made.ask(crawling, lavish)) == {0: 2, 1: 2}
    assert places(made.ask(replace(crawling, locality=Locality.ANYWHERE))) == {0: 2, 1: 2}, "it asks for that"
    assert places(made.ask(job("new", 4, {1: 10.0, 2: 8.0}, deadline=deadline, seconds=100.0))) == {0: 2, 1: 2}
    assert places(made.ask(job("new", 4, deadline=deadline))) == {0: 2, 1: 2}, "nothing is known"


def test_what_no_server_could_hold_alone_is_measured_by_the_fewest_that_could() -> None:
    made = stage(4, 4, 4, 4)
    for node in (0, 1, 2, 3):
        made.enter(job(f"single-{node}", 1), {node: 2})
    wide = job("new", 8, {2: 10.0, 4: 3.0})
    refusal = made.ask(wide)
    assert isinstance(refusal, Refusal)
    assert "so it waits for 2 servers" in refusal.detail
    for node in (0, 1):
        made.ledger.release(made.there.pop(f"single-{node}").holdings[0])
    assert places(made.ask(wide)) == {0: 4, 1: 4}
    made.enter(job("a", 4), {0: 4})
    made.ledger.open[:2] = False
    assert isinstance(made.ask(job("new", 4, CRAWLS)), Refusal)


def test_gangs_that_suffer_otherwise_from_distance_are_not_alike() -> None:
    policy = KeepsPromises()
    fast, slow, other = job("fast", 4, ALONE), job("slow", 4, CRAWLS), job("other", 4, CRAWLS)
    assert policy.equivalence_key(slow) == policy.equivalence_key(other) != policy.equivalence_key(fast)
    made = halves()
    plan = cycle.place([slow, fast], made.ledger, policy, rng(), cluster_view=made)
    assert [start.gang.job_id for start in plan.starts] == ["fast"]


def test_where_no_open_server_could_hold_a_gang_it_does_not_wait_for_one() -> None:
    made = stage(4, 2, 2)
    made.enter(job("a", 4), {0: 4})
    assert isinstance(made.ask(job("new", 4, CRAWLS)), Refusal)
    made.ledger.open[0] = False
    assert places(made.ask(job("new", 4, CRAWLS))) == {1: 2, 2: 2}


def test_a_stretch_below_one_is_invalid() -> None:
    (told,) = KeepsPromises.Options(stretch_max=0.5).check()
    assert told.field == "stretch_max"


def test_gpu_shares_go_to_gpus_whose_jobs_tolerate_it() -> None:
    made = stage(2, shareable=True)
    strict = job("strict", 1, {1: 10.0}, Qos(rate_min_per_second=9.0), milli=300)
    made.enter(strict, {0: 1})
    (share,) = made.ask(job("new", 1, milli=500))  # type: ignore[misc]  # an offer
    assert share.gpus == (1,)
    made.enter(job("whole", 1), {0: 1})
    refusal = made.ask(job("new", 1, milli=500))
    assert isinstance(refusal, Refusal)
    assert "would slow strict" in refusal.detail


@pytest.mark.parametrize(("replicas", "start"), [(2, False), (3, True)])
def test_a_service_of_enough_replicas_is_not_disturbed_and_one_of_too_few_protects_nothing(
    replicas: int, start: bool
) -> None:
    latency = Latency(replicas, promised_seconds=0.04 if start else 0.2, replicas_needed=3)
    qos = Qos(latency_seconds=0.05, latency_percentile=99, arrivals_per_second=10)
    made = stage(8)
    service = job("service", replicas, qos=qos)
    told = Estimate(candidates=(CandidateEstimate(latency=latency, allocation=Candidate(0, 1000)),))
    assert service.spec
    service = replace(service, estimate=told, spec=replace(service.spec, kind=JobKind.INFERENCE))
    made.enter(service, places(made.ask(service)))
    answer = made.ask(job("new", 4, ALONE))
    assert isinstance(answer, Refusal) == start


def test_philly_s_figures_are_those_of_the_paper() -> None:
    assert 114.8 * interference.speed(6, 6, servers=1) == pytest.approx(75.6)
    assert 98.0 * interference.speed(6, 6, servers=2) == pytest.approx(74.1)


def test_room_that_comes_is_seen_and_so_is_a_node_that_opens() -> None:
    made, policy = stage(4, 4), KeepsPromises()
    made.ledger.open[1] = False
    held = made.ledger.take(0, Demand(1000), 2)
    new = job("new", 4, locality=Locality.SERVER)
    for _ in range(2):
        assert isinstance(made.ask(new, policy), Refusal)
    made.ledger.open[1] = True
    assert places(made.ask(new, policy)) == {1: 4}
    made.ledger.open[1] = False
    assert isinstance(made.ask(new, policy), Refusal)
    made.ledger.release(held)
    assert places(made.ask(new, policy)) == {0: 4}


def service(rate: float, target: float, counts: OpenReplicas, gpus: int = 1) -> Gang:
    """A service with a variable number of replicas and known batch times."""
    role = Role("worker", counts.least, Request(gpu_milli=1000 * gpus, cores=1), open=counts)
    spec = JobSpec(kind=JobKind.INFERENCE, roles=(role,), qos=Qos(0.0, target, 99.0, rate))
    told = Latency(counts.least, per_request_seconds=0.001, fixed_seconds=0.01)
    estimate = Estimate(candidates=(CandidateEstimate(latency=told, allocation=Candidate(1, 1000 * gpus)),))
    return cycle.gang_of("service", spec, estimate, Requested(), [NodeShape(8, 64, count=4)])


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from([100.0, 700.0, 900.0, 1500.0]),
    st.sampled_from([0.028, 0.03, 0.035, 0.05]),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.integers(1, 12),
)
def test_a_service_gets_the_fewest_replicas_that_meet_its_objective(
    rate: float, target: float, held: list[int], most: int
) -> None:
    made = stage(*[8] * len(held))
    for node, count in enumerate(held):
        if count:
            made.enter(job(f"other-{node}", count), {node: count})
    asked = service(rate, target, OpenReplicas(1, most))
    plan = cycle.place([asked], made.ledger, KeepsPromises(), rng(), cluster_view=made)
    undisturbed = replica_sizing.required_replicas(asked.spec, asked.estimate) if asked.spec else None
    assert undisturbed is not None
    chosen = next((len_of(start) for start in plan.starts), None)
    if undisturbed > most:
        assert plan.refusals["service"].code is Code.NEVER_FITS
        return
    able = [count for count in range(int(undisturbed), most + 1) if suits(made, asked, count)]
    assert chosen == next(iter(able), None)


def len_of(start: cycle.Start) -> int:
    assert start.gang.spec
    assert start.gang.spec.replicas == start.gang.parts[0].replicas
    assert sum(share.replicas for share in start.offer) == start.gang.parts[0].replicas
    return start.gang.parts[0].replicas


def suits(made: Stage, asked: Gang, count: int) -> bool:
    """Return whether this many replicas, if requested, would start and meet the objective."""
    assert asked.spec
    fixed = replace(asked.spec.with_replicas(count), roles=(replace(asked.spec.roles[0], replicas=count, open=None),))
    gang = replace(asked, spec=fixed, parts=(replace(asked.parts[0], replicas=count),))
    return bool(cycle.place([gang], made.ledger, KeepsPromises(), rng(), cluster_view=made).starts)


def test_a_service_slowed_by_neighbors_has_more_replicas_and_a_reason() -> None:
    made = stage(16)
    made.enter(job("other", 2), {0: 2})
    asked = service(900.0, 0.03, OpenReplicas(1, 12))
    (start,) = cycle.place([asked], made.ledger, KeepsPromises(), rng(), cluster_view=made).starts
    assert asked.parts[0].replicas == 5
    assert len_of(start) > 5
    assert "beside its neighbors; alone 5 would" in start.gang.sizing
    (plain,) = cycle.place([asked], made.ledger, Consolidate(), rng(), cluster_view=made).starts
    assert len_of(plain) == 5


def test_a_service_with_too_low_a_limit_waits_and_holds_no_job_back() -> None:
    made = stage(8)
    asked, other = service(900.0, 0.03, OpenReplicas(1, 4)), job("other", 4)
    plan = cycle.place([asked, replace(other, parts=asked.parts)], made.ledger, Consolidate(), rng(), strict=True)
    assert plan.refusals["service"].code is Code.NEVER_FITS
    assert "replicas_max is 5 or more" in plan.refusals["service"].remedy
    assert [start.gang.job_id for start in plan.starts] == ["other"]


def test_a_deadline_says_nothing_of_a_job_whose_remaining_time_is_unknown() -> None:
    gang = job("a", 2, ALONE, qos=Qos(rate_min_per_second=5.0), deadline=NOW + 100)
    assert [pace.share for pace in speed_bounds(gang, NOW).paces] == [0.5, 0.625, 1.0]
    known = job("a", 2, {1: 10.0}, qos=Qos(rate_min_per_second=5.0), deadline=NOW + 100, seconds=80.0)
    assert [pace.share for pace in speed_bounds(known, NOW).paces] == [0.8]
    assert [pace.share for pace in speed_bounds(known, NOW + 100).paces] == [float("inf")], (
        "it cannot be met any longer"
    )


def test_jobs_coexist_if_the_strictest_of_them_on_each_server_tolerates_its_neighbors() -> None:
    made, policy = stage(8, 8), KeepsPromises()
    patient = job("patient", 2, ALONE, Qos(rate_min_per_second=10 * interference.speed(4, 6, servers=1)))
    made.enter(patient, {0: 2})
    made.enter(job("quiet", 2, ALONE), {1: 2})
    policy.begin_cycle(made)
    assert policy.can_coexist([0, 1], made.ledger)
    made.enter(job("strict", 2, ALONE, Qos(rate_min_per_second=10.0)), {0: 2})
    assert not policy.can_coexist([0], made.ledger)
    assert not policy.can_coexist([0, 1], made.ledger), "all servers count"
    assert policy.can_coexist([1], made.ledger)
    assert KeepsPromises(KeepsPromises.Options(interference="none")).can_coexist([0, 1], made.ledger)


def test_a_policy_answers_for_the_cluster_that_it_is_asked_about() -> None:
    policy, crowded, calm = KeepsPromises(), stage(8), stage(8, 8, 8)
    for number in range(2):
        crowded.enter(job(f"strict-{number}", 2, ALONE, Qos(rate_min_per_second=10.0)), {0: 2})
    for made, answer in ((crowded, False), (calm, True), (crowded, False)):
        policy.begin_cycle(made)
        assert policy.can_coexist(range(len(made.ledger)), made.ledger) == answer
        assert isinstance(made.ask(job("new", 4, ALONE), policy), tuple) == answer


@pytest.mark.parametrize("prefer", ["packed", "fastest"])
def test_a_refusal_tells_the_rate_beside_the_neighbors_on_several_servers(prefer: Literal["packed", "fastest"]) -> None:
    made, policy = stage(4, 4), KeepsPromises(KeepsPromises.Options(prefer=prefer))
    for node in (0, 1):
        made.enter(job(f"neighbor-{node}", 2), {node: 2})
    refusal = made.ask(job("new", 4, {1: 10.0, 2: 10.0}, Qos(rate_min_per_second=9.0)), policy)
    assert isinstance(refusal, Refusal)
    assert f"would run at {10 * interference.speed(2, 2, servers=2):.3g} steps/s on 2 servers" in refusal.detail


def test_shares_of_gpus_are_spread_over_servers_unless_the_job_asks_for_one() -> None:
    made = stage(1, 1, shareable=True)
    assert places(made.ask(job("new", 2, milli=600))) == {0: 1, 1: 1}
    assert isinstance(made.ask(job("new", 2, milli=600, locality=Locality.SERVER)), Refusal)
    assert places(made.ask(job("new", 2, milli=500, locality=Locality.SERVER))) == {0: 2}
