"""Schedules: one job for each due time, whichever queue leads, and what happens to those that were missed."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import Mesh, eventually, reason, running, spec, until

from cotenant.codec.errors import from_error
from cotenant.services.queue.jobs.job_store import REQUESTS
from cotenant.services.queue.jobs.schedule_book import SCHEDULES
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Put
from cotenant.v1 import job_pb2, schedule_service_pb2_grpc
from cotenant.v1 import schedule_service_pb2 as pb
from cotenant.v1.job_service_pb2 import JobFilter, ListJobsRequest
from cotenant.v1.tenant_service_pb2 import CreateTenantRequest, DeleteTenantRequest, Tenant

HOUR = 3600


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def schedules(mesh: Mesh) -> Any:
    return schedule_service_pb2_grpc.ScheduleServiceStub(mesh.channel("queue"))


async def created(mesh: Mesh, every: str = "1h", request_id: str = "", **fields: Any) -> pb.Schedule:
    own = {name: fields.pop(name) for name in ("overlap", "time_zone") if name in fields}
    schedule = pb.Schedule(spec=spec(name="report", **fields), every=every, **own)
    request = pb.CreateScheduleRequest(schedule=schedule, request_id=request_id)
    return (await schedules(mesh).CreateSchedule(request)).schedule  # type: ignore[no-any-return]  # an untyped stub


async def get(mesh: Mesh, schedule_id: str) -> pb.Schedule:
    answer: pb.GetScheduleResponse = await schedules(mesh).GetSchedule(pb.GetScheduleRequest(id=schedule_id))
    return answer.schedule


async def with_record(mesh: Mesh, schedule_id: str, change: Callable[[records_pb2.StoredSchedule], None]) -> None:
    """Change the stored schedule while no queue runs."""
    await mesh.kill("queue")
    entry = await mesh.store.get(SCHEDULES + schedule_id)
    assert entry
    stored = records_pb2.StoredSchedule.FromString(entry.value)
    change(stored)
    await mesh.store.transact([], [Put(entry.key, stored.SerializeToString())])
    await mesh.start("queue")


def since(hours: float, *, later: float = 0.0) -> Callable[[records_pb2.StoredSchedule], None]:
    """Begin a schedule these hours ago, and handle its due times from then on, `later` seconds later."""

    def change(stored: records_pb2.StoredSchedule) -> None:
        stored.schedule.create_time.FromSeconds(int(time.time() - hours * HOUR + later))
        stored.handled_time.CopyFrom(stored.schedule.create_time)

    return change


async def jobs_of(mesh: Mesh, schedule_id: str) -> list[job_pb2.Job]:
    wanted = JobFilter(labels={"schedule": schedule_id})
    return list((await mesh.jobs.ListJobs(ListJobsRequest(filter=wanted))).jobs)


async def ran(mesh: Mesh, schedule_id: str) -> pb.Schedule:
    async def handled() -> bool:
        return (await get(mesh, schedule_id)).HasField("last_time")

    await eventually(handled)
    return await get(mesh, schedule_id)


async def test_missed_due_times_run_once_and_a_repeat_after_a_failover_submits_nothing(mesh: Mesh) -> None:
    schedule_id = (await created(mesh)).id
    assert await jobs_of(mesh, schedule_id) == []
    await with_record(mesh, schedule_id, since(3.5))
    found = await ran(mesh, schedule_id)
    [job] = await jobs_of(mesh, schedule_id)
    assert found.last_job_id == job.id
    assert found.last_result.startswith("submitted; this run stands for 3 due times")
    assert job.spec.name == f"report-{found.last_time.ToDatetime():%Y%m%dT%H%M%SZ}"
    assert 0 < found.next_time.seconds - time.time() <= HOUR

    def unrecorded(stored: records_pb2.StoredSchedule) -> None:  # as if the queue had died before it stored the result
        stored.handled_time.FromSeconds(found.last_time.seconds - HOUR)
        stored.schedule.ClearField("last_time")
        stored.schedule.ClearField("last_job_id")

    await with_record(mesh, schedule_id, unrecorded)
    assert (await ran(mesh, schedule_id)).last_job_id == job.id
    assert [one.id for one in await jobs_of(mesh, schedule_id)] == [job.id]


@pytest.mark.parametrize("rule", ["skip", "queue", "replace"])
async def test_an_earlier_job_that_has_not_ended_is_treated_by_the_rule(mesh: Mesh, rule: str) -> None:
    schedule_id = (await created(mesh, overlap=pb.OverlapRule.Value(f"OVERLAP_RULE_{rule.upper()}"))).id
    await with_record(mesh, schedule_id, since(1.5))
    earlier = (await ran(mesh, schedule_id)).last_job_id

    def again(stored: records_pb2.StoredSchedule) -> None:
        since(1.5, later=60)(stored)
        stored.schedule.ClearField("last_time")

    await with_record(mesh, schedule_id, again)
    found = await ran(mesh, schedule_id)
    jobs = {job.id: job for job in await jobs_of(mesh, schedule_id)}
    if rule == "skip":
        assert (found.last_result, set(jobs)) == (f"skipped: {earlier} has not ended", {earlier})
        return
    assert set(jobs) == {earlier, found.last_job_id}
    assert [one.id for one in jobs[found.last_job_id].spec.dependencies] == [earlier]
    cancelled = jobs[earlier].phase == job_pb2.JOB_PHASE_CANCELLED
    assert cancelled == (rule == "replace")


async def test_a_paused_schedule_submits_nothing_and_resumes_from_then_on(mesh: Mesh) -> None:
    schedule_id = (await created(mesh)).id
    paused = (await schedules(mesh).PauseSchedule(pb.PauseScheduleRequest(id=schedule_id))).schedule
    assert (paused.paused, paused.HasField("next_time")) == (True, False)
    made = (await schedules(mesh).RunSchedule(pb.RunScheduleRequest(id=schedule_id, request_id="once"))).job
    key = [one for one in await mesh.records_left(REQUESTS) if ".now." in one]
    assert len(key) == 1
    await until(lambda: int(time.time()) > made.create_time.seconds)  # another second, another name
    repeated = (await schedules(mesh).RunSchedule(pb.RunScheduleRequest(id=schedule_id, request_id="once"))).job
    assert (repeated.id, repeated.spec.name) == (made.id, made.spec.name)
    await with_record(mesh, schedule_id, since(3.5))
    resumed = (await schedules(mesh).ResumeSchedule(pb.ResumeScheduleRequest(id=schedule_id))).schedule
    assert resumed.next_time.seconds > time.time()
    assert [one.id for one in await jobs_of(mesh, schedule_id)] == [made.id]
    await schedules(mesh).DeleteSchedule(pb.DeleteScheduleRequest(id=schedule_id))
    assert await mesh.records_left(SCHEDULES) == []


async def test_what_cannot_be_is_refused_with_the_field(mesh: Mesh) -> None:
    for fields, wrong in (
        ({"every": "0 0 31 2 *"}, "schedule.every"),
        ({"time_zone": "Mars/Base"}, "schedule.time_zone"),
        ({"overlap": 9}, "schedule.overlap"),
        ({"grace": -1}, "spec.grace"),
    ):
        if "grace" in fields:
            schedule = pb.Schedule(spec=spec(), every="1h")
            schedule.spec.grace.FromSeconds(-1)
            call = schedules(mesh).CreateSchedule(pb.CreateScheduleRequest(schedule=schedule))
        else:
            call = created(mesh, **fields)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert [one.field for one in from_error(refused.value).violations] == [wrong]
    schedule = pb.Schedule(spec=spec(), every="1h")
    schedule.spec.deadline.FromSeconds(2_000_000_000)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await schedules(mesh).CreateSchedule(pb.CreateScheduleRequest(schedule=schedule))
    assert [one.field for one in from_error(refused.value).violations] == ["schedule.spec.deadline"]


async def test_a_repeated_request_id_creates_one_schedule_and_a_tenant_with_schedules_stays(mesh: Mesh) -> None:
    await mesh.tenants.CreateTenant(CreateTenantRequest(tenant=Tenant(id="lab")))
    first = await created(mesh, request_id="a", tenant="lab")
    assert (await created(mesh, request_id="a", tenant="lab")).id == first.id
    with pytest.raises(grpc.aio.AioRpcError) as reused:
        await created(mesh, request_id="a", every="2h", tenant="lab")
    assert reason(reused.value) == "REQUEST_ID_REUSED"
    with pytest.raises(grpc.aio.AioRpcError) as in_use:
        await mesh.tenants.DeleteTenant(DeleteTenantRequest(id="lab"))
    assert reason(in_use.value) == "TENANT_IN_USE"
    listed = (await schedules(mesh).ListSchedules(pb.ListSchedulesRequest())).schedules
    assert [one.id for one in listed] == [first.id]
