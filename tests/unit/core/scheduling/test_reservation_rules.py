"""Which gangs get a reservation and for how long, what is kept for them, and how refusals tell of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.capacity.ledger import Holding
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job_table import JobRow, JobTable
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.scheduling.admission import Rules
from cotenant.core.scheduling.earliest_start import Departure
from cotenant.core.scheduling.reservations import (
    Reservation,
    ReservationRules,
    groups,
    has_reservation,
    held_back,
    relaxations,
)
from cotenant.policies.locality import WaitsForLocality

INF = math.inf
REFUSAL = Refusal(Code.CAPACITY, "needs 4 GPUs", "jobs finish", {"wanted": 4.0}, holds_seconds=90.0, held_seconds=5.0)


def reservation(start: float, early: float, late: float, *, holds: float = 60.0, waited: float = 0.0) -> Reservation:
    at = (Holding(0, 1), Holding(0, 2), Holding(3, 1))
    return Reservation(Gang("first", (), waited_seconds=waited), at, start, early, late, holds)


def ends_within(seconds: float | None) -> Gang:
    known = UNKNOWN if seconds is None else Estimate(True, 1.0, seconds, seconds, seconds)
    return Gang("other", (), estimate=known)


@pytest.mark.parametrize(("after", "most", "any_at_all"), [(0.0, 1, True), (9.0, 0, False), (INF, 1, False)])
def test_rules_without_a_time_or_a_number_reserve_nothing(after: float, most: int, any_at_all: bool) -> None:
    assert bool(ReservationRules(after, most)) == any_at_all


def test_a_gang_starves_from_the_second_on_that_the_rule_names() -> None:
    rule = ReservationRules(100.0)
    assert [rule.starves(Gang("a", (), waited_seconds=waited)) for waited in (99.9, 100.0, 100.1)] == [
        False,
        True,
        True,
    ]


@given(st.floats(0, 1000), st.floats(0, 1e6))
def test_places_without_a_known_start_are_kept_and_given_away_in_turns_of_double_length(
    after: float, waited: float
) -> None:
    rule, at, end, kept = ReservationRules(after), 0.0, max(2 * after, 1.0), False
    while end <= waited:
        at, end, kept = end, 2 * end, not kept
    keeps, holds = rule.keeps(waited)
    assert at <= waited < end
    if math.isclose(waited, end, rel_tol=1e-9) or math.isclose(waited, at, rel_tol=1e-9):
        return  # a logarithm may fall on either side
    assert keeps == kept
    assert holds == pytest.approx(end - waited)


@pytest.mark.parametrize(
    ("start", "early", "late", "told", "numbers"),
    [
        (600.0, 600.0, 600.0, "estimated start in 10 min on 2 nodes", {"start": 600.0, "early": 600.0, "late": 600.0}),
        (600.0, 480.0, 900.0, "in 10 min (8 min to 15 min) on", {"start": 600.0, "early": 480.0, "late": 900.0}),
        (600.0, 600.0, 900.0, "in 10 min (10 min to 15 min) on", {"start": 600.0, "early": 600.0, "late": 900.0}),
        (600.0, 480.0, INF, "in 10 min (8 min or later) on", {"start": 600.0, "early": 480.0}),
        (INF, INF, INF, "what becomes free on 2 nodes is kept for it for 60 s", {}),
    ],
)
def test_a_refusal_tells_when_its_gang_will_start_as_far_as_that_is_known(
    start: float, early: float, late: float, told: str, numbers: dict[str, float]
) -> None:
    found = reservation(start, early, late).annotate(REFUSAL)
    assert found.detail.startswith("needs 4 GPUs; reserved: ")
    assert told in found.detail
    expected = {f"reserved_{name}_seconds": value for name, value in numbers.items()}
    assert found.numbers == {"wanted": 4.0, "reserved_nodes": 2.0, **expected}
    assert (found.holds_seconds, found.held_seconds, found.code) == (60.0, 0.0, Code.CAPACITY)
    assert has_reservation(found)
    assert not has_reservation(REFUSAL)


def test_a_reason_that_ends_before_its_reservation_is_refreshed_ends_then() -> None:
    assert reservation(5.0, 5.0, 5.0, holds=120.0).annotate(REFUSAL).holds_seconds == 90.0


@pytest.mark.parametrize(
    ("start", "seconds", "binds"),
    [(50.0, 49.0, False), (50.0, 50.0, False), (50.0, 51.0, True), (50.0, None, True), (INF, 1.0, True)],
)
def test_a_gang_is_held_back_unless_it_ends_by_the_reserved_start(
    start: float, seconds: float | None, binds: bool
) -> None:
    assert reservation(start, start, start).binds(ends_within(seconds)) == binds


@pytest.mark.parametrize(
    ("start", "seconds", "told", "numbers"),
    [
        (600.0, 7200.0, "will start in 10 min; it may run for 2 h", {"starts": 600.0, "ends": 7200.0}),
        (INF, 7200.0, "will start; it may run for 2 h", {"ends": 7200.0}),
        (600.0, None, "will start in 10 min; its own run time is unknown", {"starts": 600.0}),
    ],
)
def test_a_gang_that_is_held_back_is_told_for_which_one_until_when_and_why(
    start: float, seconds: float | None, told: str, numbers: dict[str, float]
) -> None:
    kept = [reservation(start, start, start, waited=180.0), reservation(1.0, 1.0, 1.0)]
    kept[1].gang = Gang("second", ())
    found = held_back(ends_within(seconds), REFUSAL, kept)
    assert "its places on 2 nodes are reserved for first and second, which has waited for 3 min" in found.detail
    assert told in found.detail
    names = {"starts": "other_starts_in_seconds", "ends": "ends_within_seconds"}
    expected = {names[name]: value for name, value in numbers.items()}
    assert found.numbers == {"kept_nodes": 2.0, "other_waited_seconds": 180.0, **expected}
    assert (found.code, found.holds_seconds, found.held_seconds) == (Code.RESERVED, 90.0, 5.0)


def test_departing_jobs_give_back_what_they_hold_on_the_nodes_in_question() -> None:
    here, there = Holding(0, 1), Holding(1, 2)
    departures = [Departure("a", (here, there)), Departure("b", (there,))]
    assert groups(departures, {0}) == {"a": (here,)}
    assert groups(departures, {0, 1}) == {"a": (here, there), "b": (there,)}
    assert groups(departures, set()) == {}


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.3, 1.0, 40.0, 99.5, 100.0, 300.0]), st.booleans()), max_size=6))
def test_the_next_reservation_comes_when_the_next_waiting_job_has_waited_long_enough(
    jobs: list[tuple[float, bool]],
) -> None:
    table, now = JobTable(), 1000.0
    for number, (waited, runs) in enumerate(jobs):
        table.add(JobRow(f"{number}", now - waited, number))
        if runs:
            table.start(f"{number}", now - waited)
    left = [100.0 - waited for waited, runs in jobs if not runs and waited < 100.0]
    found = Rules(reserve_after_seconds=100.0).next_reservation_seconds(table.jobs(now), now)
    assert found == pytest.approx(min(left, default=INF))
    assert Rules().next_reservation_seconds(table.jobs(now), now) == INF


def test_a_gang_relaxes_step_by_step_from_what_it_has_waited() -> None:
    policy = WaitsForLocality(WaitsForLocality.Options(server_seconds=100, rack_seconds=50))
    gang = Gang("a", (Part("worker", 8, Demand(1000)),))
    times = relaxations(gang, policy)
    assert times == [50.0, 100.0, 150.0]
    for waited in (0.0, 30.0, 99.0, 120.0, 200.0):
        older = replace(gang, fragmented_seconds=waited)
        assert relaxations(older, policy) == [at - waited for at in times if at > waited]
