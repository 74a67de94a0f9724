"""Objectives over the real mesh: their status while jobs wait and run, their outcomes, and the check at submission."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import Mesh, eventually, running, spec

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.errors import Problem, from_error
from cotenant.codec.specs import duration, seconds
from cotenant.services.queue.api import objective_admission
from cotenant.services.queue.scheduling import objective_tracker
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

MET, AT_RISK = job_pb2.OBJECTIVE_STATE_MET, job_pb2.OBJECTIVE_STATE_AT_RISK
MISSED, UNKNOWN = job_pb2.OBJECTIVE_STATE_MISSED, job_pb2.OBJECTIVE_STATE_UNKNOWN
REQUIRE = job_pb2.OBJECTIVE_CHECK_REQUIRE


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    for limit in ("WARN_SECONDS", "REQUIRE_SECONDS"):
        monkeypatch.setattr(objective_admission, limit, 9.5)  # a busy machine forecasts slowly
    async with running() as mesh:
        await mesh.agent("n1", gpus=4)
        yield mesh


def within(left_seconds: float) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(int((time.time() + left_seconds) * 1e9))
    return made


def timed(run: float, deadline: float, **fields: Any) -> dict[str, Any]:
    return {"expected_duration": duration(run), "deadline": within(deadline), **fields}


async def created(mesh: Mesh, request_id: str = "", *, validate_only: bool = False, **fields: Any) -> job_pb2.Job:
    request = pb.CreateJobRequest(spec=spec(**fields), request_id=request_id, validate_only=validate_only)
    response: pb.CreateJobResponse = await mesh.jobs.CreateJob(request)
    return response.job


async def refusal(mesh: Mesh, **fields: Any) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.CreateJob(pb.CreateJobRequest(spec=spec(**fields)))
    return from_error(refused.value)


async def busy(mesh: Mesh, run_seconds: float) -> str:
    """Fill the cluster for this long."""
    job_id = await mesh.submit(gpus=4, expected_duration=duration(run_seconds))
    await mesh.reach(job_id, "RUNNING")
    return job_id


def states(statuses: Any) -> list[tuple[int, int]]:
    return [(one.kind, one.state) for one in statuses]


# While jobs live -----------------------------------------------------------------------------------------------


async def test_a_running_job_is_in_time_and_counts_its_margin(mesh: Mesh) -> None:
    job_id = await mesh.submit(gpus=1, **timed(600, 3600))
    await mesh.reach(job_id, "RUNNING")
    [status] = (await mesh.job(job_id)).objectives
    assert (status.kind, status.state, status.final) == (job_pb2.OBJECTIVE_KIND_DEADLINE, MET, False)
    assert status.margin == pytest.approx(3000, abs=20)
    assert status.value == pytest.approx(status.target - 3000, abs=20)
    assert status.detail.startswith("deadline in ")
    assert "; expected to finish 50 min before it" in status.detail


async def test_a_waiting_job_is_at_risk_once_its_forecast_finish_is_late(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    job_id = await mesh.submit(gpus=1, **timed(600, 1200))
    await mesh.refused(job_id, "CAPACITY")
    tracker = mesh.parts["queue"].service.objectives
    await tracker.forecast()
    [status] = (await mesh.job(job_id)).objectives
    assert status.state == AT_RISK
    assert status.margin == pytest.approx(-1200, abs=20)
    explained = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    assert states(explained.objectives) == [(job_pb2.OBJECTIVE_KIND_DEADLINE, AT_RISK)]
    assert "expected to finish 20 min after it" in explained.objectives[0].detail
    assert explained.job.objectives == explained.objectives


@pytest.mark.deep
async def test_the_tracker_forecasts_by_itself(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    job_id = await mesh.submit(gpus=1, **timed(600, 1200))

    async def at_risk() -> bool:
        mesh.parts["queue"].service.objectives._next_forecast = 0.0
        return states((await mesh.job(job_id)).objectives)[0][1] == AT_RISK

    await eventually(at_risk)


async def test_a_job_of_unknown_length_has_an_unknown_status(mesh: Mesh) -> None:
    job_id = await mesh.submit(gpus=1, deadline=within(3600))
    await mesh.reach(job_id, "RUNNING")
    [status] = (await mesh.job(job_id)).objectives
    assert status.state == UNKNOWN
    assert status.detail.endswith("its run time is not known")


async def test_a_missed_deadline_is_final_although_the_job_runs(mesh: Mesh) -> None:
    job_id = await mesh.submit(gpus=1, **timed(600, 0.5))
    await mesh.reach(job_id, "RUNNING")

    async def missed() -> bool:
        [status] = (await mesh.job(job_id)).objectives
        return status.state == MISSED and status.final

    await eventually(missed)


async def test_ended_jobs_keep_their_outcome_also_after_a_restart(mesh: Mesh) -> None:
    done = await mesh.submit(gpus=1, **timed(600, 3600))
    cancelled = await mesh.submit(gpus=1, **timed(600, 3600))
    none = await mesh.submit(gpus=1)
    for job_id in (done, cancelled, none):
        await mesh.reach(job_id, "RUNNING")
    mesh.agents["n1"].end((done, 1), job_pb2.ATTEMPT_STATE_SUCCEEDED)
    await mesh.reach(done, "SUCCEEDED")
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=cancelled))
    await mesh.reach(cancelled, "CANCELLED")
    found: dict[str, list[list[job_pb2.ObjectiveStatus]]] = {}
    for _ in range(2):
        for job_id in (done, cancelled, none):
            found.setdefault(job_id, []).append(list((await mesh.job(job_id)).objectives))
        await mesh.restart("queue")
    assert [states(one) for one in found[done]] == [[(job_pb2.OBJECTIVE_KIND_DEADLINE, MET)]] * 2
    assert found[done][0] == found[done][1]
    assert found[done][0][0].final
    assert [states(one) for one in found[cancelled]] == [[(job_pb2.OBJECTIVE_KIND_DEADLINE, UNKNOWN)]] * 2
    assert found[none] == [[], []]


def report(mesh: Mesh, job_id: str, **progress: Any) -> None:
    now = Timestamp()
    now.GetCurrentTime()
    told = job_pb2.Progress(update_time=now, **progress)
    mesh.agents["n1"].send(progress=[agent_pb2.ProgressReport(job_id=job_id, number=1, progress=told)])


async def test_a_rate_is_judged_by_what_is_measured_and_kept_as_the_mean(mesh: Mesh) -> None:
    job_id = await mesh.submit(gpus=1, qos=job_pb2.Qos(rate_min_per_second=4.0))
    await mesh.reach(job_id, "RUNNING")

    async def has(state: int) -> bool:
        return states((await mesh.job(job_id)).objectives) == [(job_pb2.OBJECTIVE_KIND_RATE, state)]

    assert await has(UNKNOWN)
    report(mesh, job_id, step=10, rate_per_second=4.5)
    await eventually(lambda: has(MET))
    report(mesh, job_id, step=20, rate_per_second=3.5)
    await eventually(lambda: has(AT_RISK))
    report(mesh, job_id, step=10_000_000, rate_per_second=3.5)
    await eventually(lambda: has(AT_RISK))
    mesh.agents["n1"].end((job_id, 1), job_pb2.ATTEMPT_STATE_SUCCEEDED)
    job = await mesh.reach(job_id, "SUCCEEDED")
    [status] = job.objectives
    assert (status.state, status.final) == (MET, True)
    assert status.value == pytest.approx(job.progress.step / seconds(job.run_time))


async def test_a_batch_longer_than_the_target_puts_a_latency_at_risk(mesh: Mesh) -> None:
    qos = job_pb2.Qos(latency_seconds=0.05, latency_percentile=99.0, arrivals_per_second=10.0)
    job_id = await mesh.submit(gpus=1, kind=job_pb2.JOB_KIND_INFERENCE, qos=qos)
    await mesh.reach(job_id, "RUNNING")

    async def has(state: int) -> bool:
        return states((await mesh.job(job_id)).objectives) == [(job_pb2.OBJECTIVE_KIND_LATENCY, state)]

    assert await has(UNKNOWN)
    report(mesh, job_id, batch_size=8, batch_time=duration(0.07))
    await eventually(lambda: has(AT_RISK))
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
    await mesh.reach(job_id, "CANCELLED")
    assert await has(MISSED)


async def test_objectives_are_counted_by_state_and_ends_by_outcome(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    live, ended = dict[tuple[str, ...], float](), Counter[tuple[str, ...]]()

    def set_live(count: float, **labels: str) -> None:
        live[tuple(labels.values())] = count

    def add_end(**labels: str) -> None:
        ended[tuple(labels.values())] += 1

    monkeypatch.setattr(objective_tracker, "OBJECTIVES", SimpleNamespace(set=set_live))
    monkeypatch.setattr(objective_tracker, "ENDED", SimpleNamespace(add=add_end))
    done = await mesh.submit(gpus=1, **timed(600, 3600))
    unknown = await mesh.submit(gpus=1, deadline=within(3600))
    await mesh.submit(gpus=1)
    await mesh.reach(done, "RUNNING")
    await mesh.reach(unknown, "RUNNING")
    tracker = mesh.parts["queue"].service.objectives
    await tracker.track()
    assert live == {("deadline", "met", "default"): 1, ("deadline", "unknown", "default"): 1}
    mesh.agents["n1"].end((done, 1), job_pb2.ATTEMPT_STATE_SUCCEEDED)
    mesh.agents["n1"].end((unknown, 1), job_pb2.ATTEMPT_STATE_FAILED)
    await mesh.reach(done, "SUCCEEDED")
    await mesh.reach(unknown, "FAILED")
    await tracker.track()
    assert not any(live.values())
    assert ended == {("deadline", "met", "default"): 1, ("deadline", "missed", "default"): 1}
    await mesh.restart("queue")
    assert (await mesh.job(done)).objectives[0].state == MET
    assert ended.total() == 2, "ended jobs are not counted again by the next leader"


# At submission -------------------------------------------------------------------------------------------------


async def test_a_job_that_keeps_its_deadline_is_accepted(mesh: Mesh) -> None:
    job = await created(mesh, gpus=1, objective_check=REQUIRE, **timed(600, 3600))
    assert states(job.submitted_objectives) == [(job_pb2.OBJECTIVE_KIND_DEADLINE, MET)]
    await mesh.reach(job.id, "RUNNING")


async def test_a_job_that_comes_too_late_is_accepted_with_a_warning(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    job = await created(mesh, gpus=1, **timed(600, 1200))
    [expected] = job.submitted_objectives
    assert expected.state == AT_RISK
    assert "expected to finish 20 min after it" in expected.detail
    assert expected.remedy.startswith("a deadline 40 min from now or later, or a start within 10 min")
    assert (await mesh.job(job.id)).submitted_objectives[0] == expected


async def test_a_required_deadline_refuses_the_job_and_leaves_nothing(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    before = await mesh.records_left("queue/")
    problem = await refusal(mesh, gpus=1, objective_check=REQUIRE, **timed(600, 1200))
    assert (problem.code, problem.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OBJECTIVE_UNREACHABLE")
    assert [one.field for one in problem.violations] == ["spec.deadline"]
    assert "expected to finish 20 min after it" in problem.message
    assert "a deadline 40 min from now or later" in problem.metadata["remedy"]
    assert await mesh.records_left("queue/") == before


async def test_an_unknown_run_time_cannot_be_required(mesh: Mesh) -> None:
    problem = await refusal(mesh, gpus=1, objective_check=REQUIRE, deadline=within(3600))
    assert problem.reason == "OBJECTIVE_UNKNOWN"
    assert "its run time is not known" in problem.message
    assert problem.metadata["remedy"].startswith("give its run time (expected)")
    job = await created(mesh, gpus=1, deadline=within(3600))
    assert states(job.submitted_objectives) == [(job_pb2.OBJECTIVE_KIND_DEADLINE, UNKNOWN)]


async def test_an_unknown_rate_and_latency_cannot_be_required(mesh: Mesh) -> None:
    qos = job_pb2.Qos(rate_min_per_second=5.0, latency_seconds=0.05, latency_percentile=99.0)
    problem = await refusal(mesh, gpus=1, objective_check=REQUIRE, qos=qos)
    assert [one.field for one in problem.violations] == ["spec.qos.rate_min_per_second", "spec.qos.latency_seconds"]


async def test_a_retry_gets_the_answer_of_the_first_call(mesh: Mesh) -> None:
    fields = timed(600, 1000, gpus=4, objective_check=REQUIRE)
    first = await created(mesh, "once", **fields)
    await mesh.reach(first.id, "RUNNING")  # a second job like it would come too late
    again = await created(mesh, "once", **fields)
    assert (again.id, list(again.submitted_objectives)) == (first.id, list(first.submitted_objectives))
    assert (await refusal(mesh, **fields)).reason == "OBJECTIVE_UNREACHABLE"


async def test_retries_at_the_same_time_make_one_job(mesh: Mesh) -> None:
    fields = timed(600, 3600, gpus=1)
    jobs = await asyncio.gather(*(created(mesh, "once", **fields) for _ in range(5)))
    assert len({job.id for job in jobs}) == 1
    assert len({job.submitted_objectives[0].SerializeToString() for job in jobs}) == 1


async def test_ignore_forecasts_nothing(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    job = await created(mesh, gpus=1, objective_check=job_pb2.OBJECTIVE_CHECK_IGNORE, **timed(600, 1200))
    assert not job.submitted_objectives
    assert len(job.objectives) == 1


async def test_a_dry_run_is_checked_too(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    job = await created(mesh, gpus=1, validate_only=True, **timed(600, 1200))
    assert (job.id, states(job.submitted_objectives)) == ("", [(job_pb2.OBJECTIVE_KIND_DEADLINE, AT_RISK)])
    with pytest.raises(grpc.aio.AioRpcError, match="a required objective"):
        await created(mesh, gpus=1, validate_only=True, objective_check=REQUIRE, **timed(600, 1200))


async def test_without_a_forecast_in_time_the_job_is_accepted_as_unknown(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective_admission, "WARN_SECONDS", 0.05)
    admission = mesh.parts["queue"].service.submission._objectives
    async with admission._turn:  # another forecast is being made
        job = await created(mesh, gpus=1, **timed(600, 3600))
    assert states(job.submitted_objectives) == [(job_pb2.OBJECTIVE_KIND_DEADLINE, UNKNOWN)]


async def test_bad_input_is_named_with_every_other_mistake(mesh: Mesh) -> None:
    problem = await refusal(mesh, gpus=1, objective_check=REQUIRE, name="a/b")
    assert problem.reason == "INVALID_ARGUMENT"
    assert {one.field for one in problem.violations} == {"spec.objective_check", "spec.name"}
    problem = await refusal(mesh, gpus=1, objective_check=REQUIRE, **timed(600, -60))
    assert [(one.field, "has passed" in one.description) for one in problem.violations] == [("spec.deadline", True)]
    problem = await refusal(mesh, gpus=1, objective_check=9, deadline=within(60))
    assert [one.field for one in problem.violations] == ["spec.objective_check"]


async def test_an_array_cannot_require_its_objectives(mesh: Mesh) -> None:
    wanted = spec(gpus=1, objective_check=REQUIRE, **timed(600, 3600))
    wanted.array.ranges.add(first=0, last=1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.arrays.CreateArray(array_pb.CreateArrayRequest(spec=wanted))
    assert [one.field for one in from_error(refused.value).violations] == ["spec.objective_check"]
    wanted.objective_check = job_pb2.OBJECTIVE_CHECK_WARN
    await mesh.arrays.CreateArray(array_pb.CreateArrayRequest(spec=wanted))


async def test_a_required_deadline_may_be_removed_later(mesh: Mesh) -> None:
    job = await created(mesh, gpus=1, objective_check=REQUIRE, **timed(600, 3600))
    request = pb.UpdateJobRequest(job=job_pb2.Job(id=job.id))
    request.update_mask.paths.append("spec.deadline")
    assert not (await mesh.jobs.UpdateJob(request)).job.objectives


async def test_what_if_says_what_is_expected(mesh: Mesh) -> None:
    await busy(mesh, 1800)
    asked = pb.SimulateJobRequest(spec=spec(gpus=1, **timed(600, 1200)), more=[spec(gpus=1)])
    answer = await mesh.jobs.SimulateJob(asked)
    assert states(answer.objectives) == [(job_pb2.OBJECTIVE_KIND_DEADLINE, AT_RISK)]
    assert not answer.more[0].objectives
