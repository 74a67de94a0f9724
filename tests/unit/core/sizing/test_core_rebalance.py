"""Cores granted to the jobs of some nodes: own cores up to their share, the rest lent, none twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.estimate import UNKNOWN
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.tenancy import Headroom, Tenant
from cotenant.core.prediction.core_curve import Point
from cotenant.core.sizing.core_rebalance import CoreClaim, CoreGrant, borrower, rebalance_cores, room
from cotenant.core.sizing.core_search import expected
from cotenant.core.sizing.resize import ResizableJob

GPU, SERVER = Role("worker", request=Request(gpu_milli=1000)), Role("ps", request=Request(cores=2))
NODES = st.dictionaries(st.integers(0, 2), st.integers(1, 3), min_size=1, max_size=3)


def running(
    job_id: str, own: int, lent: int, share: int, points: tuple[Point, ...] = (), tenant: str = "group"
) -> ResizableJob:
    """A job with a server that comes first, and has cores that its user gave."""
    spec = JobSpec(tenant=tenant, roles=(SERVER, GPU))
    return ResizableJob(job_id, spec, UNKNOWN, (2, own + lent), (0, 99), points, node_share=(0, share), lent=(0, lent))


@st.composite
def parties(draw: st.DrawFn) -> list[CoreClaim]:
    count = draw(st.integers(0, 5))
    some = []
    for number in range(count):
        share = draw(st.integers(1, 4))
        own, lent = draw(st.integers(1, share)), draw(st.integers(0, 3))
        points = tuple(Point(cores, float(draw(st.integers(1, 9)))) for cores in draw(st.sets(st.integers(1, 8))))
        some.append(CoreClaim(running(str(number), own, lent, share, points), draw(st.integers(1, 9)), draw(NODES)))
    return some


@given(parties(), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_no_core_is_granted_twice_and_no_job_gets_more_than_its_claim(some: list[CoreClaim], unheld: list[int]) -> None:
    free = dict(enumerate(unheld))
    for party in some:
        for node, count in party.replicas.items():
            free[node] += (party.running.cores[1] - party.running.own) * count
    hands = rebalance_cores(some, free, lambda one: 1.0)
    for node in free:
        more = (
            (hand.cores - party.running.own) * party.replicas.get(node, 0)
            for party, hand in zip(some, hands, strict=True)
        )
        assert sum(more) <= free[node]
    for party, hand in zip(some, hands, strict=True):
        assert 1 <= hand.firm <= max(party.running.own, min(party.wish, party.running.share))
        assert hand.cores <= max(party.wish, hand.firm)
        assert hand.lent == 0 or hand.firm == party.running.share or room_left(some, hands, free, party) == 0


def room_left(some: list[CoreClaim], hands: list[CoreGrant], free: dict[int, int], of: CoreClaim) -> int:
    """How many own cores each replica could have had beside what was dealt as own to it and to those before it.

    What those after it give back is lent until the cores are dealt again.
    """
    left = dict(free)
    for party, hand in zip(some, hands, strict=True):
        for node, count in party.replicas.items():
            left[node] -= (hand.firm - party.running.own) * count
        if party is of:
            break
    return room(left, of.replicas)


@given(
    parties(),
    st.lists(st.integers(0, 30), min_size=3, max_size=3),
    st.integers(0, 40),
    st.none() | st.integers(0, 40),
    st.integers(0, 20),
)
def test_owned_cores_stay_within_tenant_limits(
    some: list[CoreClaim], unheld: list[int], whole: int, own: int | None, elsewhere: int
) -> None:
    held = sum(party.running.own * sum(party.replicas.values()) for party in some)
    limits = Headroom([Tenant("group", limit_cores=own, parent="dept"), Tenant("dept", limit_cores=whole)])
    limits.take("group", 0, held)
    limits.take("dept", 0, elsewhere)
    free = dict(enumerate(unheld))
    hands = rebalance_cores(some, free, lambda one: 1.0, limits)
    grown = sum(
        max(0, hand.firm - party.running.own) * sum(party.replicas.values())
        for party, hand in zip(some, hands, strict=True)
    )
    assert grown <= max(0, whole - held - elsewhere)
    assert own is None or grown <= max(0, own - held)
    assert limits.held("dept") == (0, held + elsewhere), "to deal changes no count"
    loose = rebalance_cores(some, free, lambda one: 1.0)
    for party, hand, other in zip(some, hands, loose, strict=True):
        shrinks = other.firm < party.running.own
        assert hand.firm == other.firm if shrinks else hand.firm >= party.running.own


def test_a_tenant_at_its_limit_can_still_borrow_spare_cores() -> None:
    limits = Headroom([Tenant("small", limit_cores=5)], {"small": (0, 4)})
    gang = CoreClaim(running("a", 1, 0, 3, tenant="small"), 5, {0: 2})
    other = CoreClaim(running("b", 1, 0, 3, tenant="small"), 3, {1: 1})
    assert rebalance_cores([gang, other], {0: 8, 1: 8}, lambda one: 1.0, limits) == [CoreGrant(1, 4), CoreGrant(2, 1)]


def test_spare_cores_go_to_the_largest_gain_not_the_first_job() -> None:
    level = running("a", 3, 0, 3, (Point(3, 10.0), Point(5, 10.1)))
    steep = running("b", 3, 0, 3, (Point(3, 10.0), Point(5, 15.0)))
    hands = rebalance_cores([CoreClaim(level, 5, {0: 1}), CoreClaim(steep, 5, {0: 1})], {0: 2}, lambda one: 1.0)
    assert hands == [CoreGrant(3, 0), CoreGrant(3, 2)]
    weighty = rebalance_cores(
        [CoreClaim(level, 5, {0: 1}), CoreClaim(steep, 5, {0: 1})], {0: 2}, lambda one: 99.0 ** (one is level)
    )
    assert weighty == [CoreGrant(3, 2), CoreGrant(3, 0)]


def test_a_share_that_was_slimmed_comes_back_from_those_it_was_lent_to() -> None:
    slim, greedy = running("a", 1, 0, 3), running("b", 3, 2, 3)
    assert rebalance_cores([CoreClaim(slim, 3, {0: 1}), CoreClaim(greedy, 5, {0: 1})], {0: 2}, lambda one: 1.0) == [
        CoreGrant(3),
        CoreGrant(3),
    ]


def test_a_gang_is_dealt_the_same_on_all_its_nodes() -> None:
    gang = CoreClaim(running("a", 1, 0, 3), 3, {0: 2, 1: 1})
    assert rebalance_cores([gang], {0: 3, 1: 9}, lambda one: 1.0) == [CoreGrant(2)]


@given(st.integers(1, 3), st.floats(0.01, 100), st.dictionaries(st.integers(0, 2), st.integers(1, 2), min_size=1))
def test_what_cores_are_worth_does_not_depend_on_the_unit_of_the_rates(
    own: int, unit: float, replicas: dict[int, int]
) -> None:
    rates = {1: 4.0, 2: 6.0, 4: 9.0, 6: 9.5}

    def worth(unit: float, weight: float = 1.0) -> list[float]:
        points = tuple(Point(cores, rate * unit) for cores, rate in rates.items())
        return list(borrower(running("a", own, 0, 2, points), 6, replicas, weight).worth)

    assert worth(unit) == pytest.approx(worth(1.0), rel=1e-6)
    assert worth(1.0, weight=3.0) == pytest.approx([3 * each for each in worth(1.0)])
    on_its_share = worth(1.0)[2 - own] if own <= 2 else worth(1.0)[0] / rates_at(3) * rates_at(2)
    assert on_its_share == pytest.approx(sum(replicas.values()), rel=0.01), "a GPU that is kept busy counts as one"


def rates_at(cores: int) -> float:
    return expected((Point(1, 4.0), Point(2, 6.0), Point(4, 9.0), Point(6, 9.5)), cores)
