"""Dependencies: order, cancellation, restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from benchmarks.agents import SimulatedAgent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.properties import examples
from tests.unit.services.mesh import Mesh, eventually, running, until

from cotenant.codec.errors import from_error
from cotenant.core.model.dependencies import Dependency
from cotenant.core.model.job import JobSpec, Role
from cotenant.core.model.refusal import Wait
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.transitions import new_record
from cotenant.services.queue.scheduling import wait_metrics
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

AFTER, AFTER_OK = job_pb2.DEPENDENCY_CONDITION_AFTER, job_pb2.DEPENDENCY_CONDITION_AFTER_OK
AFTER_FAIL, AFTER_STARTED = job_pb2.DEPENDENCY_CONDITION_AFTER_FAIL, job_pb2.DEPENDENCY_CONDITION_AFTER_STARTED


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


def ok(*ids: str) -> list[job_pb2.Dependency]:
    return [job_pb2.Dependency(id=one, condition=AFTER_OK) for one in ids]


def after(*ids: str) -> list[job_pb2.Dependency]:
    return [job_pb2.Dependency(id=one, condition=AFTER) for one in ids]


async def cancel(mesh: Mesh, thing_id: str) -> None:
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=thing_id))


async def test_a_job_waits_for_the_success_of_its_dependencies(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    first, second = await mesh.submit(), await mesh.submit()
    await mesh.reach(first, "RUNNING")
    last = await mesh.submit(dependencies=ok(first, second))
    told = (await mesh.job(last)).refusal
    assert told.code == "DEPENDENCY"
    assert told.detail.startswith("waits for 2 jobs to succeed: ")
    assert f"{first} (running)" in told.detail
    explained = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=last))
    assert explained.summary.startswith("waits for other jobs: DEPENDENCY")
    state = mesh.parts["queue"].service.state
    assert last not in state.table
    assert wait_metrics.wait_of(state, state.records[last]) is Wait.DEPENDENCY
    agent.finish((first, 1))
    await mesh.reach(first, "SUCCEEDED")
    assert (await mesh.job(last)).refusal.detail.startswith("waits for 1 job to succeed: ")
    await mesh.reach(second, "RUNNING")
    agent.finish((second, 1))
    await mesh.reach(last, "RUNNING")


async def test_a_job_waits_for_the_end_of_its_dependencies(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    first, other = await mesh.submit(), await mesh.submit()
    last = await mesh.submit(dependencies=after(first, other))
    await mesh.reach(first, "RUNNING")
    agent.finish((first, 1), code=3)
    await mesh.reach(first, "FAILED")
    assert (await mesh.job(last)).refusal.detail.startswith("waits for 1 job to end: ")
    await cancel(mesh, other)
    await mesh.reach(last, "RUNNING")


async def test_an_unsatisfiable_job_is_cancelled_with_its_dependents(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    first = await mesh.submit()
    second = await mesh.submit(dependencies=ok(first))
    held = await mesh.submit(dependencies=ok(first))
    third = await mesh.submit(dependencies=ok(second))
    anyway = await mesh.submit(dependencies=after(third))
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=held))
    await mesh.reach(first, "RUNNING")
    agent.finish((first, 1), code=1)
    for waiting, cause in (
        (second, f"success of {first}, which failed"),
        (third, f"success of {second}, which was"),
    ):
        job = await mesh.reach(waiting, "CANCELLED")
        assert cause in job.phase_reason
        assert job.attempt.number == 0
    await mesh.reach(held, "CANCELLED")
    await mesh.reach(anyway, "RUNNING")


def when(condition: job_pb2.DependencyCondition.ValueType, *ids: str) -> list[job_pb2.Dependency]:
    return [job_pb2.Dependency(id=one, condition=condition) for one in ids]


async def test_a_job_after_a_failure_runs_after_it_and_never_after_a_success(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    bad, good = await mesh.submit(), await mesh.submit()
    report = await mesh.submit(dependencies=when(AFTER_FAIL, bad))
    vain = await mesh.submit(dependencies=when(AFTER_FAIL, good))
    told = (await mesh.job(report)).refusal
    assert told.detail.startswith(f"waits for 1 job to fail: {bad} (")
    await mesh.reach(bad, "RUNNING")
    agent.finish((bad, 1), code=1)
    await mesh.reach(report, "RUNNING")
    agent.finish((report, 1))
    await mesh.reach(good, "RUNNING")
    agent.finish((good, 1))
    job = await mesh.reach(vain, "CANCELLED")
    assert job.phase_reason == f"depends on the failure of {good}, which succeeded"


async def test_a_job_after_a_start_runs_beside_the_other_also_after_a_restart(mesh: Mesh) -> None:
    await mesh.agent("n1")
    server = await mesh.submit()
    await mesh.reach(server, "RUNNING")
    never = await mesh.submit(gpus=8)
    beside = await mesh.submit(dependencies=when(AFTER_STARTED, server))
    vain = await mesh.submit(dependencies=when(AFTER_STARTED, never))
    await mesh.reach(beside, "RUNNING")
    assert (await mesh.job(vain)).refusal.detail.startswith("waits for 1 job to start: ")
    await mesh.restart("queue")
    await mesh.reach(server, "RUNNING")
    late = await mesh.submit(dependencies=when(AFTER_STARTED, server))
    await mesh.reach(late, "RUNNING")
    assert (await mesh.job(vain)).refusal.code == "DEPENDENCY"
    await cancel(mesh, never)
    job = await mesh.reach(vain, "CANCELLED")
    assert job.phase_reason == f"depends on the start of {never}, which was cancelled before it ran"
    assert (await mesh.job(server)).phase == job_pb2.JOB_PHASE_RUNNING


async def test_a_job_that_ran_and_ended_while_the_queue_was_away_has_started(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    server = await mesh.submit()
    await mesh.reach(server, "RUNNING")
    blocked = await mesh.submit(dependencies=[*when(AFTER_STARTED, server), *after(await mesh.submit(gpus=8))])
    await mesh.kill("queue")
    agent.finish((server, 1))
    await mesh.start("queue")
    assert (await mesh.reach(server, "SUCCEEDED")).HasField("start_time")
    assert (await mesh.job(blocked)).phase == job_pb2.JOB_PHASE_QUEUED


async def test_a_success_of_which_nobody_said_when_it_began_has_started(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    agent.answers_assignments = False
    server = await mesh.submit()
    second = await mesh.submit(dependencies=when(AFTER_STARTED, server))
    await until(lambda: (server, 1) in agent.assignments)
    agent.answers_assignments = True
    agent.report((server, 1), job_pb2.ATTEMPT_STATE_SUCCEEDED)
    await mesh.reach(second, "RUNNING")
    assert not (await mesh.job(server)).HasField("start_time")


async def test_conditions_of_arrays_are_about_all_of_their_jobs(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    tasks = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=1)], running_max=1)
    array = await mesh.submit_array(array=tasks)
    started = await mesh.submit(dependencies=when(AFTER_STARTED, array))
    failed = await mesh.submit(dependencies=when(AFTER_FAIL, array))
    await mesh.reach(f"{array}_0", "RUNNING")
    agent.finish((f"{array}_0", 1), code=1)
    await mesh.reach(f"{array}_0", "FAILED")
    await mesh.reach(f"{array}_1", "RUNNING")
    await mesh.reach(started, "RUNNING")
    assert (await mesh.job(failed)).phase == job_pb2.JOB_PHASE_QUEUED
    agent.finish((f"{array}_1", 1))
    await mesh.reach(failed, "RUNNING")


async def test_a_retried_failure_does_not_satisfy_a_dependency(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    first = await mesh.submit(retries_max=1)
    last = await mesh.submit(dependencies=ok(first))
    await mesh.reach(first, "RUNNING")
    agent.finish((first, 1), code=1)
    await mesh.refused(first, "BACK_OFF")
    assert (await mesh.job(last)).refusal.code == "DEPENDENCY"
    await mesh.reach(first, "RUNNING")
    agent.finish((first, 2))
    await mesh.reach(last, "RUNNING")


async def test_unknown_dependencies_are_refused(mesh: Mesh) -> None:
    first = await mesh.submit()
    wrong = first[:-1] + ("0" if first[-1] != "0" else "1")
    strange = job_pb2.Dependency(id=first)
    strange.condition = 9  # type: ignore[assignment]  # of a newer version
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.submit(dependencies=[*ok(first), *ok(wrong), *after(""), strange])
    fields = {one.field: one.description for one in from_error(refused.value).violations}
    assert set(fields) == {"spec.dependencies[2].id", "spec.dependencies[3].condition"}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.submit(dependencies=ok(first, wrong))
    [violation] = from_error(refused.value).violations
    assert violation.field == "spec.dependencies[1].id"
    assert first in violation.description
    assert (await mesh.jobs.ListJobs(pb.ListJobsRequest())).total_size == 1


async def test_what_if_reports_unmet_dependencies(mesh: Mesh) -> None:
    await mesh.agent("n1")
    first = await mesh.submit()
    spec = (await mesh.job(first)).spec
    spec.dependencies.extend(ok(first))
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec))
    assert answer.refusal.code == "DEPENDENCY"
    assert not answer.starts_now


async def test_dependencies_survive_restarts(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    first, doomed = await mesh.submit(), await mesh.submit(gpus=8)
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=doomed))
    last = await mesh.submit(dependencies=ok(first))
    chain = [await mesh.submit(dependencies=ok(doomed))]
    chain.append(await mesh.submit(dependencies=ok(chain[-1])))
    await mesh.reach(first, "RUNNING")
    await mesh.restart("queue")
    await mesh.reach(first, "RUNNING")
    await mesh.refused(last, "DEPENDENCY")
    await mesh.kill("queue")
    agent.finish((first, 1))
    await mesh.start("queue")
    await mesh.reach(last, "RUNNING")
    await cancel(mesh, doomed)
    await mesh.restart("queue")  # possibly before the dependents were updated
    for waiting in chain:
        await mesh.reach(waiting, "CANCELLED")
    assert [key for key, _ in agent.assignments] == [first, last]


def test_dependencies_hold_regardless_of_load_order() -> None:
    """Ids follow a clock, which may have been set back between two leaders."""
    first = new_record("b", JobSpec(roles=(Role(),)), "", "")
    last = new_record("a", JobSpec(roles=(Role(),), dependencies=(Dependency("b"),)), "", "")
    state = State()
    state.load([last, first])
    assert list(state.table.ids) == ["b"]


async def test_dependencies_are_not_deleted(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    first, alone = await mesh.submit(), await mesh.submit()
    last = await mesh.submit(dependencies=ok(first), gpus=8)
    for job_id in (first, alone):
        await mesh.reach(job_id, "RUNNING")
        agent.finish((job_id, 1))
        await mesh.reach(job_id, "SUCCEEDED")
    service = mesh.parts["queue"].service
    service.retention._kept_max = 0
    await service.retention.sweep(time.time())
    assert list(service.state.records) == [first, last]
    await mesh.reach(last, "RUNNING")
    await mesh.restart("queue")
    await mesh.reach(last, "RUNNING")
    agent.finish((last, 1))
    await mesh.reach(last, "SUCCEEDED")
    service = mesh.parts["queue"].service
    service.retention._kept_max = 0
    await service.retention.sweep(time.time())
    assert await mesh.records_left("queue/jobs/") == []


async def test_a_job_being_deleted_cannot_become_a_dependency(mesh: Mesh) -> None:
    gone = await mesh.submit()
    await cancel(mesh, gone)
    queue = mesh.parts["queue"]
    queue.service.retention._kept_max = 0
    queue.store.held_back = asyncio.Event()
    sweep = asyncio.create_task(queue.service.retention.sweep(time.time()))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.submit(dependencies=after(gone))
    assert "unknown job or array" in from_error(refused.value).violations[0].description
    queue.store.held_back.set()
    await sweep


GRAPHS = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=3)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(GRAPHS, st.booleans())
def test_random_dependency_graphs_run_in_order_and_end(
    graph: list[tuple[bool, list[tuple[int, bool]]]], restarts: bool
) -> None:
    asyncio.run(_play(graph, restarts))


async def _play(graph: list[tuple[bool, list[tuple[int, bool]]]], restarts: bool) -> None:
    async with running() as mesh:
        agent = await mesh.agent("n1", gpus=2)
        _finish_by_label(agent)
        ids: list[str] = []
        wanted: dict[str, list[job_pb2.Dependency]] = {}
        for fails, others in graph:
            dependencies = [
                job_pb2.Dependency(id=ids[other], condition=AFTER_OK if strictly else AFTER)
                for other, strictly in others
                if other < len(ids)
            ]
            ids.append(await mesh.submit(dependencies=dependencies, labels={"fails": str(int(fails))}))
            wanted[ids[-1]] = dependencies
        if restarts:
            await mesh.restart("queue")

        async def ended() -> bool:
            phases = (job_pb2.JOB_PHASE_SUCCEEDED, job_pb2.JOB_PHASE_FAILED, job_pb2.JOB_PHASE_CANCELLED)
            filter_ = pb.JobFilter(phases=phases)
            listed: pb.ListJobsResponse = await mesh.jobs.ListJobs(pb.ListJobsRequest(filter=filter_))
            return listed.total_size == len(ids)

        await eventually(ended)
        jobs = {job_id: await mesh.job(job_id) for job_id in ids}
    for job_id, dependencies in wanted.items():
        job = jobs[job_id]
        ran = job.attempt.number > 0
        assert ran == all(
            one.condition == AFTER or jobs[one.id].phase == job_pb2.JOB_PHASE_SUCCEEDED for one in dependencies
        )
        for one in dependencies:
            if ran:
                assert job.attempt.assign_time.ToNanoseconds() >= jobs[one.id].end_time.ToNanoseconds()


def _finish_by_label(agent: SimulatedAgent) -> None:
    """End jobs as soon as they run, with the result that their label names."""

    def finish(job_id: str) -> None:
        key = next(key for key in agent.assignments if key[0] == job_id)
        code = int(agent.assignments[key].spec.labels["fails"])
        asyncio.get_running_loop().call_soon(lambda: agent.finish(key, code))

    agent._on_assigned = finish
