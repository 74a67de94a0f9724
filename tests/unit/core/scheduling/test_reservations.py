from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import picture, rng
from cotenant.core.capacity.ledger import Holding, Ledger, Offer
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.policy.cluster_view import ClusterView, RunningJob
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.cycle import Plan, Victim, place
from cotenant.core.scheduling.earliest_start import (
    Departure,
    departure_of,
    departures_of,
    earliest_places,
    ends_within_seconds,
    eventual_places,
)
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, Reservation, ReservationRules, has_reservation
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.count import Count
from cotenant.policies.first_fit import FirstFit

NOW = 1000.0
RULE = ReservationRules(after_seconds=100)
placements: st.SearchStrategy[PlacementPolicy] = st.sampled_from([Count(), FirstFit(), Consolidate()])


@dataclass
class Running(ClusterView):
    """A scene of jobs that run."""

    now: float = NOW
    all: dict[str, RunningJob] = field(default_factory=dict)

    def running_jobs(self) -> Mapping[str, RunningJob]:
        return self.all

    def jobs_on(self, node: int) -> Sequence[RunningJob]:
        return [one for one in self.all.values() if any(held.node == node for held in one.holdings)]

    def add(self, job_id: str, holdings: tuple[Holding, ...], estimate: Estimate, ran: float = 50.0) -> None:
        self.all[job_id] = RunningJob(Gang(job_id, (), estimate=estimate), holdings, self.now - ran)


def told(seconds: float, late: float | None = None) -> Estimate:
    return Estimate(predictable=True, remaining_seconds=seconds, remaining_p90_seconds=late)


def gang(
    job_id: str, gpus: int, *, each: int = 1, cores: int = 0, waited: float = 0.0, estimate: Estimate = UNKNOWN
) -> Gang:
    parts = (Part("worker", gpus // each, Demand(1000 * each, cores)),)
    return Gang(job_id, parts, waited_seconds=waited, estimate=estimate)


demands = st.builds(Demand, st.sampled_from([1000, 1000, 2000, 4000, 500, 0]), st.sampled_from([1, 2, 4]))
estimates = st.one_of(
    st.just(UNKNOWN), st.builds(told, st.sampled_from([5.0, 20.0, 20.0, 60.0]), st.sampled_from([None, 25.0, 90.0]))
)


@dataclass
class Busy:
    """A cluster that is nearly full, with running jobs and waiting gangs; the first gang has waited long."""

    ledger: Ledger
    cluster_view: Running
    gangs: list[Gang]

    def plan(self, policy: PlacementPolicy, rule: ReservationRules = RULE, victims: Sequence[Victim] = ()) -> Plan:
        return place(
            self.gangs, self.ledger, policy, rng(), cluster_view=self.cluster_view, reserving=rule, victims=victims
        )


@st.composite
def busy(draw: st.DrawFn) -> Busy:
    ledger = Ledger([NodeShape(4, 8), NodeShape(4, 8, shareable=draw(st.booleans())), NodeShape(2, 16)])
    cluster_view = Running()
    runs = st.tuples(demands, st.lists(st.integers(0, 2), min_size=1, max_size=2), estimates)
    for number, (demand, nodes, estimate) in enumerate(draw(st.lists(runs, min_size=2, max_size=8))):
        held = tuple(ledger.take(node, demand, 1) for node in nodes if ledger.room(demand)[node] > 1)
        if held:
            cluster_view.add(f"runs{number}", held, estimate, draw(st.sampled_from([1.0, 50.0])))
    large = st.builds(Part, st.just("worker"), st.sampled_from([3, 4, 5, 6]), demands)
    small = st.builds(Part, st.just("worker"), st.sampled_from([1, 1, 2, 3]), demands)
    waits = [150.0, *draw(st.lists(st.sampled_from([0.0, 0.0, 150.0, 250.0]), min_size=2, max_size=6))]
    gangs = [
        Gang(f"job{number}", (draw(small if number else large),), waited_seconds=waited, estimate=draw(estimates))
        for number, waited in enumerate(waits)
    ]
    return Busy(ledger, cluster_view, gangs)


def slowly(gang: Gang, ledger: Ledger, policy: PlacementPolicy, departures: Sequence[Departure]) -> float | None:
    """Let one after the other go, and ask each time."""
    known = sorted(one.likely_seconds for one in departures if one.likely_seconds < math.inf)
    for moment in known:
        with ledger.rolled_back():
            for one in departures:
                for holding in one.holdings if one.likely_seconds <= moment else ():
                    ledger.release(holding)
            if not isinstance(policy.place(gang, ledger, rng()), Refusal):
                return moment
    return None


@given(busy(), placements)
def test_the_earliest_start_is_that_of_a_walk_through_all_ends(world: Busy, policy: PlacementPolicy) -> None:
    asked = 0

    def ask(gang: Gang, gone: Collection[str]) -> Offer | None:
        nonlocal asked
        asked += 1
        offer = policy.place(gang, world.ledger, rng())
        return None if isinstance(offer, Refusal) else offer

    before, departures = picture(world.ledger), departures_of(world.cluster_view)
    for one in world.gangs:
        if not isinstance(policy.place(one, world.ledger, rng()), Refusal):
            continue
        asked = 0
        found = earliest_places(one, world.ledger, ask, departures)
        assert (found.seconds if found else None) == slowly(one, world.ledger, policy, departures)
        assert asked <= 2 * math.log2(len(departures) + 1) + 2
        assert picture(world.ledger) == before


def standing_at(world: Busy, plan: Plan, reservation: Reservation) -> None:
    """Set the ledger to the state expected at the reserved start; later starts count with their p90."""
    seconds = reservation.start_seconds
    order = [one.job_id for one in world.gangs]
    for one in departures_of(world.cluster_view):
        if one.likely_seconds <= seconds or one.job_id in plan.stops:
            for holding in one.holdings:
                world.ledger.release(holding)
    for start in plan.starts:
        estimate = start.gang.estimate
        later = order.index(start.gang.job_id) > order.index(reservation.gang.job_id)
        likely = departure_of("", (), estimate, 0).likely_seconds
        if (ends_within_seconds(estimate) if later else likely) > seconds:
            for holding in start.holdings:
                world.ledger.hold(holding)


@given(busy(), placements)
def test_no_later_start_breaks_a_reservation(world: Busy, policy: PlacementPolicy) -> None:
    before = picture(world.ledger)
    plan = world.plan(policy)
    assert picture(world.ledger) == before
    for reservation in plan.reservations:
        if reservation.start_seconds < math.inf:
            with world.ledger.rolled_back():
                standing_at(world, plan, reservation)
                for holding in reservation.holdings:
                    world.ledger.hold(holding)


@given(busy(), placements)
def test_only_long_waiting_gangs_get_a_reservation_and_report_it(world: Busy, policy: PlacementPolicy) -> None:
    plan = world.plan(policy)
    assert len(plan.reservations) <= 1
    for reservation in plan.reservations:
        refusal = plan.refusals[reservation.gang.job_id]
        assert reservation.gang.waited_seconds >= 100
        assert has_reservation(refusal)
        assert "; reserved: " in refusal.detail
        assert reservation.early_seconds <= reservation.start_seconds <= reservation.late_seconds
    reserved = [one.gang.job_id for one in plan.reservations]
    assert [job_id for job_id, refusal in plan.refusals.items() if has_reservation(refusal)] == reserved


@given(busy(), placements)
def test_a_gang_held_back_by_a_reservation_could_start_without_it(world: Busy, policy: PlacementPolicy) -> None:
    plan = world.plan(policy)
    for number, one in enumerate(world.gangs):
        refusal = plan.refusals.get(one.job_id)
        if refusal is None or refusal.code is not Code.RESERVED:
            continue
        started = [gang for gang in world.gangs[:number] if gang.job_id not in plan.refusals]
        holdings = {start.gang.job_id: start.holdings for start in plan.starts}
        with world.ledger.rolled_back():
            for other in started:
                for holding in holdings[other.job_id]:
                    world.ledger.hold(holding)
            assert not isinstance(policy.place(one, world.ledger, rng()), Refusal)


@given(busy(), placements)
def test_rules_without_reservations_change_nothing(world: Busy, policy: PlacementPolicy) -> None:
    never = ReservationRules(after_seconds=1e6)
    assert world.plan(policy, never) == world.plan(policy, NO_RESERVATIONS)


@pytest.fixture
def world() -> Busy:
    """Two nodes of four GPUs; on one a job ends in 60 s, or in 90, on the other one GPU is taken for long."""
    ledger, cluster_view = Ledger([NodeShape(4, 8), NodeShape(4, 8)]), Running()
    cluster_view.add("ends", (ledger.take(0, Demand(1000), 2),), told(60, 90))
    cluster_view.add("stays", (ledger.take(1, Demand(1000), 1),), told(4000))
    return Busy(ledger, cluster_view, [gang("large", 4, each=4, waited=150)])


def test_a_long_waiting_gang_gets_an_estimated_start(world: Busy) -> None:
    refusal = world.plan(FirstFit()).refusals["large"]
    assert refusal.code is Code.FRAGMENTED
    assert refusal.detail.endswith("; reserved: estimated start in 60 s (60 s to 90 s) on 1 node")
    assert refusal.numbers["reserved_start_seconds"] == 60
    assert world.plan(FirstFit(), ReservationRules(200)).refusals["large"].numbers.get("reserved_nodes") is None


def test_a_job_that_ends_in_time_or_fits_elsewhere_is_not_held_back(world: Busy) -> None:
    """The node where the gang will start is the first; a job of unknown length goes to the other."""
    world.gangs += [
        gang("short", 2, each=2, estimate=told(30, 60)),
        gang("long", 3, each=3),
        gang("longer", 1),
        gang("late", 1, estimate=told(59, 61)),
    ]
    plan = world.plan(FirstFit())
    assert {start.gang.job_id: start.offer[0].node for start in plan.starts} == {"short": 0, "long": 1}
    assert plan.refusals["longer"].code is Code.CAPACITY
    world.gangs[1:] = [replace(world.gangs[4], job_id=f"late{number}") for number in range(4)]
    plan = world.plan(FirstFit())
    assert [start.offer[0].node for start in plan.starts] == [1, 1, 1]
    assert str(plan.refusals["late3"]) == (
        "RESERVED: its places on 1 node are reserved for large, which has waited for 3 min and will "
        "start in 60 s; it may run for 61 s"
    )


def test_a_gang_is_not_held_back_by_a_reservation_once_its_room_is_taken(world: Busy) -> None:
    """Of two equal gangs the first could start without the reservation; then a short job takes the room."""
    world.gangs += [
        gang("fills", 3, each=3),
        gang("before", 2, each=2),
        gang("short", 2, each=2, estimate=told(30, 60)),
        gang("after", 2, each=2),
    ]
    plan = world.plan(FirstFit())
    assert [start.gang.job_id for start in plan.starts] == ["fills", "short"]
    assert plan.refusals["before"].code is Code.RESERVED
    assert plan.refusals["after"].code is Code.CAPACITY


def test_a_job_that_outlived_its_estimate_goes_on_for_a_share_of_its_run() -> None:
    assert departure_of("a", (), told(0), 500) == Departure("a", (), 50, 50, 50, ran_seconds=500)
    assert departure_of("a", (), told(0), 5).likely_seconds == 1, "and for a second at least"
    assert departure_of("a", (), UNKNOWN, 500) == Departure("a", (), ran_seconds=500)


@given(st.permutations([10.0, 20.0, 30.0, 40.0]), st.integers(1, 4))
def test_of_jobs_without_a_known_end_those_that_ran_shortest_are_expected_to_go_first(
    ran: list[float], gpus: int
) -> None:
    ledger = Ledger([NodeShape(4, 8)])
    going = [
        Departure(f"{number}", (ledger.take(0, Demand(1000)),), ran_seconds=each) for number, each in enumerate(ran)
    ]

    def ask(gang: Gang, gone: Collection[str]) -> Offer | None:
        offer = FirstFit().place(gang, ledger, rng())
        return None if isinstance(offer, Refusal) else offer

    found = eventual_places(gang("large", gpus), ledger, ask, going)
    assert found is not None
    assert [one.ran_seconds for one in found.gone] == sorted(ran)[:gpus]


def test_where_nothing_is_known_room_is_kept_for_a_while_once_it_waited_twice_as_long(world: Busy) -> None:
    world.cluster_view.all = {name: replace(one, gang=Gang(name, ())) for name, one in world.cluster_view.all.items()}
    world.gangs.append(gang("small", 3, each=3))
    for waited, kept in ((150.0, False), (250.0, True), (399.0, True), (401.0, False), (801.0, True), (1601.0, False)):
        world.gangs[0] = replace(world.gangs[0], waited_seconds=waited)
        world.gangs[1] = gang("small", 5)
        plan = world.plan(FirstFit())
        assert bool(plan.reservations) == kept
        assert (plan.refusals.get("small", Refusal(Code.CAPACITY, "")).code is Code.RESERVED) == kept
        if kept:
            assert "is kept for it for" in plan.refusals["large"].detail


def test_as_many_get_a_reservation_as_the_rule_says_and_the_second_leaves_the_first_alone(world: Busy) -> None:
    world.gangs.append(gang("next", 3, each=3, waited=150))
    world.ledger.take(1, Demand(1000), 1)
    assert len(world.plan(FirstFit()).reservations) == 1
    world.cluster_view.add("other", (world.ledger.take(1, Demand(1000), 1),), told(70))
    first, second = world.plan(FirstFit(), replace(RULE, most=2)).reservations
    assert (first.start_seconds, {one.node for one in first.holdings}) == (60, {0})
    assert second.start_seconds == 4000
    assert {one.node for one in second.holdings} == {1}


def test_a_reservation_counts_on_the_end_of_a_job_that_waits_for_its_room() -> None:
    ledger, first = Ledger([NodeShape(8, 8)]), gang("first", 8, estimate=told(60.0))
    (start,) = place([first], ledger, FirstFit(), rng()).starts
    waiting, given = [gang("big", 8, waited=5000.0)], [Holding(0, 8)]
    reserved = place(waiting, ledger, FirstFit(), rng(), promised=given, starting=[start], reserving=RULE)
    assert [one.start_seconds for one in reserved.reservations] == [60.0]
    assert place(waiting, ledger, FirstFit(), rng(), promised=given, reserving=RULE).reservations == ()


def test_in_a_strict_queue_the_head_knows_when_it_will_start(world: Busy) -> None:
    world.gangs.append(gang("small", 1))
    plan = place(
        world.gangs, world.ledger, FirstFit(), rng(), cluster_view=world.cluster_view, reserving=RULE, strict=True
    )
    assert "reserved: estimated start in 60 s" in plan.refusals["small"].detail


def test_a_gang_that_starves_makes_others_go_before_it_asks_for_a_reservation(world: Busy) -> None:
    victim = Victim("ends", world.cluster_view.all["ends"].holdings)
    plan = world.plan(FirstFit(), victims=[victim])
    assert (plan.stops, plan.reservations) == (("ends",), ())


def test_kept_resources_exclude_what_will_be_released() -> None:
    ledger = Ledger([NodeShape(4, 8)])
    ledger.take(0, Demand(1000, 2), 2)
    back: dict[str, tuple[Holding, ...]] = {"a": (Holding(0, 1, 2),), "b": (Holding(0, 1, 2),)}
    reservation = Reservation(gang("large", 3), (Holding(0, 3, 3),), 60, 60, 60, 60, back)
    assert list(reservation.kept(ledger, ())) == [Holding(0, 1, 0)]
    assert list(reservation.kept(ledger, {"a"})) == [Holding(0, 2, 1)]
