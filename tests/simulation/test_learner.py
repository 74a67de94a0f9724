from __future__ import annotations

from cotenant.core.jobs import Request, Role
from cotenant.policies.lightgbm_duration import LightgbmDuration
from cotenant.simulator.arms import Learner
from cotenant.simulator.traces import TraceJob

WORKER = (Role("worker", 1, Request(gpu_milli=1000, cores=4)),)


def job(number: int) -> TraceJob:
    model, seconds = ("bert", 600.0) if number % 3 else ("gnmt", 9000.0)
    return TraceJob(f"j{number}", 100.0 * number, seconds + number % 7, WORKER, model=model, user="ann")


def lived(jobs: int) -> tuple[LightgbmDuration, list[str], list[float | None]]:
    policy = LightgbmDuration(LightgbmDuration.Options(train_min=60, train_every=60))
    arm, sources, told = Learner(policy, jobs), list[str](), list[float | None]()
    for number in range(jobs):
        estimate = arm.submitted(number, job(number))
        sources.append(estimate.source)
        told.append(estimate.remaining_seconds)
        arm.finished(job(number), job(number).work_seconds, 100.0 * number + 50.0)
    return policy, sources, told


def test_a_simulation_learns_from_the_jobs_that_ended_before_and_at_once() -> None:
    policy, sources, told = lived(150)
    assert policy.model is not None
    assert not [source for source in sources[:60] if "model" in source]
    assert [source for source in sources[60:120] if "model 1" in source]
    assert [source for source in sources[120:] if "model 2" in source]
    assert told[148] is not None
    assert 500 <= told[148] <= 700


def test_a_simulation_that_learns_is_the_same_twice() -> None:
    assert lived(150)[1:] == lived(150)[1:]
