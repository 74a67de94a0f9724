"""When waiting jobs will start: examples, invariants, and the simulator as an oracle."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.properties import examples

from cotenant import plugins
from cotenant.conformance.worlds import gangs, rng, worlds
from cotenant.core.capacity.ledger import Holding, Ledger
from cotenant.core.forecast.forecast_state import ForecastState
from cotenant.core.forecast.start_forecast import (
    ENDS_MAX,
    ExpectedStart,
    Forecast,
    QueueSnapshot,
    RunningEntry,
    WaitingEntry,
    forecast,
)
from cotenant.core.model.estimate import UNKNOWN, Estimate
from cotenant.core.model.gang import Demand, Gang
from cotenant.core.model.gang import Part as GangPart
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.model.tenancy import Headroom, Tenant
from cotenant.core.model.validation import check_amounts
from cotenant.core.placement.gang_allocation import cores_of, gpu_milli_of, release_all, take
from cotenant.core.policy.cluster_view import RunningJob
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.prediction.remaining_time import RemainingTime, certain_time, remaining_time_of, sample_run_times
from cotenant.core.scheduling.cycle import gang_with
from cotenant.core.scheduling.reservations import NO_RESERVATIONS, ReservationRules
from cotenant.policies.consolidate import Consolidate
from cotenant.policies.first_fit import FirstFit
from cotenant.policies.locality import WaitsForLocality
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.snapshots import Held, Job, Node, Part, Snapshot


def gang(job_id: str, gpus: int, replicas: int = 1, tenant: str = "") -> Gang:
    return Gang(job_id, (GangPart("worker", replicas, Demand(1000 * gpus)),), tenant=tenant)


def picture(ledger: Ledger, holders: list[RunningEntry], waiters: list[WaitingEntry], **more: Any) -> QueueSnapshot:
    for holder in holders:
        for holding in holder.holdings:
            ledger.hold(holding)
    return QueueSnapshot(ledger, holders, waiters, **more)


def on(job_id: str, node: int, gpus: int, seconds: float, tenant: str = "") -> RunningEntry:
    return RunningEntry(job_id, (Holding(node, gpus),), certain_time(seconds), tenant)


def starts(told: Forecast) -> dict[str, float]:
    return {job_id: one.seconds for job_id, one in told.expected.items()}


def two_servers() -> Ledger:
    return Ledger([NodeShape(4, 8), NodeShape(4, 8)])


def test_a_job_starts_when_those_end_that_are_where_it_will_be() -> None:
    held = [on("a", 0, 4, 60), on("b", 1, 2, 600), on("c", 1, 2, 700)]
    told = forecast(picture(two_servers(), held, [WaitingEntry(gang("w", 4), certain_time(10))]), FirstFit(), rng())
    assert told.expected == {"w": ExpectedStart(60, 60, 60, ("a",), 1, 70)}
    assert told.draws == 1, "there is nothing to draw"


def test_a_start_is_explained_by_the_ends_where_it_is_and_not_by_those_elsewhere() -> None:
    held = [on("a", 0, 4, 60), on("b", 1, 4, 60), on("c", 1, 0, 30)]
    waiters = [WaitingEntry(gang("w", 4), certain_time(10)), WaitingEntry(gang("v", 4), certain_time(10))]
    told = forecast(picture(two_servers(), held, waiters), FirstFit(), rng())
    assert {job_id: one.ends for job_id, one in told.expected.items()} == {"w": ("a",), "v": ("b", "c")}
    room = Headroom([Tenant("t", limit_gpu_milli=4000)], {"t": (4000, 0)})
    held = [on("early", 0, 4, 20), on("same", 1, 4, 60, "t")]
    limited = WaitingEntry(gang("w", 4, tenant="t"), certain_time(10))
    told = forecast(picture(two_servers(), held, [limited], headroom=room), FirstFit(), rng())
    assert told.expected["w"].ends == ("same", "early"), "first what it waited for until now"


@pytest.mark.parametrize(
    ("replicas", "demand", "first"),
    [(1, Demand(1000, 2), "young"), (2, Demand(0, 1), "old"), (1, Demand(0, 2), "young")],
)
def test_only_gangs_that_starve_pass_their_equals(replicas: int, demand: Demand, first: str) -> None:
    held = [RunningEntry("a", (Holding(0, 1, 2),), certain_time(60))]
    waiters = [
        WaitingEntry(Gang(name, (GangPart("worker", replicas, demand),), waited_seconds=waited), certain_time(10))
        for name, waited in (("young", 10.0), ("old", 100.0))
    ]
    shown = picture(Ledger([NodeShape(1, 2)]), held, waiters, reserving=ReservationRules(50.0))
    found = starts(forecast(shown, FirstFit(), rng()))
    assert min(found, key=lambda name: found[name]) == first
    assert sorted(found.values()) == [60, 70]


def test_the_estimate_of_a_job_counts_down_from_when_it_was_made() -> None:
    state = ForecastState(1000.0)
    seen = RunningJob(replace(gang("a", 1), estimate=sure(50.0)), (Holding(0, 1),), 0.0)
    state.advance_to(100.0)
    state.enter(RunningEntry("a", seen.holdings, certain_time(50.0), running_job=seen))
    for later, left in ((0.0, 50.0), (20.0, 30.0), (70.0, 0.0)):
        state.advance_to(100.0 + later)
        assert state.running_job("a").gang.estimate.remaining_seconds == left


@pytest.mark.parametrize(
    ("gpus", "demand", "ending", "other"),
    [
        (4, Demand(2000), Holding(0, 2), Holding(0, 2)),
        (1, Demand(500), Holding(0, shares=((0, 500),)), Holding(0, shares=((0, 500),))),
        (0, Demand(cores=3), Holding(0, cores=3), Holding(0, cores=5)),
        (0, Demand(cores=1, memory_bytes=7), Holding(0, memory_bytes=7), Holding(0, memory_bytes=3)),
    ],
)
def test_a_job_starts_as_soon_as_exactly_what_it_needs_is_released(
    gpus: int, demand: Demand, ending: Holding, other: Holding
) -> None:
    ledger = Ledger([NodeShape(gpus, 8, memory_bytes=10, shareable=True)])
    held = [RunningEntry("first", (ending,), certain_time(60)), RunningEntry("last", (other,), certain_time(600))]
    waiter = WaitingEntry(Gang("w", (GangPart("worker", 1, demand),)), certain_time(10))
    for strict in (False, True):
        shown = picture(ledger.copy(), held, [waiter], strict=strict)
        assert starts(forecast(shown, FirstFit(), rng())) == {"w": 60}


def unknown(job_id: str, node: int, gpus: int, seconds: float) -> RunningEntry:
    return RunningEntry(job_id, (Holding(node, gpus),), RemainingTime(seconds, seconds / 9, seconds * 9, known=False))


def waiting(job_id: str, gpus: int, replicas: int = 1, *, known: bool = True) -> WaitingEntry:
    return WaitingEntry(gang(job_id, gpus, replicas), RemainingTime(10, 10, 10, known))


def starts_unknown(held: list[RunningEntry], *waiters: WaitingEntry, strict: bool = False) -> dict[str, bool]:
    told = forecast(picture(two_servers(), held, list(waiters), strict=strict), FirstFit(), rng())
    return {job_id: one.of_unknown for job_id, one in told.expected.items()}


def test_a_start_is_unknown_if_it_depends_only_on_jobs_of_unknown_length() -> None:
    held = [unknown("a", 0, 4, 60), on("b", 1, 4, 600)]
    assert starts_unknown(held, waiting("w", 4), waiting("both", 4, 2)) == {"w": True, "both": False}
    assert starts_unknown([unknown("a", 0, 4, 60), unknown("b", 1, 4, 600)], waiting("both", 4, 2)) == {"both": True}
    assert starts_unknown([unknown("a", 0, 4, 60)], waiting("free", 4)) == {"free": False}, "it starts at once"


def test_what_waits_for_a_start_that_is_unknown_is_unknown_too() -> None:
    held = [unknown("a", 0, 4, 60), unknown("b", 1, 4, 600)]
    assert starts_unknown(held, waiting("first", 4), waiting("next", 4)) == {"first": True, "next": True}
    held = [on("a", 0, 4, 60), on("b", 1, 4, 600)]
    assert starts_unknown(held, waiting("first", 4, known=False), waiting("next", 4)) == {"first": False, "next": False}


def test_the_end_of_a_job_of_unknown_length_is_unknown() -> None:
    told = forecast(picture(two_servers(), [], [waiting("w", 4, known=False), waiting("v", 4)]), FirstFit(), rng())
    assert (told.expected["w"].finish_seconds, told.expected["v"].finish_seconds) == (math.inf, 10)


def test_a_strict_queue_lets_nobody_pass_and_a_filling_one_does() -> None:
    held = [on("a", 0, 4, 60), on("b", 1, 2, 600)]
    waiters = [WaitingEntry(gang("large", 4), certain_time(10)), WaitingEntry(gang("small", 2), certain_time(5))]
    assert starts(forecast(picture(two_servers(), held, waiters), FirstFit(), rng())) == {"large": 60, "small": 0}
    strict = picture(two_servers(), held, waiters, strict=True)
    assert starts(forecast(strict, FirstFit(), rng())) == {"large": 60, "small": 60}


def test_whoever_starts_first_is_waited_for_as_those_who_run() -> None:
    waiters = [WaitingEntry(gang("first", 4, 2), certain_time(30)), WaitingEntry(gang("second", 4, 2), certain_time(1))]
    told = forecast(picture(two_servers(), [], waiters), FirstFit(), rng())
    assert told.expected["second"] == ExpectedStart(30, 30, 30, ("first",), 1, 31)


def test_a_limit_of_its_tenant_holds_a_job_back_until_a_job_of_that_tenant_ends() -> None:
    room = Headroom([Tenant("vision", limit_gpu_milli=4000)], {"vision": (4000, 0)})
    held = [on("a", 0, 4, 90, "vision"), on("b", 1, 1, 5)]
    waiters = [
        WaitingEntry(gang("w", 2, tenant="vision"), certain_time(10)),
        WaitingEntry(gang("v", 2), certain_time(1)),
    ]
    told = forecast(picture(two_servers(), held, waiters, headroom=room, strict=True), FirstFit(), rng())
    assert starts(told) == {"w": 90, "v": 0}
    assert room.held("vision") == (4000, 0)


def test_a_limit_of_cores_holds_back_no_job_for_its_gpus() -> None:
    room = Headroom([Tenant("vision", limit_cores=6)], {"vision": (4000, 6)})
    waiters = [WaitingEntry(gang("w", 2, tenant="vision"), certain_time(10))]
    assert starts(forecast(picture(two_servers(), [], waiters, headroom=room), FirstFit(), rng())) == {"w": 0}


@pytest.mark.parametrize("strict", [False, True])
def test_limits_of_arrays_and_tenants_hold_back_no_other_job(strict: bool) -> None:
    room = Headroom([Tenant("vision", limit_gpu_milli=1000)])
    waiters = [
        *(WaitingEntry(gang(f"task-{number}", 1), certain_time(10), "array", 1) for number in range(2)),
        *(WaitingEntry(gang(f"vision-{number}", 1, tenant="vision"), certain_time(20)) for number in range(2)),
        WaitingEntry(gang("last", 1), certain_time(1)),
    ]
    told = forecast(picture(two_servers(), [], waiters, headroom=room, strict=strict), FirstFit(), rng())
    assert starts(told) == {"task-0": 0, "task-1": 10, "vision-0": 0, "vision-1": 20, "last": 0}


def test_a_gang_that_relaxes_starts_when_it_does() -> None:
    ledger = Ledger([NodeShape(4, 8)] * 2, ["a", "b"])
    held = [on("a", 0, 2, 9000), on("b", 1, 2, 9000)]
    policy = WaitsForLocality(WaitsForLocality.Options(server_seconds=100, rack_seconds=50))
    told = forecast(picture(ledger, held, [WaitingEntry(gang("w", 1, 4), certain_time(10))]), policy, rng())
    assert starts(told)["w"] == pytest.approx(150)
    assert told.expected["w"].ends == ()


def waits(job_id: str, gpus: int, seconds: float, waited: float = 0.0) -> WaitingEntry:
    known = replace(gang(job_id, gpus), waited_seconds=waited, estimate=sure(seconds))
    return WaitingEntry(known, certain_time(seconds))


def test_what_is_reserved_for_a_starving_gang_is_promised_to_nobody_who_would_hold_it_up() -> None:
    known = RunningJob(replace(gang("a", 3), estimate=sure(60)), (Holding(0, 3),), 0.0)
    held = [replace(on("a", 0, 3, 60), running_job=known)]
    waiters = [waits("gang", 4, 10, waited=100.0), waits("long", 1, 500), waits("short", 1, 20)]
    shown = picture(Ledger([NodeShape(4, 8)]), held, waiters, reserving=ReservationRules(50.0))
    assert starts(forecast(shown, FirstFit(), rng())) == {"gang": 60, "long": 70, "short": 0}
    assert starts(forecast(replace(shown, reserving=NO_RESERVATIONS), FirstFit(), rng()))["long"] == 0


def test_who_stands_after_a_waiting_job_makes_it_room_and_goes_on_after_it() -> None:
    held = [on("low", 0, 4, 100), on("high", 1, 4, 30)]
    running_jobs = {
        one.job_id: RunningJob(gang(one.job_id, 4), one.holdings, 0.0, stop_cost_seconds=7.0) for one in held
    }
    waiters = [WaitingEntry(gang("w", 4), certain_time(10)), WaitingEntry(gang("v", 4), certain_time(50))]
    shown = picture(two_servers(), [replace(one, running_job=running_jobs[one.job_id]) for one in held], waiters)
    told = forecast(replace(shown, stoppable={"low": 1}), FirstFit(), rng())
    assert starts(told) == {"w": 0, "v": 30}, "low goes on at 10, for it stands before v"
    assert told.expected["v"].ends[0] == "high"
    assert starts(forecast(shown, FirstFit(), rng())) == {"w": 30, "v": 40}


def test_what_never_fits_never_starts_and_holds_nobody_back() -> None:
    waiters = [WaitingEntry(gang("huge", 5), certain_time(1)), WaitingEntry(gang("w", 1), certain_time(1))]
    told = forecast(picture(two_servers(), [], waiters, strict=True), FirstFit(), rng())
    assert starts(told) == {"huge": math.inf, "w": 0}


def test_the_interval_is_as_wide_as_what_is_known_of_those_it_waits_for() -> None:
    held = [RunningEntry("a", (Holding(0, 4), Holding(1, 4)), RemainingTime(720, 480, 1800))]
    told = forecast(
        picture(two_servers(), held, [WaitingEntry(gang("w", 1), certain_time(1))]), FirstFit(), rng(), draws=200
    )
    one = told.expected["w"]
    assert (one.p10_seconds, one.seconds, one.p90_seconds) == pytest.approx((480, 720, 1800), rel=0.35)
    assert told.draws == 201


def test_once_the_time_is_spent_the_rest_is_unknown_and_it_is_told_how_far_it_went() -> None:
    held = [on(f"j{number}", number % 2, 1, 10.0 * (number + 1)) for number in range(8)]
    turns = itertools.count()
    told = forecast(
        picture(
            two_servers(),
            held,
            [WaitingEntry(gang("w", 4), certain_time(1)), WaitingEntry(gang("v", 1), certain_time(999))],
        ),
        FirstFit(),
        rng(),
        spent=lambda: next(turns) > 2,
    )
    assert (told.expected["w"].seconds, told.reached_seconds, told.draws) == (math.inf, 30, 1)
    assert told.expected["v"].seconds == 10


def test_a_job_is_not_stopped_for_those_that_it_outranks() -> None:
    """Only the first to wait may have its place, and that one does not fit there."""
    held = [on("low", 0, 4, 100), on("b", 1, 4, 200)]
    waits = [WaitingEntry(gang("head", 4, replicas=2), certain_time(1)), WaitingEntry(gang("w", 4), certain_time(1))]
    shown = picture(two_servers(), held, waits)
    assert starts(forecast(replace(shown, stoppable={"low": 1}), FirstFit(), rng()))["w"] == 100
    assert starts(forecast(replace(shown, stoppable={"low": 2}), FirstFit(), rng()))["w"] == 0


def test_beyond_the_horizon_nothing_is_told() -> None:
    told = forecast(
        picture(two_servers(), [on("a", 0, 4, 100), on("b", 1, 4, 100)], [WaitingEntry(gang("w", 1), certain_time(1))]),
        FirstFit(),
        rng(),
        horizon_seconds=50,
    )
    assert (starts(told)["w"], told.reached_seconds) == (math.inf, 50)


def test_what_is_left_is_what_the_predictor_says_then_the_user_then_as_much_again() -> None:
    known = Estimate(predictable=True, remaining_seconds=50, remaining_p10_seconds=40, remaining_p90_seconds=90)
    assert remaining_time_of(known, 10, expected_seconds=1000) == RemainingTime(50, 40, 90)
    assert remaining_time_of(Estimate(predictable=True, remaining_seconds=0.0), 10).seconds == 10, (
        "it outlived its prediction"
    )
    assert remaining_time_of(Estimate(), 10, expected_seconds=9).seconds == 10, "it outlived what its user expected"
    assert remaining_time_of(Estimate(), 0, usual_seconds=300).seconds == 300
    assert remaining_time_of(Estimate(), 10, expected_seconds=100) == certain_time(90)
    assert remaining_time_of(Estimate(), 90, usual_seconds=300) == RemainingTime(90, 10, 810, known=False)


def test_sampled_run_times_have_the_quantiles_that_were_told() -> None:
    told = [RemainingTime(100, 20, 500), RemainingTime(3600, 3000, 3700)]
    sampled = sample_run_times(told, rng(), 4000)
    assert sampled[0].tolist() == [100, 3600], "the medians come first"
    for column, one in zip(sampled[1:].T, told, strict=True):
        shares = [float((column <= seconds).mean()) for seconds in (one.p10_seconds, one.seconds, one.p90_seconds)]
        assert shares == pytest.approx([0.1, 0.5, 0.9], abs=0.03)
        assert column.min() >= 0


# A plain event loop as the oracle -------------------------------------------------------------------------------


@st.composite
def crowded(draw: st.DrawFn) -> QueueSnapshot:
    """A cluster with running jobs and a queue, with limits of tenants and of arrays; all times are whole seconds."""
    world = draw(worlds(nodes_max=3))
    tenants, arrays = st.sampled_from(["", "vision", "team"]), st.sampled_from(["", "array", "array", "unlimited"])
    entries = [
        RunningEntry(
            f"r{number}", held, certain_time(float(draw(st.integers(0, 20)))), draw(tenants), array=draw(arrays)
        )
        for number, held in enumerate(world.taken)
    ]
    waiters = []
    for number in range(draw(st.integers(1, 6))):
        asked = replace(draw(gangs(roles_max=2, job_id=f"w{number}")), tenant=draw(tenants))
        array = draw(arrays)
        seconds = certain_time(float(draw(st.integers(1, 20))))
        waiters.append(WaitingEntry(asked, seconds, array, 1 if array == "array" else 0))
    limited = [Tenant("vision", limit_gpu_milli=3000, parent="team"), Tenant("team", limit_cores=9)]
    holding = dict.fromkeys(("vision", "team"), (0, 0))
    for tenant in holding:
        mine = [held for one in entries if one.tenant == tenant for held in one.holdings]
        holding[tenant] = gpu_milli_of(mine), cores_of(mine)
    return QueueSnapshot(world.ledger, entries, waiters, draw(st.booleans()), Headroom(limited, holding))


def loop_over_events(shown: QueueSnapshot) -> dict[str, tuple[float, list[str], float]]:
    """The slow twin: after each end, every waiting job is tried in order. By job: its start, `ends` and finish."""
    ledger, headroom = shown.ledger.copy(), shown.headroom.copy()
    running = [(one.rest.seconds, one.job_id, one.holdings, one.tenant, one.array) for one in shown.holders]
    waiting, now = list(shown.waiters), 0.0
    ended: list[tuple[float, str, set[int]]] = []
    told: dict[str, tuple[float, list[str], float]] = {}
    limits = {one.array: one.running_max for one in shown.waiters if one.running_max}
    while True:
        for one in sorted((one for one in running if one[0] <= now), key=lambda one: one[0]):
            running.remove(one)
            release_all(ledger, one[2])
            headroom.take(one[3], -gpu_milli_of(one[2]), -cores_of(one[2]))
            ended.insert(0, (one[0], one[1], {held.node for held in one[2]}))
        for waiter in tuple(waiting):
            asked, in_array = waiter.gang, sum(one[4] == waiter.array for one in running)
            if in_array >= limits.get(waiter.array, math.inf) and waiter.running_max:
                continue
            if not headroom.allows(asked.tenant, asked.gpu_milli, asked.cores):
                continue
            answer = FirstFit().place(asked, ledger, rng())
            if isinstance(answer, Refusal):
                if shown.strict and answer.code is not Code.NEVER_FITS:
                    break
                continue
            held, end = take(ledger, asked, answer), now + waiter.run.seconds
            headroom.take(asked.tenant, asked.gpu_milli, asked.cores)
            running.append((end, asked.job_id, held, asked.tenant, waiter.array))
            waiting.remove(waiter)
            there = [one for one in ended if one[2] & {holding.node for holding in held}]
            if not (there and there[0][0] == now):
                there = [one for one in ended if one[0] == now and one not in there] + there
            told[asked.job_id] = now, [one[1] for one in there], end
        if not running:
            return told
        now = min(one[0] for one in running)


@given(crowded())
def test_after_each_end_all_waiting_jobs_are_tried_in_order_within_the_limits(shown: QueueSnapshot) -> None:
    told = forecast(shown, FirstFit(), rng()).expected
    expected = loop_over_events(shown)
    for waiter in shown.waiters:
        one = told[waiter.gang.job_id]
        start, ends, finish = expected.get(waiter.gang.job_id, (math.inf, [], math.inf))
        assert (one.seconds, one.finish_seconds) == (start, finish)
        assert (list(one.ends), one.ends_count) == (ends[:ENDS_MAX], len(ends))


# The simulator as the oracle ----------------------------------------------------------------------------------


@st.composite
def taken(draw: st.DrawFn) -> Snapshot:
    """A cluster on which some jobs run, each on one node, and some wait; all times are whole seconds."""
    racks = draw(st.sampled_from([("",), ("a", "b")]))
    nodes = [Node(f"n{number}", 4, 12, rack=racks[number % len(racks)]) for number in range(draw(st.integers(1, 4)))]
    free = {node.id: 4 for node in nodes}
    jobs = []
    for number, (where, gpus, rest) in enumerate(
        draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 60)), max_size=8))
    ):
        node = nodes[where % len(nodes)].id
        if free[node] >= gpus:
            free[node] -= gpus
            part = Part(replicas=gpus, gpu_milli=1000, cores=1)
            jobs.append(
                Job(f"r{number}", 900.0, (part,), expected_seconds=100.0 + rest, running_since_seconds=900.0,
                    held=(Held(node, gpus=gpus, cores=gpus),), cores=(1,))
            )  # fmt: skip
    for number, (replicas, gpus, run) in enumerate(
        draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 60)), min_size=1, max_size=8))
    ):
        part = Part(replicas=replicas, gpu_milli=1000 * gpus, cores=1)
        jobs.append(Job(f"w{number}", 950.0 + number, (part,), expected_seconds=float(run)))
    return Snapshot(1000.0, tuple(nodes), tuple(jobs))


def sure(seconds: float) -> Estimate:
    return Estimate(predictable=True, confidence=1.0, remaining_seconds=seconds)


def running_job(job: Job, holdings: tuple[Holding, ...]) -> RunningJob:
    parts = tuple(GangPart(part.name, part.replicas, Demand(part.gpu_milli, 1)) for part in job.roles)
    left = (job.expected_seconds or 0.0) - 100.0
    return RunningJob(Gang(job.id, parts, estimate=sure(left)), holdings, 900.0, stop_cost_seconds=0.0)


def pictured(snapshot: Snapshot, *, strict: bool, reserving: ReservationRules = NO_RESERVATIONS) -> QueueSnapshot:
    """The same as a picture. A waiting job begins to wait when the simulation sets in."""
    held = snapshot.holdings()
    holders = [
        RunningEntry(
            job.id, held[job.id], certain_time(job.expected_seconds - 100.0), running_job=running_job(job, held[job.id])
        )
        for job in snapshot.jobs
        if job.running_since_seconds is not None and job.expected_seconds
    ]
    waiters = []
    for job in snapshot.jobs:
        if job.running_since_seconds is None and job.expected_seconds:
            parts = tuple(
                GangPart(part.name, part.replicas, Demand(part.gpu_milli, part.cores or 0)) for part in job.roles
            )
            gang = Gang(job.id, parts, estimate=sure(job.expected_seconds))
            waiters.append(WaitingEntry(gang, certain_time(job.expected_seconds)))
    ledger = Ledger([node.shape for node in snapshot.nodes], [node.rack for node in snapshot.nodes])
    return picture(ledger, holders, waiters, strict=strict, reserving=reserving, now=1000.0)


@pytest.mark.parametrize("name", ["first-fit", "consolidate", "locality"])  # fgd remembers the gangs it was asked about
@pytest.mark.parametrize("mode", ["strict", "backfill"])
@settings(max_examples=examples(8))
@given(snapshot=taken())
def test_with_certain_run_times_it_says_what_a_simulation_of_the_same_snapshot_says(
    tmp_path_factory: pytest.TempPathFactory, name: str, mode: str, snapshot: Snapshot
) -> None:
    simulated = simulated_starts(tmp_path_factory.mktemp("taken"), snapshot, name, mode)
    policy: PlacementPolicy = plugins.load("cotenant.placement_policies", name, {})
    told = starts(forecast(pictured(snapshot, strict=mode == "strict"), policy, rng()))
    assert {job_id: at for job_id, at in told.items() if at < math.inf} == pytest.approx(simulated)


def simulated_starts(
    folder: Path, snapshot: Snapshot, placement: str, mode: str, reserve: float | None = None
) -> dict[str, float]:
    """When waiting jobs start in a simulation that knows all run times."""
    path = folder / "snapshot.json"
    path.write_text(snapshot.dump())
    chosen = {"queue": "fifo", "placement": placement, "predictor": "oracle"}
    options = {"queue": {"mode": mode}, "simulator": {} if reserve is None else {"reserve_after_seconds": str(reserve)}}
    result = Scenario.of_snapshot(path).choosing(chosen, options).run()
    first = min(job.submitted_seconds for job in snapshot.jobs)
    return {
        one.id: one.finished_seconds + first - snapshot.taken_seconds - one.work_seconds
        for one in result.outcomes
        if one.id.startswith("w") and one.finished_seconds is not None
    }


@pytest.mark.parametrize("name", ["first-fit", "consolidate", "qos"])
@settings(max_examples=examples(20))
@given(snapshot=taken(), reserve=st.sampled_from([0.0, 5.0, 20.0]))
def test_a_forecast_keeps_the_reservations_that_a_simulation_keeps(
    tmp_path_factory: pytest.TempPathFactory, name: str, snapshot: Snapshot, reserve: float
) -> None:
    simulated = simulated_starts(tmp_path_factory.mktemp("taken"), snapshot, name, "backfill", reserve)
    policy: PlacementPolicy = plugins.load("cotenant.placement_policies", name, {})
    told = starts(forecast(pictured(snapshot, strict=False, reserving=ReservationRules(reserve)), policy, rng()))
    assert {job_id: at for job_id, at in told.items() if at < math.inf} == pytest.approx(simulated)


@given(taken(), st.booleans(), st.integers(0, 99))
def test_the_ledger_is_left_as_it_was_and_the_same_is_told_again(snapshot: Snapshot, strict: bool, seed: int) -> None:
    shown = pictured(snapshot, strict=strict)
    vague = QueueSnapshot(
        shown.ledger,
        [
            RunningEntry(one.job_id, one.holdings, remaining_time_of(Estimate(), one.rest.seconds))
            for one in shown.holders
        ],
        shown.waiters,
        strict,
    )
    before = [array.copy() for array in (shown.ledger.free_gpus, shown.ledger.free_cores)]
    told = [forecast(vague, Consolidate(), np.random.default_rng(seed), draws=5) for _ in range(2)]
    assert told[0] == told[1]
    assert all(
        (array == was).all()
        for array, was in zip((shown.ledger.free_gpus, shown.ledger.free_cores), before, strict=True)
    )
    for one in told[0].expected.values():
        assert one.p10_seconds <= one.seconds <= one.p90_seconds


ODD = (-(2**63), -(2**31), -1, 0, 1, 2, 1000, 2000, 2**31 - 1, 2**63 - 1)


@st.composite
def asked(draw: st.DrawFn) -> JobSpec:
    """Requests that our own queue would not make."""
    amount = st.sampled_from(ODD) | st.integers(0, 4)
    role = st.builds(
        Role,
        replicas=st.integers(1, 3) | amount,
        request=st.builds(
            Request, gpu_milli=st.sampled_from([0, 500, 1000]) | amount, cores=amount, memory_bytes=amount
        ),
    )
    return JobSpec(roles=tuple(draw(st.lists(role, min_size=1, max_size=2))))


@given(st.lists(asked(), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_whoever_asks_for_amounts_that_can_be_counted_takes_nothing_that_others_hold(
    specs: list[JobSpec], strict: bool, seed: int
) -> None:
    ledger = Ledger([NodeShape(4, 8, memory_bytes=64), NodeShape(2, 4, memory_bytes=64, shareable=True)])
    waiters = [
        WaitingEntry(
            gang_with(f"w{number}", spec, UNKNOWN, [role.request.cores or 1 for role in spec.roles], ""),
            certain_time(9),
        )
        for number, spec in enumerate(specs)
        if not check_amounts(spec)
    ]
    held = [
        on("a", 0, 4, 60),
        RunningEntry("b", (Holding(1, cores=1, memory_bytes=8, shares=((0, 500),)),), certain_time(600)),
    ]
    shown = picture(ledger, held, waiters, strict=strict)
    free = ledger.free.copy()
    forecast(shown, Consolidate(), np.random.default_rng(seed))
    assert (ledger.free == free).all()
