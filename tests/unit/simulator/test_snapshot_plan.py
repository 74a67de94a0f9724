"""Plans of snapshots: order, places, reasons and starts; the same cycle as the simulator's; limits and bad choices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.simulator.test_snapshots import running, saved, snapshot, waiting

from cotenant.core.policy.options import BadOption
from cotenant.core.policy.profiles import PROFILES, UnknownProfile
from cotenant.plugins import UnknownPolicy
from cotenant.simulator.recording.events import Event, Kind
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.snapshot_plan import NOW, Choices, PlanLimits, SnapshotPlan, plan_snapshot
from cotenant.simulator.snapshots import BadSnapshot, Held, InUse, Job, Known, Node, Part, Snapshot

BUSY = snapshot(
    running("r", 900, 950, 100),
    waiting("w1", 960, 30),
    waiting("w2", 970, 50),
    waiting("w3", 990, 3),
    policies={"queue": InUse("fifo", {"mode": "backfill"})},
)


def by_id(plan: SnapshotPlan) -> dict[str, tuple[int | None, bool, str]]:
    return {job.id: (job.order, job.starts, job.code) for job in plan.jobs}


def test_each_waiting_job_gets_its_place_in_the_order_and_a_place_or_a_reason() -> None:
    plan = plan_snapshot(BUSY)
    assert by_id(plan) == {"w1": (1, True, ""), "w2": (2, False, "CAPACITY"), "w3": (3, False, "CAPACITY")}
    [place] = plan.jobs[0].places
    assert (place.node, place.role, place.replicas, place.gpu_milli, place.cores) == ("a", "worker", 2, 2000, 2)
    assert plan.jobs[1].detail == "needs 2 GPUs, 0 of 4 free"
    assert plan.policies == {"queue": "fifo", "placement": "consolidate", "allocator": "requested"}


def test_a_waiting_job_starts_when_the_forecast_says() -> None:
    """`r` ends after 50 s and `w1` after 30 s; w2 follows the first, w3 the second."""
    plan = plan_snapshot(BUSY)
    assert [job.start.seconds if job.start else None for job in plan.jobs] == [0.0, 30.0, 50.0]
    assert plan.jobs[0].start == NOW
    assert plan.jobs[1].start
    assert plan.jobs[1].start.after == ("w1",)


def test_the_interval_of_a_start_comes_from_the_range_of_the_predictions() -> None:
    certain = running("r", 900, 950, 100)
    vague = replace(certain, known=Known(100, 0.9, 60.0, 1000.0))
    job = replace(waiting("w", 960, 30), roles=(Part(gpu_milli=4000, cores=1),))
    for first, spread in ((certain, False), (vague, True)):
        [planned] = plan_snapshot(snapshot(first, job)).jobs
        assert planned.start
        assert (planned.start.p10_seconds < planned.start.p90_seconds) is spread
        assert planned.start.p10_seconds <= 50 <= planned.start.p90_seconds


def test_a_start_that_depends_on_jobs_of_unknown_length_says_so() -> None:
    unknown = replace(running("r", 900, 950, 100), known=None)
    job = replace(waiting("w", 960, 30), roles=(Part(gpu_milli=4000, cores=1),))
    [planned] = plan_snapshot(snapshot(unknown, job)).jobs
    assert planned.start
    assert planned.start.of_unknown


def test_a_job_that_can_never_run_has_no_place_in_the_order() -> None:
    plan = plan_snapshot(snapshot(waiting("w", 960, 30), Job("big", 950, (Part(gpu_milli=9000),))))
    assert by_id(plan) == {"w": (1, True, ""), "big": (None, False, "NEVER_FITS")}
    assert plan.jobs[1].start is None


def test_jobs_that_stop_for_others_are_named_with_these() -> None:
    low = Job(
        "low", 900, (Part(gpu_milli=4000, cores=1),), running_since_seconds=950, held=(Held("a", gpus=4, cores=1),)
    )
    high = replace(waiting("high", 960, 30), priority=5)
    plan = plan_snapshot(snapshot(low, high, rules={"preemption": "priority"}))
    assert [(stop.id, stop.kind, stop.starts) for stop in plan.stops] == [("low", "preempted", ("high",))]
    assert by_id(plan) == {"high": (1, True, "")}


def test_shared_gpus_are_given_by_number() -> None:
    half = Part(gpu_milli=500, cores=1)
    held = (Held("a", shares=((1, 500),), cores=1),)
    there = Job("r", 900, (half,), running_since_seconds=950, held=held, cores=(1,))
    taken = snapshot(there, Job("w", 960, (half,)), nodes=(Node("a", 2, 8, shareable=True),))
    [place] = plan_snapshot(taken).jobs[0].places
    assert sum(milli for _, milli in place.shares) == 500


def test_a_snapshot_without_jobs_has_an_empty_plan() -> None:
    assert plan_snapshot(snapshot()).jobs == ()


def test_no_forecast_is_made_when_the_time_is_spent() -> None:
    plan = plan_snapshot(BUSY, spent=lambda: True)
    assert [job.start for job in plan.jobs] == [NOW, None, None]
    assert plan.draws == 0


@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_plans(profile: str) -> None:
    plan = plan_snapshot(BUSY, Choices(profile))
    assert sorted(by_id(plan)) == ["w1", "w2", "w3"]
    assert all(job.starts or (job.code and job.detail) for job in plan.jobs)
    assert plan.policies["queue"] == PROFILES[profile].queue


def test_choices_replace_the_snapshots_policies() -> None:
    known = [replace(job, known=Known(job.expected_seconds or 100.0, 1.0)) for job in BUSY.jobs]
    plan = plan_snapshot(replace(BUSY, jobs=tuple(known)), Choices(policies={"queue": "srsf"}))
    assert [job.id for job in plan.jobs] == ["w3", "w1", "w2"]


def test_invalid_choices_are_rejected_with_what_there_is() -> None:
    with pytest.raises(UnknownProfile, match="did you mean full"):
        plan_snapshot(BUSY, Choices("fulll"))
    with pytest.raises(UnknownPolicy, match="did you mean srsf"):
        plan_snapshot(BUSY, Choices(policies={"queue": "srsff"}))
    with pytest.raises(BadOption, match="queu: no group of queue, placement, allocator; did you mean queue"):
        plan_snapshot(BUSY, Choices(policies={"queu": "srsf"}))
    with pytest.raises(BadOption, match=r"queue\.moed"):
        plan_snapshot(BUSY, Choices(options={"queue": {"moed": "strict"}}))


def test_a_snapshot_above_the_limits_is_rejected_with_all_of_them() -> None:
    with pytest.raises(BadSnapshot, match=r"snapshot is too large:\s+nodes: 1, more than 0\s+jobs: 4, more than 3"):
        PlanLimits(nodes_max=0, jobs_max=3).check(BUSY)
    PlanLimits(nodes_max=1, jobs_max=4).check(BUSY)


class First:
    """The starts at the time of the snapshot."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.starts: dict[str, list[str]] = {}

    def record(self, event: Event) -> None:
        """Keep starts of the first cycle."""
        if event.kind is Kind.PLANNED and self.at is None:
            self.at = event.at_seconds
        if event.kind is Kind.STARTED and event.at_seconds == self.at:
            self.starts[event.job_id] = [f"{place.node} {place.gpu_milli} {place.cores}" for place in event.nodes]


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw waiting jobs beside two running ones on three nodes."""
    nodes = tuple(Node(name, 4, 16) for name in "abc")
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 500), st.integers(0, 2)), min_size=1, max_size=9))
    jobs = tuple(
        Job(f"w{n}", 960 + n, (Part(gpu_milli=1000, cores=1, replicas=gpus),), priority=priority, expected_seconds=wait)
        for n, (gpus, wait, priority) in enumerate(sizes)
    )
    busy = running("r", 900, 950, 100), running("s", 900, 950, 300, node="b")
    return snapshot(*busy, *jobs, nodes=nodes)


@given(snapshots(), st.sampled_from([*PROFILES]))
def test_a_plan_starts_what_a_simulation_from_the_snapshot_starts_first(
    tmp_path_factory: pytest.TempPathFactory, taken: Snapshot, profile: str
) -> None:
    path: Path = saved(tmp_path_factory.mktemp("taken"), taken)
    first = First()
    Scenario.of_snapshot(path).deciding_by(PROFILES[profile]).run(recorder=first)
    plan = plan_snapshot(taken, Choices(profile))
    numbers = {node.id: number for number, node in enumerate(taken.nodes)}
    planned = {
        job.id: [f"{numbers[place.node]} {place.gpu_milli} {place.cores}" for place in job.places]
        for job in plan.jobs
        if job.starts
    }
    stopped = {stop.id for stop in plan.stops}
    assert planned == {one: places for one, places in first.starts.items() if one not in stopped}
    assert sorted(job.order or 0 for job in plan.jobs) == list(range(1, len(plan.jobs) + 1))
    assert plan == plan_snapshot(taken, Choices(profile))
