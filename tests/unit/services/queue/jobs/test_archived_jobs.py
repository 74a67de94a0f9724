"""Archived jobs: reads of them, and dependencies on them."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.integration.test_tenancy import ByName, created
from tests.unit.services.mesh import Mesh, running, spec

from cotenant.codec import specs
from cotenant.codec.errors import Problem, from_error
from cotenant.core.model.lifecycle import Phase
from cotenant.rpc.channel import connect
from cotenant.services.queue.api.server import QueueConfig
from cotenant.services.queue.jobs import archive as archives
from cotenant.services.queue.jobs.archive import Archive, ArchiveEntry
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import array_service_pb2_grpc, job_pb2, job_service_pb2_grpc
from cotenant.v1 import job_service_pb2 as pb

AFTER, AFTER_OK = job_pb2.DEPENDENCY_CONDITION_AFTER, job_pb2.DEPENDENCY_CONDITION_AFTER_OK
QUEUED, SUCCEEDED, CANCELLED = (
    job_pb2.JOB_PHASE_QUEUED,
    job_pb2.JOB_PHASE_SUCCEEDED,
    job_pb2.JOB_PHASE_CANCELLED,
)
THREE = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=1, last=3, step=1)])


def after(job_id: str, condition: job_pb2.DependencyCondition.ValueType = AFTER_OK) -> list[job_pb2.Dependency]:
    return [job_pb2.Dependency(id=job_id, condition=condition)]


async def refusal(call: Any) -> Problem:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return from_error(refused.value)


@dataclass
class World:
    """Archived jobs in each terminal phase; nothing runs."""

    mesh: Mesh
    path: Path
    good: str
    bad: str
    array: str

    async def elsewhere(self) -> None:
        """Make a queue with a disk of its own the next leader."""
        self.mesh.queue_config = replace(self.mesh.queue_config, archive=self.path.with_name("other.sqlite"))
        await self.mesh.restart("queue")


@asynccontextmanager
async def archived(path: Path, tenant: str = "", **fields: Any) -> AsyncIterator[World]:
    config = QueueConfig(ended_kept_max=0, archive=path)
    async with running(queue_config=config, **fields) as mesh:
        bad = await mesh.submit(tenant=tenant)
        array = await mesh.submit_array(tenant=tenant, array=THREE)
        for gone in (bad, f"{array}_2"):
            await mesh.jobs.CancelJob(pb.CancelJobRequest(id=gone))
        await mesh.agent("n1", run_seconds=0.0)
        good = await mesh.submit(tenant=tenant, environment={"SECRET": "s3cr3t"})
        await mesh.all_ended()
        await mesh.parts["queue"].service.retention.sweep(time.time())
        assert await mesh.records_left("queue/jobs/") == []
        yield World(mesh, path, good, bad, array)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with archived(tmp_path / "archive.sqlite") as made:
        yield made


async def test_reads_of_an_archived_job_return_how_it_ended(world: World) -> None:
    jobs = world.mesh.jobs
    told = await world.mesh.job(world.good)
    assert (told.phase, told.archived, dict(told.spec.environment)) == (SUCCEEDED, True, {})
    assert (await world.mesh.job(f"{world.array}_2")).phase == CANCELLED
    explained = await jobs.ExplainJob(pb.ExplainJobRequest(id=world.bad))
    assert explained.summary == "cancelled"
    request = pb.WatchJobsRequest(filter=pb.JobFilter(ids=[world.good, "nothing"]), until_ended=True)
    seen = [one async for one in jobs.WatchJobs(request)]
    assert [job.id for one in seen for job in one.jobs] == [world.good]
    assert (await jobs.CancelJob(pb.CancelJobRequest(id=world.good))).job.phase == SUCCEEDED
    for change in (
        jobs.SuspendJob(pb.SuspendJobRequest(id=world.good)),
        jobs.ResumeJob(pb.ResumeJobRequest(id=world.good)),
        jobs.MoveJob(pb.MoveJobRequest(id=world.good, number=1)),
        jobs.UpdateJob(pb.UpdateJobRequest(job=job_pb2.Job(id=world.good))),
    ):
        assert (await refusal(change)).reason == "JOB_ENDED"
    asked = await refusal(jobs.GetJob(pb.GetJobRequest(id=world.array)))
    assert (asked.reason, f"{world.array}_1" in asked.message) == ("IS_ARRAY", True)
    assert (await refusal(jobs.GetJob(pb.GetJobRequest(id="nothing")))).reason == "JOB_NOT_FOUND"
    assert await world.mesh.records_left("queue/jobs/") == []  # nothing came back


async def test_an_archived_array_is_returned_as_far_as_the_archive_knows(world: World) -> None:
    arrays = world.mesh.arrays
    array = (await arrays.GetArray(array_pb.GetArrayRequest(id=world.array))).array
    assert [(one.phase, one.count) for one in array.phase_counts] == [(SUCCEEDED, 2), (CANCELLED, 1)]
    assert (array.id, array.job_count, array.archived, array.etag) == (world.array, 3, True, "")
    assert (array.spec.array, array.submitter) == (THREE, "anyone")
    ends = [specs.seconds((await world.mesh.job(f"{world.array}_{index}")).end_time) for index in (1, 2, 3)]
    assert specs.seconds(array.end_time) == max(ends)
    assert (await arrays.CancelArray(array_pb.CancelArrayRequest(id=world.array))).array == array
    for change in (
        arrays.SuspendArray(array_pb.SuspendArrayRequest(id=world.array)),
        arrays.ResumeArray(array_pb.ResumeArrayRequest(id=world.array)),
    ):
        assert (await refusal(change)).reason == "ARRAY_ENDED"
    for job_id in (world.good, f"{world.array}_1"):
        assert (await refusal(arrays.GetArray(array_pb.GetArrayRequest(id=job_id)))).reason == "IS_JOB"
    assert (await refusal(arrays.GetArray(array_pb.GetArrayRequest(id="nothing")))).reason == "ARRAY_NOT_FOUND"
    asked = await refusal(world.mesh.jobs.CancelJob(pb.CancelJobRequest(id=world.array)))
    assert (asked.reason, "call ArrayService.CancelArray" in asked.message) == ("IS_ARRAY", True)
    assert (await arrays.ListArrays(array_pb.ListArraysRequest())).total_size == 0
    assert await world.mesh.records_left("queue/jobs/") == []  # nothing came back


async def test_dependencies_on_archived_jobs_follow_their_outcome(world: World) -> None:
    mesh = world.mesh
    for what, condition in ((world.good, AFTER), (world.good, AFTER_OK), (world.bad, AFTER), (world.array, AFTER)):
        await mesh.reach(await mesh.submit(dependencies=after(what, condition)), "SUCCEEDED")
    for what, why in (
        (world.bad, f"{world.bad}, which was cancelled"),
        (world.array, f"array {world.array}: 2 succeeded, 1 cancelled"),
    ):
        array = await mesh.submit_array(dependencies=after(what), array=THREE)
        for made in (await mesh.submit(dependencies=after(what)), f"{array}_1"):
            job = await mesh.job(made)
            assert (job.phase, job.phase_reason) == (CANCELLED, f"depends on the success of {why}")
        created = (await mesh.arrays.GetArray(array_pb.GetArrayRequest(id=array))).array
        assert [(one.phase, one.count) for one in created.phase_counts] == [(CANCELLED, 3)]
        assert created.HasField("end_time")
    asked = await refusal(mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(dependencies=after(world.bad)))))
    assert asked.reason == "DEPENDENCY_FAILED"
    asked = await refusal(mesh.submit(dependencies=after("nothing")))
    assert "unknown job or array 'nothing'" in str(asked.violations)


async def test_settled_dependencies_hold_without_the_archive(world: World) -> None:
    mesh = world.mesh
    await mesh.agents.pop("n1").stop()
    last = await mesh.submit()  # nothing runs, and so it waits
    kept = await mesh.submit(dependencies=[*after(world.good), *after(last)])
    gone = await mesh.submit(dependencies=[*after(world.bad), *after(last)])
    await world.elsewhere()
    assert [(await mesh.job(one)).phase for one in (kept, gone)] == [QUEUED, CANCELLED]


async def test_a_leader_without_the_archive_reports_an_unknown_outcome(world: World) -> None:
    jobs = world.mesh.jobs
    await world.elsewhere()
    for call in (
        jobs.GetJob(pb.GetJobRequest(id=world.good)),
        jobs.CancelJob(pb.CancelJobRequest(id=world.bad)),
        jobs.GetJob(pb.GetJobRequest(id=world.array)),
        world.mesh.arrays.GetArray(array_pb.GetArrayRequest(id=world.array)),
        world.mesh.arrays.CancelArray(array_pb.CancelArrayRequest(id=world.array)),
        world.mesh.submit(dependencies=after(world.good)),
        jobs.CreateJob(pb.CreateJobRequest(spec=spec(dependencies=after(f"{world.array}_1")), validate_only=True)),
    ):
        told = await refusal(call)
        assert (told.code, told.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ARCHIVED_ELSEWHERE")
        assert str(world.path) in told.message
    assert (await refusal(jobs.GetJob(pb.GetJobRequest(id="nothing")))).reason == "JOB_NOT_FOUND"
    asked = await refusal(world.mesh.submit(dependencies=[*after(world.good), *after("nothing")]))
    assert "nothing" in str(asked.violations)  # definite errors come first
    assert await world.mesh.records_left("queue/jobs/") == []
    world.mesh.queue_config = replace(world.mesh.queue_config, archive=world.path)
    await world.mesh.restart("queue")
    assert (await world.mesh.job(world.good)).phase == SUCCEEDED


async def test_ids_from_a_fast_clock_may_be_in_another_archive_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = time.time_ns() + 2 * 86_400 * 10**9
    with monkeypatch.context() as clock:
        clock.setattr("cotenant.services.queue.jobs.job_ids.time.time_ns", lambda: ahead)
        async with archived(tmp_path / "archive.sqlite") as world:
            clock.undo()
            await world.elsewhere()
            for call in (world.mesh.job(world.good), world.mesh.submit(dependencies=after(world.good))):
                assert (await refusal(call)).reason == "ARCHIVED_ELSEWHERE"


async def test_a_damaged_archive_proves_nothing(world: World) -> None:
    world.path.write_bytes(b"this is no database, and longer than a header of SQLite would be: " * 20)
    array = world.mesh.arrays.GetArray(array_pb.GetArrayRequest(id=world.array))
    for call in (world.mesh.job(world.good), world.mesh.submit(dependencies=after(world.good)), array):
        assert (await refusal(call)).reason == "ARCHIVED_ELSEWHERE"


@pytest.mark.parametrize("here", [True, False])
async def test_archived_jobs_of_other_tenants_are_not_found(tmp_path: Path, here: bool) -> None:
    async with archived(tmp_path / "archive.sqlite", "blue-team", authenticator=ByName()) as world:
        if not here:
            await world.elsewhere()
        mesh, never = world.mesh, await _never(world)
        for name in ("ann", "bob"):
            mesh.channels[f"{name}/queue"] = connect(f"127.0.0.1:{mesh.ports['queue']}", name)
        hers: Any = job_service_pb2_grpc.JobServiceStub(mesh.channels["ann/queue"])
        her_arrays: Any = array_service_pb2_grpc.ArrayServiceStub(mesh.channels["ann/queue"])
        his: Any = job_service_pb2_grpc.JobServiceStub(mesh.channels["bob/queue"])

        async def told(what: str) -> list[str]:
            calls = (
                hers.GetJob(pb.GetJobRequest(id=what)),
                hers.CancelJob(pb.CancelJobRequest(id=what)),
                her_arrays.GetArray(array_pb.GetArrayRequest(id=what)),
                her_arrays.CancelArray(array_pb.CancelArrayRequest(id=what)),
                created(mesh, "ann", "a", dependencies=after(what)),
            )
            return [str(await refusal(call)).replace(what, "ID") for call in calls]

        for theirs in (world.good, world.bad, world.array, f"{world.array}_1"):
            assert await told(theirs) == await told(never)
        assert str(tmp_path) not in "".join(await told(never))
        seen = [one async for one in hers.WatchJobs(pb.WatchJobsRequest(filter=_ids(world.good), until_ended=True))]
        assert not any(one.jobs for one in seen)
        if here:
            assert (await his.GetJob(pb.GetJobRequest(id=world.good))).job.phase == SUCCEEDED
            assert (await created(mesh, "bob", "blue-team", dependencies=after(world.bad))).phase == CANCELLED


def _ids(*ids: str) -> pb.JobFilter:
    return pb.JobFilter(ids=ids)


async def _never(world: World) -> str:
    """Return an id that no job has had, although one might."""
    return world.good[:-1] + ("0" if world.good[-1] != "0" else "1")


async def test_a_dependency_archived_during_the_lookup_is_found(tmp_path: Path) -> None:
    path = tmp_path / "archive.sqlite"
    async with running(queue_config=QueueConfig(ended_kept_max=0, archive=path)) as mesh:
        await mesh.agent("n1", run_seconds=0.0)
        retention = mesh.parts["queue"].service.retention
        old: list[job_pb2.Dependency] = []
        for _ in range(5):
            first = await mesh.submit()
            await mesh.all_ended()
            swept = asyncio.create_task(retention.sweep(time.time()))
            old += after(first)
            made = await asyncio.gather(*(mesh.submit(dependencies=old) for _ in range(5)))
            await swept
            await mesh.all_ended()
            assert [(await mesh.job(one)).phase for one in made] == [SUCCEEDED] * len(made)


async def test_archive_lookups_use_an_index(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.sqlite")
    task = job_pb2.ArrayTask(array_id="0b", count=2)
    made = [
        job_pb2.Job(
            id=job_id, phase=phase, spec=job_pb2.JobSpec(kind=job_pb2.JOB_KIND_CPU, tenant="t", array_task=array_task)
        )
        for job_id, phase, array_task in (
            ("0a", SUCCEEDED, None),
            ("0b_1", SUCCEEDED, task),
            ("0b_2", job_pb2.JOB_PHASE_FAILED, task),
            ("0bc", SUCCEEDED, None),
        )
    ]
    await archive.add(made)
    found = await archive.find(["0a", "0b", "0c"])
    assert found["0b"] == ArchiveEntry("0b", "t", {Phase.SUCCEEDED: 1, Phase.FAILED: 1}, "0b_1")
    assert {one: found[one].failed for one in found} == {"0a": 0, "0b": 1}
    with sqlite3.connect(archive.path) as connection:
        for question, given in (("SELECT job FROM jobs WHERE id IN (?, ?)", ("a", "b")), (archives.TASKS, ("a", "b"))):
            plan = connection.execute(f"EXPLAIN QUERY PLAN {question}", given).fetchall()
            assert plan[0][3].startswith("SEARCH jobs USING PRIMARY KEY"), plan
