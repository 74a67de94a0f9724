"""Elastic training jobs in simulations: their speed, restarts, limits, and the events of their generations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from cotenant.core.model.job import ReplicaRange
from cotenant.core.policy.options import BadOption
from cotenant.simulator import Result, Trace, TraceJob, simulate
from cotenant.simulator.clusters.cluster_argument import parse_cluster
from cotenant.simulator.overlays import parse_overlays
from cotenant.simulator.physics.scaling import speed
from cotenant.simulator.recording.events import Event, Kind
from cotenant.simulator.traces import workers
from cotenant.simulator.traces.trace_job import Ended

SAMPLE = "src/cotenant/simulator/samples/itp_cluster10.csv"


def elastic(name: str, at: float, seconds: float, gpus: int = 4, least: int = 1, most: int = 16) -> TraceJob:
    [role] = workers(gpus)
    return TraceJob(name, at, seconds, (replace(role, elastic=ReplicaRange(least, most)),))


@dataclass(frozen=True, slots=True)
class Events:
    """A recorder that keeps all events."""

    kept: list[Event] = field(default_factory=list)

    def record(self, event: Event) -> None:
        self.kept.append(event)


def run(*jobs: TraceJob, cluster: str = "2x8", allocator: str = "marginal-gain", **fields: Any) -> Result:
    fields = {"queue": "srtf", "placement": "count", "predictor": "oracle"} | fields
    return simulate(Trace("made up", "none", jobs), cluster, allocator=allocator, **fields)


def finishes(result: Result) -> dict[str, float | None]:
    return {one.id: one.finished_seconds for one in result.outcomes}


def test_a_job_alone_has_all_gpus_and_is_as_much_faster() -> None:
    result = run(elastic("a", 0, 1000))
    assert finishes(result) == {"a": pytest.approx(1000 * speed(4) / speed(16))}
    [outcome] = result.outcomes
    assert outcome.gpu_milli == 4000
    assert outcome.gpu_seconds == pytest.approx(16 * (outcome.finished_seconds or 0))
    assert result.elasticity == {"resizes": 0, "lost_gpu_seconds": 0.0}


def test_a_job_of_unknown_length_grows_into_what_another_leaves() -> None:
    result = run(elastic("a", 0, 40_000), elastic("b", 0, 1000), queue="fifo", predictor="none")
    assert result.elasticity is not None
    assert result.elasticity["resizes"] >= 1
    assert (finishes(result)["a"] or 0) < 40_000 * speed(4) / speed(12)


def test_without_elastic_jobs_nothing_is_resized_and_no_resizes_are_told() -> None:
    result = run(TraceJob("a", 0, 1000, tuple(workers(4))))
    assert (finishes(result), result.elasticity) == ({"a": 1000.0}, None)


def test_an_allocator_that_resizes_nothing_keeps_the_requested_number() -> None:
    result = run(elastic("a", 0, 1000), allocator="requested")
    assert finishes(result) == {"a": 1000.0}
    assert result.elasticity is None
    assert "elasticity" not in result.as_json()


def test_a_job_grows_after_its_restart_once_another_is_done() -> None:
    rigid = TraceJob("rigid", 0, 500, workers(8))
    result = run(rigid, elastic("a", 0, 2000, gpus=8))
    left = 2000 - 500
    assert finishes(result) == {"rigid": 500.0, "a": pytest.approx(500 + 30 + left * speed(8) / speed(16))}
    assert result.elasticity == {"resizes": 1, "lost_gpu_seconds": 30.0 * 16}
    cheap = run(rigid, elastic("a", 0, 2000, gpus=8), options={"simulator": {"resize_cost_seconds": "0"}})
    assert finishes(cheap)["a"] == pytest.approx(500 + left * speed(8) / speed(16))


def test_a_job_does_not_grow_if_its_restart_takes_longer_than_it_saves() -> None:
    result = run(TraceJob("rigid", 0, 500, workers(8)), elastic("a", 0, 540, gpus=8))
    assert finishes(result) == {"rigid": 500.0, "a": 540.0}
    assert result.elasticity == {"resizes": 0, "lost_gpu_seconds": 0.0}


@pytest.mark.parametrize("queue", ["fifo", "sjf", "las", "srtf"])
def test_a_rigid_job_starts_at_once_if_elastic_jobs_can_shrink_for_it(queue: str) -> None:
    rigid = TraceJob("rigid", 100, 50, workers(12), preemptible=False)
    result = run(elastic("a", 0, 10_000), elastic("b", 1, 10_000), rigid, queue=queue)
    assert finishes(result)["rigid"] == 150.0
    assert not result.preemptions


def test_a_job_keeps_its_number_for_a_while_after_it_has_changed() -> None:
    jobs = elastic("long", 0, 100_000, gpus=16), elastic("short", 10, 200), elastic("next", 20, 200)
    events = Events()
    run(*jobs, queue="fifo", recorder=events)
    at = [event.at_seconds for event in events.kept if event.kind is Kind.RESCALED and event.job_id == "long"]
    assert len(at) > 1
    assert all(later - before >= 240 for before, later in pairwise(at))


def test_no_gpu_belongs_to_two_generations_and_each_begins_as_the_last_one_ends() -> None:
    events = Events()
    result = simulate(
        SAMPLE,
        "2x8",
        queue="srtf",
        placement="consolidate",
        allocator="marginal-gain",
        overlay="sizes=4,seed=3",
        recorder=events,
        until_seconds=2e6,
    )
    held: dict[int, int] = defaultdict(int)
    places: dict[str, Event] = {}
    resizing: dict[str, float] = {}
    resizes = 0
    for event in events.kept:
        if event.kind is Kind.STARTED:
            assert resizing.pop(event.job_id, event.at_seconds) == event.at_seconds
            places[event.job_id] = event
            for place in event.nodes:
                held[place.node] += place.gpu_milli
                assert held[place.node] <= 8000
        elif event.job_id in places and event.kind in (Kind.PREEMPTED, Kind.FINISHED, Kind.RESCALED):
            for place in places.pop(event.job_id).nodes:
                held[place.node] -= place.gpu_milli
            if event.kind is Kind.RESCALED:
                resizes += 1
                resizing[event.job_id] = event.at_seconds
    assert result.elasticity
    assert result.elasticity["resizes"] == resizes > 5
    assert not resizing


def test_the_same_simulation_has_the_same_result() -> None:
    def figures() -> list[tuple[str, float | None]]:
        again = simulate(SAMPLE, "2x8", allocator="marginal-gain", overlay="sizes=4", until_seconds=5e5)
        return [(one.id, one.finished_seconds) for one in again.outcomes]

    assert figures() == figures()


def test_killed_jobs_and_restarts_of_preempted_jobs_add_up() -> None:
    jobs = elastic("a", 0, 5000), replace(elastic("b", 100, 300), ended=Ended.KILLED), elastic("c", 200, 50)
    result = run(*jobs, cluster="1x4", options={"simulator": {"preemption_cost_seconds": "10"}})
    assert result.finished == 3
    assert result.gpu_occupancy is not None
    assert result.gpu_occupancy <= 1.0


def test_sizes_of_one_change_no_request_and_others_keep_the_work() -> None:
    plain = simulate(SAMPLE, "2x8", until_seconds=5e5)
    same = simulate(SAMPLE, "2x8", until_seconds=5e5, overlay="sizes=1")
    assert [one._replace(elastic_milli_seconds=None) for one in same.outcomes] == list(plain.outcomes)
    rigid = TraceJob("a", 0, 100, workers(4))
    trace = Trace("made up", "none", tuple(replace(rigid, id=f"j{number}") for number in range(200)))
    jobs = parse_overlays(["sizes=4"]).apply(trace, parse_cluster("2x8")).jobs
    counts = {job.roles[0].replicas for job in jobs}
    assert min(counts) == 1
    assert 14 <= max(counts) <= 16
    for job in jobs:
        assert job.roles[0].elastic == ReplicaRange(1, 16)
        assert job.work_seconds * speed(job.roles[0].replicas) == pytest.approx(100 * speed(4))


@pytest.mark.parametrize("value", ["0", "0.5", "-4", "nan", "many", "1e9"])
def test_factors_out_of_range_are_rejected(value: str) -> None:
    with pytest.raises(BadOption):
        parse_overlays([f"sizes={value}"])
