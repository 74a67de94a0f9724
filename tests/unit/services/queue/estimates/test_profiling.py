"""From the predictor's request to placement's order, and back with the measured rates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from tests.unit.services.mesh import until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.codec.job_events import kind_of
from cotenant.codec.specs import duration, timestamp
from cotenant.core.model.job import JobSpec, Request, Role
from cotenant.core.model.lifecycle import Phase
from cotenant.internal.v1 import observation_service_pb2 as observation
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.queue.estimates.estimate_refresh import EstimateRefresh
from cotenant.services.queue.estimates.observation_sink import ObservationSink
from cotenant.services.queue.estimates.profiling import Profiling
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import Record
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb

SPEC = JobSpec(roles=(Role(request=Request(gpu_milli=1000)),), command=("true",), model="bert", steps_total=1000)


def away() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "away")


class Others:
    """A predictor and a placement that record their calls."""

    def __init__(self) -> None:
        self.plans: list[list[int]] = [[1, 4, 2]]  # one per call
        self.wanted: list[list[str]] = []  # likewise, answers to observations
        self.asked: list[pb.PlanProfileRequest] = []
        self.observed: list[observation.Observation] = []
        self.queries: list[pb.EstimateQuery] = []
        self.advice: list[placement_pb2.Advice] = []
        self.refused: list[str] = []
        self.away = 0  # for this many calls of AdviseAttempts

    async def PlanProfile(self, request: pb.PlanProfileRequest, **call: float) -> pb.PlanProfileResponse:
        self.asked.append(request)
        cores = self.plans.pop(0) if self.plans else []
        return pb.PlanProfileResponse(cores=cores, steps=50, budget=duration(300.0))

    async def Observe(self, request: observation.ObserveRequest, **call: float) -> observation.ObserveResponse:
        self.observed += request.observations
        return observation.ObserveResponse(profile_wanted=self.wanted.pop(0) if self.wanted else [])

    async def Estimate(self, request: pb.EstimateRequest, **call: float) -> pb.EstimateResponse:
        self.queries += request.queries
        told = [
            pb.Estimate(job_id=one.job_id, predictable=True, confidence=0.9, cores_useful=4, remaining=duration(50.0))
            for one in request.queries
        ]
        return pb.EstimateResponse(estimates=told)

    async def AdviseAttempts(
        self, request: placement_pb2.AdviseAttemptsRequest, **call: float
    ) -> placement_pb2.AdviseAttemptsResponse:
        if self.away:
            self.away -= 1
            raise away()
        self.advice += request.advice
        return placement_pb2.AdviseAttemptsResponse(refused=self.refused)


class Desk:
    """The queue's part, with jobs that run on 16 cores."""

    def __init__(self) -> None:
        self.others = cast(Any, Others())
        self.state = State()
        self.observations = ObservationSink(self.others, self.state.events)
        self.estimate_refresh = EstimateRefresh(self.state, self.others, self.others)
        self.profiles = Profiling(self.state, self.others, self.others, self.observations, self.estimate_refresh)

    def run(self, job_id: str, spec: JobSpec = SPEC) -> Record:
        job = job_pb2.Job(id=job_id, spec=specs.spec_to_wire(spec), create_time=timestamp(100.0))
        job.phase = specs.PHASES.to_wire(Phase.RUNNING)
        share = resources_pb2.GpuShare(uuid=job_id, milli=1000)
        task = resources_pb2.TaskAllocation(role="worker", core_ids=range(16), gpus=[share])
        held = resources_pb2.NodeAllocation(node_id="n1", tasks=[task], gpu_type="A100")
        attempt = job_pb2.Attempt(job_id=job_id, number=1, epoch=5, allocations=[held], start_time=timestamp(100.0))
        job.attempt.CopyFrom(attempt)
        record = Record(records_pb2.StoredJob(job=job), spec)
        self.state.add(record)
        return record

    def told(self, job_id: str, cores: int = 0, rate: float = 0.0, **fields: Any) -> None:
        given: dict[str, Any] = {"number": 1, "time": timestamp(200.0 + cores), "window": duration(5.0)}
        self.profiles.take(
            agent_pb2.ProfileReport(job_id=job_id, cores=cores, rate_per_second=rate, **(given | fields))
        )


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    async with working() as desk:
        yield desk


@asynccontextmanager
async def working() -> AsyncIterator[Desk]:
    desk = Desk()
    works = [asyncio.create_task(work.run()) for work in (desk.profiles, desk.estimate_refresh)]
    try:
        yield desk
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


async def test_a_requested_profile_is_planned_for_the_jobs_allocation(desk: Desk) -> None:
    desk.run("j1")
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.advice)
    (asked,), (advice,) = desk.others.asked, desk.others.advice
    assert (asked.cores_max, asked.gpu_type, asked.spec.model) == (16, "A100", "bert")
    assert (advice.job_id, advice.number, list(advice.profile.cores), advice.profile.steps) == ("j1", 1, [1, 4], 50)
    assert advice.profile.budget.seconds == 300
    assert not advice.HasField("estimate")


async def test_measured_rates_are_observed_and_the_job_class_is_estimated_again(
    desk: Desk,
) -> None:
    record = desk.run("j1")
    desk.run("j2")
    desk.run("other", JobSpec(roles=SPEC.roles, command=("true",), model="resnet"))
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.advice)
    desk.told("j1", 1, 10.0)
    desk.told("j1", 4, 40.0)
    desk.told("j1", done=True)
    await until(lambda: len(desk.others.advice) == 3)
    seen = desk.others.observed
    assert [(one.allocation.cores, one.rate_per_second, one.profiled) for one in seen[:2]] == [
        (1, 10.0, True),
        (4, 40.0, True),
    ]
    assert (seen[2].profile_done, seen[2].allocation.cores, len(seen)) == (True, 16, 3)
    assert [query.gpu_type for query in desk.others.queries] == ["A100"] * 2
    told = [(one.job_id, one.estimate.cores_useful, one.HasField("profile")) for one in desk.others.advice[1:]]
    assert told == [("j1", 4, False), ("j2", 4, False)]
    assert record.estimate is not None
    ran = record.ran_before_estimate_seconds
    assert desk.state.table.jobs(0.0).predicted_seconds[0] == pytest.approx(ran + 50.0)
    assert ran > 1e9, "the rest is told of a job that has run since its start"
    assert [kind_of(event) for event in record.stored.events] == ["profiling", "profiled"]
    assert record.stored.events[-1].detail == "up to 4 cores per replica help"


async def test_a_profile_continues_while_the_predictor_wants_more(desk: Desk) -> None:
    desk.run("j1")
    desk.others.plans, desk.others.wanted = [[1, 4], [2]], [["j1"]]
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.advice)
    desk.told("j1", 1, 10.0, done=True)
    await until(lambda: len(desk.others.advice) == 2)
    assert list(desk.others.advice[1].profile.cores) == [2]
    assert desk.others.queries == []


async def test_rate_windows_are_held_during_a_profile(desk: Desk) -> None:
    record = desk.run("j1")
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.advice)

    def goes_on(begin: int) -> int:
        before = len(desk.observations._waiting)
        for second in range(begin, begin + 40):
            record.job.progress.CopyFrom(
                job_pb2.Progress(step=second, step_time=timestamp(second), update_time=timestamp(second))
            )
            desk.observations.progressed(record)
        return len(desk.observations._waiting) - before

    assert goes_on(300) == 0
    desk.told("j1", done=True)
    assert goes_on(400) == 3


async def test_rates_measured_during_validation_are_left_out(desk: Desk) -> None:
    record = desk.run("j1")
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.advice)
    record.job.progress.phase = "validation"
    desk.profiles.progressed(record)
    record.job.progress.phase = ""
    desk.told("j1", 1, 10.0)
    desk.told("j1", 4, 40.0)
    await until(lambda: desk.others.observed)
    assert [one.allocation.cores for one in desk.others.observed] == [4]


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 0.0, -1.0])
async def test_a_report_without_a_valid_rate_only_ends_the_profile(desk: Desk, rate: float) -> None:
    desk.run("j1")
    desk.told("j1", 1, rate, message="no step was told")
    desk.told("j1", done=True)
    await until(lambda: desk.others.observed)
    assert [one.profile_done for one in desk.others.observed] == [True]


async def test_a_repeatedly_refused_profile_is_reported_without_points(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.services.queue.estimates.profiling.RETRY_SECONDS", 0.01)
    record = desk.run("j1")
    desk.others.refused, desk.others.plans = ["its cores are being changed"], [[1, 4]] * 9
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.observed)
    assert [(one.profiled, one.profile_done, one.rate_per_second) for one in desk.others.observed] == [(True, True, 0)]
    assert len(desk.others.asked) == 5
    (event,) = record.stored.events
    assert (kind_of(event), event.detail) == ("not_profiled", "its cores are being changed")
    assert desk.others.queries == []


async def test_a_profile_order_is_retried_when_placement_is_down(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.services.queue.estimates.profiling.RETRY_SECONDS", 0.01)
    desk.run("j1")
    desk.others.away, desk.others.plans = 2, [[1, 4]] * 3
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.advice)
    assert list(desk.others.advice[0].profile.cores) == [1, 4]


async def test_a_profile_without_a_final_report_ends_after_its_budget(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotenant.services.queue.estimates.profiling.OVERDUE_SECONDS", -299.99)
    desk.run("j1")
    desk.profiles.request(["j1"])
    await until(lambda: desk.others.observed)
    assert desk.others.observed[0].profile_done


async def test_reports_of_other_attempts_and_requests_for_ended_jobs_are_ignored(desk: Desk) -> None:
    desk.run("j1")
    ended = desk.run("j2")
    ended.job.phase = job_pb2.JOB_PHASE_SUCCEEDED
    desk.profiles.request(["j2", "unknown"])
    desk.told("j1", 1, 10.0, number=7)
    desk.told("unknown", 1, 10.0)
    desk.told("j1", 4, 40.0)
    await until(lambda: desk.others.observed)
    assert [one.allocation.cores for one in desk.others.observed] == [4]
    assert desk.others.asked == []


# Estimates that are renewed ----------------------------------------------------------------------------------


async def test_an_estimate_is_refreshed_after_a_rate_and_each_further_tenth_of_run_time(
    desk: Desk,
) -> None:
    record = desk.run("j1")
    for now in (1_000.0, 1_010.0, 1_089.0):
        desk.estimate_refresh.observed(record, now)
    await until(lambda: record.estimate is not None)
    assert len(desk.others.queries) == 1
    assert desk.state.table.jobs(0.0).predicted_seconds[0] > 50.0
    desk.estimate_refresh.observed(record, 1_091.0)
    await until(lambda: len(desk.others.queries) == 2)
    desk.estimate_refresh.observed(record, 90_000.0)
    await until(lambda: len(desk.others.queries) == 3)
    assert record.refresh_after == 90_600.0
    record.job.attempt.epoch = 6  # other cores
    desk.estimate_refresh.observed(record, 90_001.0)
    await until(lambda: len(desk.others.queries) == 4)
    assert len(desk.others.advice) == 1, "placement is told where cores may follow from it"


async def test_advice_to_placement_is_retried(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.services.queue.estimates.estimate_refresh.BATCH_SECONDS", 0.01)
    record = desk.run("j1")
    desk.others.away = 2
    desk.estimate_refresh.observed(record, 1_000.0)
    await until(lambda: desk.others.advice)
    assert (desk.others.advice[0].job_id, desk.others.advice[0].estimate.cores_useful) == ("j1", 4)
    assert len(desk.others.queries) == 1


async def test_many_refreshes_are_batched(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotenant.services.queue.estimates.estimate_refresh.BATCH_MAX", 3)
    monkeypatch.setattr("cotenant.services.queue.estimates.estimate_refresh.BATCH_SECONDS", 0.01)
    for number in range(7):
        desk.estimate_refresh.observed(desk.run(f"j{number}"), 1_000.0)
    desk.state.records["j6"].job.phase = job_pb2.JOB_PHASE_SUCCEEDED
    await until(lambda: len(desk.others.queries) == 6)
    assert len({query.job_id for query in desk.others.queries}) == 6


async def test_a_rate_window_refreshes_the_estimate(desk: Desk) -> None:
    record = desk.run("j1")
    for second in range(300, 320):
        record.job.progress.CopyFrom(
            job_pb2.Progress(step=second, step_time=timestamp(second), update_time=timestamp(second))
        )
        desk.observations.progressed(record)
    await until(lambda: len(desk.others.queries) == 1)
