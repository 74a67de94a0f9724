"""First in, first out, against a trivially simple simulator: no heap, no table, no ledger."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tests.support.properties import amount

from cotenant.simulator import Trace, TraceJob, load, simulate
from cotenant.simulator.traces import workers


@dataclass(frozen=True)
class Job:
    id: str
    submitted: float
    seconds: float
    gpus: int


def finishes(jobs: list[Job], nodes: list[int], *, strict: bool) -> dict[str, float]:
    """Replay jobs; each goes to the fullest node with room for all of it. One large node is a pooled cluster."""
    coming, waiting = list(jobs), list[Job]()
    running: list[tuple[float, int, Job]] = []  # until when, on which node
    finished: dict[str, float] = {}
    while coming or running:
        now = min([job.submitted for job in coming[:1]] + [until for until, _, _ in running])
        finished |= {job.id: until for until, _, job in running if until <= now}
        running = [run for run in running if run[0] > now]
        waiting += [job for job in coming if job.submitted <= now]
        coming = [job for job in coming if job.submitted > now]
        for job in list(waiting):
            free = [gpus - sum(run[2].gpus for run in running if run[1] == node) for node, gpus in enumerate(nodes)]
            able = [(left, node) for node, left in enumerate(free) if left >= job.gpus]
            if able:
                running.append((now + job.seconds, min(able)[1], job))
                waiting.remove(job)
            elif strict:
                break
    assert not waiting
    return finished


def workload(seed: int) -> list[Job]:
    rng = random.Random(seed)
    fractions = rng.random() < 0.3
    now, jobs = 0.0, []
    for number in range(rng.randint(1, 40)):
        now += rng.choice([0, 0, 1, 5, 30]) if not fractions else rng.random() * 9
        seconds = rng.randint(1, 60) if not fractions else rng.random() * 60 + 0.001
        jobs.append(Job(f"j{number}", now, seconds, rng.choice([1, 1, 1, 2, 3, 4])))
    return jobs


def trace_of(jobs: list[Job]) -> Trace:
    return Trace(
        "made up", "none", tuple(TraceJob(job.id, job.submitted, job.seconds, workers(job.gpus)) for job in jobs)
    )


def simulated(trace: Trace, cluster: str, placement: str, mode: str) -> dict[str, float]:
    result = simulate(trace, cluster, queue="fifo", placement=placement, options={"queue": {"mode": mode}})
    return {one.id: one.finished_seconds for one in result.outcomes if one.finished_seconds is not None}


@pytest.mark.parametrize("mode", ["strict", "backfill"])
@pytest.mark.parametrize("placement", ["count", "consolidate"])
@pytest.mark.parametrize("block", range(amount(2, deep=5)))
def test_fifo_finishes_every_job_when_the_naive_simulator_does(block: int, placement: str, mode: str) -> None:
    for seed in range(40 * block, 40 * block + amount(15, deep=40)):
        jobs = workload(seed)
        first = jobs[0].submitted
        jobs = [Job(job.id, job.submitted - first, job.seconds, job.gpus) for job in jobs]
        nodes = [8] if placement == "count" else [4, 4]
        wanted = finishes(jobs, nodes, strict=mode == "strict")
        found = simulated(trace_of(jobs), "2x4", placement, mode)
        assert found == pytest.approx(wanted, abs=1e-9), f"seed {seed}"


@pytest.mark.parametrize("mode", ["strict", "backfill"])
def test_the_bundled_sample_gives_the_figures_of_the_naive_simulator(mode: str) -> None:
    trace = load("sample")
    jobs = [Job(job.id, job.submitted_seconds, job.work_seconds, job.roles[0].replicas) for job in trace.jobs]
    assert len(jobs) == 260
    found = simulated(trace, "2x8", "count", mode)
    assert found == pytest.approx(finishes(jobs, [16], strict=mode == "strict"), abs=1e-6)
