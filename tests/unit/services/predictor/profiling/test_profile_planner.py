"""Selection of jobs to profile: new and stale classes, one job at a time, with backoff."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.services.predictor.conftest import spec, window

from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.services.predictor.codec import job_class_of, observation_of
from cotenant.services.predictor.profiling.profile_planner import ProfilePlanner, ProfileRules
from cotenant.services.predictor.profiling.profile_store import ProfileStore
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb

RULES = ProfileRules(seconds=300.0, share=0.1, back_off_seconds=600.0, back_off_seconds_max=2000.0)


def auto(model: str = "bert", **fields: Any) -> job_pb2.JobSpec:
    request = resources_pb2.ResourceRequest(gpu_milli=1000)
    return spec(model, **({"roles": [job_pb2.Role(name="worker", replicas=1, resources=request)]} | fields))


class Watched:
    """A profile planner with its store and a clock."""

    def __init__(self, rules: ProfileRules = RULES) -> None:
        self.profile_store = ProfileStore()
        self.profile_planner = ProfilePlanner(self.profile_store, rules)
        self.now = 0.0

    def sees(self, message: observation_pb2.Observation) -> bool:
        observation = observation_of(message)
        kind = job_class_of(message.spec)
        if self.profile_store.record(kind, observation, profiled=message.profiled).void:
            self.profile_planner.invalidate(kind, observation.allocation.gpu_type)
        return self.profile_planner.should_profile(message, observation, self.now)

    def window(self, job_id: str = "j1", *, cores: int = 16, rate: float = 50.0, **fields: Any) -> bool:
        return self.sees(window(job_id, cores=cores, rate=rate, **({"spec": auto()} | fields)))

    def done(self, job_id: str = "j1", **fields: Any) -> bool:
        return self.window(job_id, rate=0.0, window=None, profiled=True, profile_done=True, **fields)

    def profile(self, job_id: str, rate: Callable[[int], float]) -> list[int]:
        """Measure as planned until nothing more is requested; return the core counts."""
        counts: list[int] = []
        more = True
        while more:
            for cores in self.plan():
                counts.append(cores)
                assert not self.window(job_id, cores=cores, rate=rate(cores), profiled=True)
                assert not self.window("another of its kind", rate=rate(16)), "one at a time"
            more = self.done(job_id)
        return counts

    def plan(self) -> Sequence[int]:
        return self.profile_planner.plan(auto(), "", 16, self.now).cores[:2]


def saturating(cores: int) -> float:
    return min(50.0, 12.5 * cores)


def test_a_new_class_is_profiled_on_one_job_until_enough_is_known() -> None:
    watched = Watched()
    assert watched.window("j1")
    assert not watched.window("j1"), "it has been asked for"
    assert not watched.window("j2"), "one of a kind is enough"
    assert watched.window("k1", spec=auto("resnet")), "another kind is another matter"
    counts = watched.profile("j1", saturating)
    assert 2 <= len(set(counts)) <= 4
    assert 16 not in counts, "what it holds is known from its windows"
    assert not any(watched.window(job_id) for job_id in ("j1", "j2") * 10)


def test_a_stale_class_is_profiled_again() -> None:
    watched = Watched()
    watched.window("j1")
    watched.profile("j1", saturating)
    kind = job_class_of(auto())
    assert [watched.window("j2", rate=30.0) for _ in range(3)] == [False, False, True]
    assert "0.60 of the measured rate" in watched.profile_store.stale(kind, "")
    watched.profile("j2", lambda cores: 0.6 * saturating(cores))
    assert watched.profile_store.stale(kind, "") == ""
    assert {point.cores: point.rate for point in watched.profile_store.at(kind, "")}[16] == 30.0


@pytest.mark.parametrize(
    "fields",
    [
        {"spec": spec()},
        {"spec": auto(profiled=False)},
        {"spec": auto(kind=job_pb2.JOB_KIND_INFERENCE)},
        {"spec": auto(kind=job_pb2.JOB_KIND_CPU)},
        {"spec": auto(roles=[*auto().roles, job_pb2.Role(name="ps", replicas=1)])},
        {"cores": 1},
        {"allocation": pb.CandidateAllocation(cores=16, gpu_milli=1000, nodes=2)},
        {"phase": "validation"},
        {"rate": 0.0, "loss": 0.5, "step": 3},
        {"spec": auto(expected_duration=Duration(seconds=3))},
        {"spec": auto(steps_total=150)},
    ],
    ids=str,
)
def test_some_jobs_are_never_profiled(fields: dict[str, Any]) -> None:
    watched = Watched()
    watched.window("j0", spec=auto(profiled=False))
    given: dict[str, Any] = {"spec": auto(), "cores": 16, "rate": 50.0}
    message = window("j1", **(given | fields))
    assert not watched.sees(message)


def test_no_profile_is_requested_with_a_zero_budget() -> None:
    assert not Watched(ProfileRules(seconds=0.0)).window()


def test_fruitless_profiles_back_off_exponentially() -> None:
    watched = Watched()
    pauses = []
    for _ in range(4):
        assert watched.window("j1")
        assert not watched.done("j1")
        before = watched.now
        while not watched.window("j2"):
            watched.now += 100.0
        pauses.append(watched.now - before)
        assert not watched.done("j2")
        watched.now += 10_000.0
    assert pauses == [600.0, 2000.0, 2000.0, 2000.0]


def test_an_expired_profile_request_goes_to_another_job() -> None:
    watched = Watched()
    assert watched.window("j1")
    watched.profile_planner.plan(auto(), "", 16, watched.now)
    watched.now = 359.0  # the budget, and a minute
    assert not watched.window("j2")
    watched.now = 360.0
    assert not watched.window("j2"), "nothing came of it, so it waits"
    watched.now = 960.0
    assert watched.window("j2")


def test_another_job_continues_the_profile_of_an_ended_job() -> None:
    watched = Watched()
    assert watched.window("j1")
    watched.window("j1", cores=1, rate=12.5, profiled=True)
    watched.sees(window("j1", cores=16, rate=0.0, spec=auto(), window=None, run_time=Duration(seconds=60)))
    assert watched.window("j2")
    assert 1 not in watched.profile("j2", saturating)


def test_the_budget_is_a_share_of_the_run_time_and_is_spent_over_all_plans_of_a_profile() -> None:
    watched = Watched()
    short = auto(steps_total=50_000)  # 1,000 s at 50 per second
    plan = watched.profile_planner.plan
    assert plan(auto(), "", 16, 0.0).budget_seconds == 300.0
    watched.window("j1", spec=short)
    order = plan(short, "", 16, 0.0)
    assert (order.budget_seconds, order.steps) == (100.0, 50)
    watched.window("j1", spec=short, cores=1, rate=12.5, window=Duration(seconds=40), profiled=True)
    assert plan(short, "", 16, 0.0).budget_seconds == 60.0
    watched.window("j1", spec=short, cores=2, rate=25.0, window=Duration(seconds=60), profiled=True)
    assert not watched.done("j1", spec=short), "it has cost enough"
    assert not watched.window("j2", spec=short)
    watched.now += 600.0
    assert watched.window("j2", spec=short)


def test_fewer_slow_steps_are_measured() -> None:
    watched = Watched()
    watched.window("j1", rate=2.0)
    order = watched.profile_planner.plan(auto(), "", 16, 0.0)
    assert 10 <= order.steps < 50
    assert watched.profile_planner.plan(auto("unknown"), "", 16, 0.0).steps == 50


def test_each_gpu_type_is_profiled() -> None:
    watched = Watched()
    held = {name: pb.CandidateAllocation(cores=16, gpu_milli=1000, gpu_type=name) for name in ("A100", "T4")}
    assert watched.window("j1", allocation=held["A100"])
    assert watched.window("j2", allocation=held["T4"])
