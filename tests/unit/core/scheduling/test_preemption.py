from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.conformance.worlds import rng
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Refusal
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.scheduling.cycle import Plan, Victim, place
from cotenant.core.scheduling.preemption import EXACT_MAX, cheapest, cost_of
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.count import Count
from cotenant.policies.first_fit import FirstFit

placements: st.SearchStrategy[PlacementPolicy] = st.sampled_from([Count(), FirstFit(), Consolidate()])
parts = st.builds(
    Part, st.just("worker"), st.sampled_from([1, 1, 2, 4]), st.builds(Demand, st.sampled_from([1000, 2000, 4000]))
)


@st.composite
def clusters(draw: st.DrawFn, most: int = 6) -> tuple[Ledger, list[Victim]]:
    """A full cluster of jobs of which some are cheap to stop; of higher standing to the end."""
    ledger = Ledger([NodeShape(4, 8)] * 3 if most <= EXACT_MAX else [NodeShape(8, 8)] * 4)
    victims: list[Victim] = []
    sizes = st.tuples(st.integers(0, len(ledger) - 1), st.integers(1, 3), st.sampled_from([0.0, 1.0, 5.0, 60.0]))
    for node, gpus, cost in draw(st.lists(sizes, min_size=1, max_size=most)):
        if ledger.free_gpus[node] >= gpus:
            held = (ledger.take(node, Demand(1000), gpus),)
            victims.append(Victim(f"v{len(victims)}", held, standing=0, stop_cost_seconds=cost))
    for node in range(len(ledger)):
        if (left := int(ledger.free_gpus[node])) and draw(st.booleans()):
            ledger.take(node, Demand(1000), left)
    steps = sorted(draw(st.lists(st.integers(0, 1), min_size=len(victims), max_size=len(victims))))
    return ledger, [
        Victim(one.job_id, one.holdings, None, "", standing, one.stop_cost_seconds)
        for one, standing in zip(victims, steps, strict=True)
    ]


def suffices(gang: Gang, ledger: Ledger, policy: PlacementPolicy, some: Sequence[Victim]) -> bool:
    with ledger.rolled_back():
        for victim in some:
            for holding in victim.holdings:
                ledger.release(holding)
        return not isinstance(policy.place(gang, ledger, rng()), Refusal)


def price(some: Sequence[Victim]) -> tuple[float, ...]:
    return max((victim.standing or 0 for victim in some), default=-1), *cost_of(some)


@given(clusters(), parts, placements)
def test_of_few_victims_the_cheapest_set_stops(
    cluster: tuple[Ledger, list[Victim]], part: Part, policy: PlacementPolicy
) -> None:
    ledger, victims = cluster
    gang = Gang("gang", (part,))
    plan = place([gang], ledger, policy, rng(), victims=victims)
    sets = (some for count in range(len(victims) + 1) for some in combinations(victims, count))
    enough = [price(some) for some in sets if suffices(gang, ledger, policy, some)]
    if not enough:
        assert gang.job_id in plan.refusals
        return
    assert price(gone(plan, victims)) == min(enough)


def gone(plan: Plan, victims: Sequence[Victim]) -> list[Victim]:
    return [victim for victim in victims if victim.job_id in plan.stops]


@given(clusters(most=24), parts, placements)
def test_of_many_victims_the_set_suffices_and_costs_no_more_than_the_last_in_the_order(
    cluster: tuple[Ledger, list[Victim]], part: Part, policy: PlacementPolicy
) -> None:
    ledger, victims = cluster
    gang = Gang("gang", (part,))
    asked = 0

    def ask(some: Sequence[Victim]) -> bool:
        nonlocal asked
        asked += 1
        return suffices(gang, ledger, policy, some)

    last = next((victims[:count] for count in range(1, len(victims) + 1) if ask(victims[:count])), None)
    if last is None or suffices(gang, ledger, policy, []):
        return
    asked = 0
    chosen = cheapest(gang, victims, last, ledger, ask)
    assert suffices(gang, ledger, policy, chosen)
    assert cost_of(chosen) <= cost_of(last)
    assert asked <= 256


@pytest.mark.parametrize("others", [0, 20])
def test_a_job_that_has_just_saved_its_work_goes_before_one_that_has_run_for_hours(others: int) -> None:
    ledger = Ledger([NodeShape(4, 8)] * (2 + others))
    costs = [7200.0, 60.0, *[9000.0] * others]
    victims = [
        Victim(f"v{node}", (ledger.take(node, Demand(1000), 4),), standing=0, stop_cost_seconds=cost)
        for node, cost in enumerate(costs)
    ]
    gang = Gang("gang", (Part("worker", 1, Demand(4000)),))
    assert place([gang], ledger, FirstFit(), rng(), victims=victims).stops == ("v1",)


def test_a_lower_standing_goes_before_a_lower_cost() -> None:
    ledger = Ledger([NodeShape(4, 8)] * 2)
    low = Victim("low", (ledger.take(0, Demand(1000), 4),), standing=0, stop_cost_seconds=9000)
    high = Victim("high", (ledger.take(1, Demand(1000), 4),), standing=1, stop_cost_seconds=1)
    gang = Gang("gang", (Part("worker", 4, Demand(1000)),))
    assert place([gang], ledger, FirstFit(), rng(), victims=[low, high]).stops == ("low",)


def test_of_what_is_not_needed_the_most_expensive_is_spared_first() -> None:
    """One GPU and three make the four that are wanted; so do two and three, at a higher price."""
    ledger = Ledger([NodeShape(6, 8), *[NodeShape(4, 8)] * EXACT_MAX])
    held = [("one", 0, 1, 10.0), ("two", 0, 2, 15.0), ("three", 0, 3, 20.0)]
    held += [(f"costly{node}", node, 4, 9000.0) for node in range(1, len(ledger))]
    victims = [
        Victim(name, (ledger.take(node, Demand(1000), gpus),), standing=0, stop_cost_seconds=cost)
        for name, node, gpus, cost in held
    ]
    gang = Gang("gang", (Part("worker", 4, Demand(1000)),))
    assert set(place([gang], ledger, Consolidate(), rng(), victims=victims).stops) == {"one", "three"}


def test_one_server_is_cleared_where_that_costs_less_than_cheap_victims_everywhere() -> None:
    """On two of the other servers seven jobs are cheaper, but the eighth is dear; the first to go cost more."""
    ledger, victims = Ledger([NodeShape(8, 8)] * 4), []
    for node in range(4):
        for number in range(8):
            cost = 3.0 - node if node < 2 else 100.0 if number == 7 else 1.0
            held = (ledger.take(node, Demand(1000), 1),)
            victims.append(Victim(f"v{node}-{number}", held, standing=0, stop_cost_seconds=cost))
    plan = place([Gang("gang", (Part("worker", 1, Demand(8000)),))], ledger, FirstFit(), rng(), victims=victims)
    assert sorted(plan.stops) == [f"v1-{number}" for number in range(8)]
