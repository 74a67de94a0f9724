"""A contention policy in the simulated world: the effect on throttled jobs."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.core.model.job import JobKind, Request, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import Directive, NodeWindow, Throttle
from cotenant.simulator.clusters.cluster import Cluster
from cotenant.simulator.physics.throttling import Noise, effect_of
from cotenant.simulator.results import Outcome, Result
from cotenant.simulator.run import simulate
from cotenant.simulator.traces import Trace, TraceJob
from cotenant.simulator.traces.trace_job import workers

NODE = Cluster("one", (NodeShape(1, 16),), ("",), (100e9,))
OPTIONS = {"speed": "bandwidth", "bandwidth_sensitivity": "0.5"}
DEMAND = 200e9


def dnn(id: str = "dnn", at: float = 0.0, work: float = 1000.0) -> TraceJob:
    return TraceJob(id, at, work, workers(1))


def cpu(at: float, work: float, *, id: str = "cpu", tasks: int = 1, demand: float = DEMAND) -> TraceJob:
    roles = (Role("worker", tasks, Request(cores=8 // tasks)),)
    return TraceJob(id, at, work, roles, kind=JobKind.CPU, memory_bandwidth_bytes_per_second=demand)


def replay(
    *jobs: TraceJob, policy: object = "coda-eliminator", cluster: Cluster | str = NODE, **options: str
) -> Result:
    trace = Trace("t", "none", tuple(jobs))
    return simulate(trace, cluster, contention=policy, options={"simulator": OPTIONS | options})  # type: ignore[arg-type]  # a stand-in


def one(result: Result, id: str) -> Outcome:
    return next(outcome for outcome in result.outcomes if outcome.id == id)


class Says:
    """Returns one directive about the CPU job at 10 s, and keeps its windows."""

    name, api_version = "says", 1

    def __init__(self, throttle: Throttle, *, move: bool = False) -> None:
        self.throttle, self.move = throttle, move
        self.seen: list[NodeWindow] = []

    def judge(self, window: NodeWindow) -> list[Directive]:
        self.seen.append(window)
        there = [one for one in window.attempts if one.cpu_job]
        if window.now != 10.0 or not there:
            return []
        return [Directive(there[0].job_id, there[0].number, 0.5, "told to", self.throttle, move=self.move)]


@pytest.mark.parametrize(
    ("throttle", "part"),
    [
        (Throttle(bandwidth_percent=50), 0.25),  # of 100 GB/s, where it wants 200
        (Throttle(cores=2), 0.25),
        (Throttle(bandwidth_percent=20, cores=4), 0.1),
        (Throttle(idle=True), 1.0),
        (Throttle(bandwidth_percent=100), 1.0),
    ],
)
def test_a_throttle_leaves_a_cpu_job_what_is_scarcest(throttle: Throttle, part: float) -> None:
    policy = Says(throttle)
    result = replay(dnn(), cpu(0, 100), policy=policy, sample_noise="0")
    speed = part * min(1.0, 1 / (2 * part))
    assert one(result, "cpu").finished_seconds == pytest.approx(10 + (100 - 5) / speed)
    after = next(window for window in policy.seen if window.now == 15)
    assert after.memory_bandwidth_bytes_per_second == pytest.approx(min(100e9, part * DEMAND))
    seen = next(attempt for attempt in after.attempts if attempt.cpu_job)
    assert seen.throttle == throttle
    assert seen.memory_bandwidth_bytes_per_second == pytest.approx(min(100e9, part * DEMAND))
    assert seen.cores_used == (throttle.cores or 8)


def test_a_suspended_job_does_nothing_and_uses_nothing() -> None:
    policy = Says(Throttle(suspended=True))
    result = replay(dnn(), cpu(0, 100), policy=policy, sample_noise="0")
    assert one(result, "dnn").finished_seconds == pytest.approx(10 + 1000 - 10 / 1.5)
    assert [id for id, _ in result.unschedulable] == ["cpu"]


def test_cores_are_those_of_each_task() -> None:
    assert effect_of(Directive("cpu", 1, 1, "", Throttle(cores=1)), 8, 4, 0.0, 1.0).part == 0.5
    policy = Says(Throttle(cores=1))
    replay(dnn(), cpu(0, 100, tasks=4), policy=policy)
    attempt = next(one for one in policy.seen[4].attempts if one.cpu_job)
    assert (attempt.tasks, attempt.cores, attempt.cores_used) == (4, 8, 4.0)


def test_a_job_asked_to_move_waits_for_another_place() -> None:
    two = Cluster("two", (NodeShape(1, 16), NodeShape(1, 16)), ("", ""), (100e9, 100e9))
    result = replay(dnn(), cpu(0, 100), policy=Says(Throttle(suspended=True), move=True), cluster=two)
    assert (result.migrations, result.preemptions) == (1, 0)
    assert one(result, "cpu").finished_seconds == pytest.approx(10 + 95 / min(1.0, 100e9 / DEMAND))


def test_the_eliminator_gives_a_training_job_most_of_its_speed_and_a_cpu_job_some_of_it() -> None:
    jobs = dnn(work=3600), cpu(300, 1800)
    hurt, well = replay(*jobs, policy="none"), replay(*jobs)
    alone = 3600.0
    lost = (one(hurt, "dnn").finished_seconds or 0) - alone
    left = (one(well, "dnn").finished_seconds or 0) - alone
    assert lost > 1000
    assert left < 0.1 * lost
    assert (one(well, "cpu").finished_seconds or 0) < 300 + 10 * 2 * 1800
    assert not [id for id, _ in well.unschedulable]


def test_no_queries_without_throttleable_jobs_or_changes() -> None:
    policy = Says(Throttle())
    assert replay(dnn(), policy=policy).finished == 1
    assert policy.seen == []
    replay(dnn(), cpu(0, 1000, demand=1e9), policy=policy)
    assert [window.now for window in policy.seen] == [5.0 * number for number in range(1, 25)]
    disturbed = Says(Throttle())
    replay(dnn(), cpu(0, 200), policy=disturbed)
    assert len(disturbed.seen) > 60, "for as long as anybody is disturbed, and two minutes more"


def test_noise_in_windows_comes_from_the_seed_and_changes_nothing_else() -> None:
    policies = [Says(Throttle()) for _ in range(3)]
    ends = []
    for policy, seed in zip(policies, (1, 1, 2), strict=True):
        trace = Trace("t", "none", (dnn(), cpu(0, 100)))
        ends.append(simulate(trace, NODE, contention=policy, options={"simulator": OPTIONS}, seed=seed).avg_jct_seconds)
    assert len(set(ends)) == 1
    assert policies[0].seen == policies[1].seen != policies[2].seen


@given(st.integers(0, 2**32), st.integers(0, 10**6), st.integers(1, 50))
def test_noise_is_normal(seed: int, sequence: int, run: int) -> None:
    noise = Noise(seed, 0.05)
    factors = [noise.factor(sequence, run, 5.0 * number) for number in range(400)]
    assert statistics.fmean(factors) == pytest.approx(1, abs=0.02)
    assert statistics.stdev(factors) == pytest.approx(0.05, abs=0.015)
    assert Noise(seed, 0).factor(sequence, run, 0) == 1
