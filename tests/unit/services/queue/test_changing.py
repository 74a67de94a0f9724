"""Owners cancel, suspend, resume and update jobs, in every phase and under races."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import Mesh, again, eventually, reason, running, until

from cotenant.codec.errors import Problem, from_error
from cotenant.codec.job_events import kind_of
from cotenant.core.model.lifecycle import StopReason
from cotenant.services.queue.jobs import desired_state
from cotenant.services.queue.jobs.transitions import apply_attempt
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def cancel(mesh: Mesh, job_id: str, **fields: Any) -> str:
    response = await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id, **fields))
    return job_pb2.JobPhase.Name(response.job.phase)


async def suspend(mesh: Mesh, job_id: str, **fields: Any) -> str:
    response = await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=job_id, **fields))
    return job_pb2.JobPhase.Name(response.job.phase)


async def resume(mesh: Mesh, job_id: str, **fields: Any) -> str:
    response = await mesh.jobs.ResumeJob(pb.ResumeJobRequest(id=job_id, **fields))
    return job_pb2.JobPhase.Name(response.job.phase)


async def settled(mesh: Mesh) -> None:
    """Wait until placement has forgotten all ended attempts."""

    async def nothing() -> bool:
        return not await mesh.records_left("placement/attempts/")

    await eventually(nothing)


# Cancel and suspend ------------------------------------------------------------------------------------------


async def test_a_waiting_job_is_cancelled_at_once(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    assert await cancel(mesh, job_id) == "JOB_PHASE_CANCELLED"
    assert await cancel(mesh, job_id) == "JOB_PHASE_CANCELLED"
    agent = await mesh.agent("n1")
    await mesh.reach(await mesh.submit(), "RUNNING")
    assert len(agent.assignments) == 1


async def test_a_running_job_is_stopped_and_ends_cancelled(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit(grace=7)
    await mesh.reach(job_id, "RUNNING")
    await cancel(mesh, job_id)
    job = await mesh.reach(job_id, "CANCELLED")
    assert job.attempt.state == job_pb2.ATTEMPT_STATE_STOPPED
    (order,) = agent.stops
    assert (order.reason, order.grace.seconds) == (job_pb2.STOP_REASON_CANCELLED, 7)
    await settled(mesh)
    assert not agent.attempts


async def test_a_resumed_job_keeps_its_attained_service(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.refuses_to_stop = True
    await suspend(mesh, job_id)
    await mesh.reach(job_id, "STOPPING")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.ResumeJob(pb.ResumeJobRequest(id=job_id), timeout=0.5)
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    agent.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    attained = (await mesh.reach(job_id, "SUSPENDED")).attained_gpu_seconds
    assert attained > 0
    other = await mesh.submit()
    await mesh.reach(other, "RUNNING")  # its resources are free
    agent.finish((other, 1))
    assert await resume(mesh, job_id) == "JOB_PHASE_QUEUED"
    job = await mesh.reach(job_id, "RUNNING")
    assert job.attempt.number == 2
    assert job.attained_gpu_seconds >= attained
    assert [past.stop_reason for past in job.past_attempts] == [job_pb2.STOP_REASON_SUSPENDED]


async def test_a_suspended_job_can_be_cancelled_and_an_ended_job_not_suspended(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    assert await suspend(mesh, job_id, request_id="s") == "JOB_PHASE_SUSPENDED"
    assert await cancel(mesh, job_id) == "JOB_PHASE_CANCELLED"
    assert await suspend(mesh, job_id, request_id="s") == "JOB_PHASE_CANCELLED"  # a repeat, which changes nothing
    for change in (suspend, resume):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await change(mesh, job_id)
        assert reason(refused.value) == "JOB_ENDED"


async def test_a_cancel_overrides_a_suspend_in_progress(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.refuses_to_stop = True
    await suspend(mesh, job_id)
    await cancel(mesh, job_id)
    await suspend(mesh, job_id)
    agent.end((job_id, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    await mesh.reach(job_id, "CANCELLED")


@pytest.mark.parametrize("change", [cancel, suspend])
async def test_a_cancel_during_planning_stops_the_planned_attempt(mesh: Mesh, change: Any) -> None:
    agent = await mesh.agent("n1")
    store = mesh.parts["placement"].store
    store.held_back = asyncio.Event()
    job_id = await mesh.submit()
    placement = mesh.parts["placement"].service
    await until(lambda: job_id in placement.cluster.attempts)  # being committed
    phase = await change(mesh, job_id)
    store.held_back.set()
    store.held_back = None
    await until(lambda: bool(agent.stops))
    await settled(mesh)
    assert job_pb2.JobPhase.Name((await mesh.job(job_id)).phase) == phase
    assert not agent.attempts
    if change is suspend:
        await resume(mesh, job_id)
        job = await mesh.reach(job_id, "RUNNING")
        assert job.attempt.number == 2  # the number of a cancelled attempt is never reused


async def test_a_drain_during_planning_reaches_the_agent_after_the_start(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    placement = mesh.parts["placement"].service
    mesh.parts["placement"].store.held_back = hold = asyncio.Event()
    job_id = await mesh.submit()
    await until(lambda: job_id in placement.cluster.attempts)
    placement.attempts.order_stops(placement.cluster.on_node("n1"), StopReason.DRAINED)
    hold.set()
    mesh.parts["placement"].store.held_back = None
    await until(lambda: len(agent.stops) == 1)
    job = await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    assert [past.stop_reason for past in job.past_attempts] == [job_pb2.STOP_REASON_DRAINED]
    assert job.failures == 0
    await until(lambda: set(agent.attempts) == {(job_id, 2)})
    agent.finish((job_id, 2))
    assert (await mesh.reach(job_id, "SUCCEEDED")).phase_reason == ""


async def test_a_cancel_whose_answer_was_lost_still_stops_the_job(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    mesh.parts["queue"].store.lose_answer = True
    await again(lambda: cancel(mesh, job_id, request_id="once"))
    await mesh.reach(job_id, "CANCELLED")
    assert len(agent.stops) == 1


async def test_a_cancel_whose_answer_was_lost_takes_effect_without_a_repeat(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    mesh.parts["queue"].store.lose_answer = True
    with pytest.raises(grpc.aio.AioRpcError):
        await cancel(mesh, job_id)
    await mesh.reach(job_id, "CANCELLED")


@pytest.mark.parametrize("change", [cancel, suspend])
async def test_a_stop_that_placement_did_not_take_is_ordered_again(
    mesh: Mesh, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the watch of attempts goes on, and no event reminds the queue."""
    await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    placement, refused = mesh.parts["placement"].service, asyncio.Event()

    def refuse() -> None:
        if not refused.is_set():
            refused.set()
            raise Problem(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the test refuses this call")
        monkeypatch.undo()

    monkeypatch.setattr(placement.leadership, "check", refuse)
    await change(mesh, job_id)
    await refused.wait()
    await mesh.reach(job_id, "CANCELLED" if change is cancel else "SUSPENDED")


async def test_a_wish_survives_restarts(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.refuses_to_stop = True
    await cancel(mesh, job_id)
    await until(lambda: bool(agent.stops))
    await mesh.restart("queue", "placement")
    agent.refuses_to_stop = False
    await mesh.reach(job_id, "CANCELLED")
    await settled(mesh)


async def test_an_etag_guards_a_change(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    etag = (await mesh.job(job_id)).etag
    await suspend(mesh, job_id, etag=etag)
    for call in (cancel, resume):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(mesh, job_id, etag=etag)
        assert reason(refused.value) == "ETAG_MISMATCH"


async def test_a_repeated_change_is_done_once(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    await asyncio.gather(*(suspend(mesh, job_id, request_id="s") for _ in range(10)))
    assert await resume(mesh, job_id, request_id="r") == "JOB_PHASE_QUEUED"
    assert await suspend(mesh, job_id, request_id="s") == "JOB_PHASE_QUEUED"


async def test_stored_request_ids_are_bounded(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    for number in range(50):
        await suspend(mesh, job_id, request_id=f"s{number}")
        await resume(mesh, job_id, request_id=f"r{number}")
    assert len(await mesh.records_left("queue/requests/")) == 64


# Update ------------------------------------------------------------------------------------------------------


async def update(mesh: Mesh, job_id: str, *paths: str, etag: str = "", **values: Any) -> job_pb2.Job:
    job = job_pb2.Job(id=job_id, etag=etag, spec=job_pb2.JobSpec(**values))
    response = await mesh.jobs.UpdateJob(pb.UpdateJobRequest(job=job, update_mask=FieldMask(paths=paths)))
    updated: job_pb2.Job = response.job
    return updated


async def test_an_update_changes_masked_fields_and_the_order(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    first = await mesh.submit()
    await mesh.reach(first, "RUNNING")
    second, third = await mesh.submit(), await mesh.submit(labels={"a": "b"})
    await mesh.refused(third, "CAPACITY")
    job = await update(mesh, third, "spec.priority", "name", priority=7, name="urgent", retries_max=3)
    assert (job.spec.priority, job.spec.name, job.spec.retries_max) == (7, "urgent", 0)
    assert dict(job.spec.labels) == {"a": "b"}
    agent.finish((first, 1))
    await mesh.reach(third, "RUNNING")
    assert (await mesh.job(second)).phase == job_pb2.JOB_PHASE_QUEUED


async def test_an_update_of_whether_a_job_may_be_preempted_moves_it_to_another_class(mesh: Mesh) -> None:
    """A job that may be preempted may borrow resources: its refusals say nothing of one that may not."""
    one, other = await mesh.submit(preemptible=True), await mesh.submit(preemptible=True)
    records = mesh.parts["queue"].service.state.records
    assert records[one].equivalence_key is records[other].equivalence_key
    await update(mesh, other, "spec.preemptible", preemptible=False)
    await mesh.refused(other, "NO_NODES")
    assert records[one].equivalence_key is not records[other].equivalence_key


async def test_an_update_survives_a_queue_restart(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    await update(mesh, job_id, "spec.labels", "spec.priority", labels={"x": "y"}, priority=3)
    await mesh.restart("queue")
    job = await mesh.job(job_id)
    assert (job.spec.priority, dict(job.spec.labels)) == (3, {"x": "y"})


async def test_every_immutable_field_is_named(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    for paths in (("spec.command", "spec.roles"), ()):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await update(mesh, job_id, *paths)
        problem = from_error(refused.value)
        assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(problem.violations) == max(1, len(paths))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await update(mesh, job_id, "spec.retries_max", retries_max=-1)
    assert [violation.field for violation in from_error(refused.value).violations] == ["spec.retries_max"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await update(mesh, job_id, "spec.priority", etag="1")
    assert reason(refused.value) == "ETAG_MISMATCH"


async def test_a_passed_deadline_does_not_block_other_updates(mesh: Mesh) -> None:
    deadline = Timestamp()
    deadline.GetCurrentTime()
    deadline.nanos = 0
    deadline.seconds += 2
    job_id = await mesh.submit(deadline=deadline)
    record = mesh.parts["queue"].service.state.records[job_id]
    record.stored.job.spec.deadline.seconds -= 100
    assert (await update(mesh, job_id, "spec.priority", priority=1)).spec.priority == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await update(mesh, job_id, "spec.deadline", deadline=Timestamp(seconds=1))
    assert [violation.field for violation in from_error(refused.value).violations] == ["spec.deadline"]


async def test_validating_an_update_changes_nothing(mesh: Mesh) -> None:
    job_id = await mesh.submit()
    request = pb.UpdateJobRequest(
        job=job_pb2.Job(id=job_id, spec=job_pb2.JobSpec(priority=5)),
        update_mask=FieldMask(paths=["spec.priority"]),
        validate_only=True,
    )
    assert (await mesh.jobs.UpdateJob(request)).job.spec.priority == 5
    assert (await mesh.job(job_id)).spec.priority == 0


def test_a_cancellation_overrides_later_requests() -> None:
    stored = records_pb2.StoredJob(wish=job_pb2.JOB_PHASE_CANCELLED)
    stored.job.phase = job_pb2.JOB_PHASE_QUEUED  # its attempt is over, and this queue has just started
    assert desired_state.cancel_or_suspend(stored, job_pb2.JOB_PHASE_SUSPENDED)
    assert stored.job.phase == job_pb2.JOB_PHASE_CANCELLED


@pytest.mark.parametrize("kept", [job_pb2.JOB_PHASE_UNSPECIFIED, job_pb2.JOB_PHASE_SUSPENDED])
def test_a_fulfilled_wish_of_an_earlier_leader_does_not_hold_a_job_back(kept: job_pb2.JobPhase.ValueType) -> None:
    """A new leader takes the job for idle until it receives its attempt, and suspends it at once."""
    stored = records_pb2.StoredJob(wish=kept)
    stored.job.phase = job_pb2.JOB_PHASE_QUEUED
    assert desired_state.cancel_or_suspend(stored, job_pb2.JOB_PHASE_SUSPENDED)
    stored.wish = stored.wish or kept  # as older versions left it
    assert stored.job.phase == job_pb2.JOB_PHASE_SUSPENDED
    assert desired_state.resume(stored)
    assert (stored.job.phase, stored.wish) == (job_pb2.JOB_PHASE_QUEUED, job_pb2.JOB_PHASE_UNSPECIFIED)


@pytest.mark.parametrize("phase", [job_pb2.JOB_PHASE_QUEUED, job_pb2.JOB_PHASE_SUSPENDED])
def test_a_job_to_be_cancelled_is_never_suspended_or_resumed(
    phase: job_pb2.JobPhase.ValueType,
) -> None:
    """Its owner was told that it will be cancelled, and a new leader takes it for idle."""
    stored = records_pb2.StoredJob(wish=job_pb2.JOB_PHASE_CANCELLED)
    stored.job.phase = phase
    assert not desired_state.resume(stored)
    assert (stored.job.phase, stored.wish) == (phase, job_pb2.JOB_PHASE_CANCELLED)
    assert desired_state.cancel_or_suspend(stored, job_pb2.JOB_PHASE_SUSPENDED)
    assert stored.job.phase == job_pb2.JOB_PHASE_CANCELLED


def test_a_suspended_job_is_cancelled_when_its_attempt_ends() -> None:
    stored = records_pb2.StoredJob(wish=job_pb2.JOB_PHASE_CANCELLED)
    stored.job.phase = job_pb2.JOB_PHASE_SUSPENDED
    over = job_pb2.Attempt(number=1, state=job_pb2.ATTEMPT_STATE_STOPPED)
    assert apply_attempt(stored, over)
    assert stored.job.phase == job_pb2.JOB_PHASE_CANCELLED


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("array", [False, True])
async def test_a_new_leader_does_not_end_running_jobs(mesh: Mesh, suspends: bool, array: bool) -> None:
    """Otherwise a caller is told that a running job has ended, and its dependents would run beside it."""
    agent = await mesh.agent("n1", gpus=1)
    index = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=1)])
    array_id = await mesh.submit_array(array=index) if array else ""
    job_id, waits = (f"{array_id}_0", f"{array_id}_1") if array else [await mesh.submit() for _ in range(2)]
    await mesh.reach(job_id, "RUNNING")
    await mesh.kill("placement")
    await mesh.restart("queue")
    if array and suspends:
        await mesh.arrays.SuspendArray(array_pb.SuspendArrayRequest(id=array_id))
    elif array:
        await mesh.arrays.CancelArray(array_pb.CancelArrayRequest(id=array_id))
    for one in () if array else (job_id, waits):
        if suspends:
            await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=one))
        else:
            await mesh.jobs.CancelJob(pb.CancelJobRequest(id=one))
    over = job_pb2.JOB_PHASE_SUSPENDED if suspends else job_pb2.JOB_PHASE_CANCELLED
    assert (await mesh.job(waits)).phase == over, "it holds nothing, by placement's own record"
    assert (await mesh.job(job_id)).phase == job_pb2.JOB_PHASE_QUEUED
    assert not agent.stops
    await mesh.start("placement")
    job = await mesh.reach(job_id, "SUSPENDED" if suspends else "CANCELLED")
    assert job.attempt.number == 1
    assert [stop.job_id for stop in agent.stops] == [job_id]


async def test_a_cancel_with_an_unknown_start_waits_for_the_attempt(mesh: Mesh) -> None:
    """Placement commits a start with a lost answer, while the job's owner cancels it."""
    await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    record = mesh.parts["queue"].service.state.records[job_id]
    record.stored.job.phase = job_pb2.JOB_PHASE_QUEUED  # as if no event had arrived
    cancelled: pb.CancelJobResponse = await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
    assert cancelled.job.phase == job_pb2.JOB_PHASE_QUEUED
    assert [kind_of(event) for event in record.stored.events][-1] == "cancel_requested"
