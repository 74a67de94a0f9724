"""Attempt states determine job phases: gangs, retries, preemption, losses, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from tests.unit.services.mesh import LAS, Mesh, eventually, running, spec, until

from cotenant.codec.job_events import kind_of
from cotenant.core.failures.retry import RetryRules
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.internal.v1.attempt_pb2 import AttemptEvidence
from cotenant.services.queue.jobs import desired_state, transitions
from cotenant.storage.v1 import records_pb2
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


# Gangs -------------------------------------------------------------------------------------------------------


async def test_a_gang_starts_on_several_nodes_or_not_at_all(mesh: Mesh) -> None:
    gang = await mesh.submit(gpus=2, replicas=2)
    one = await mesh.agent("n1", gpus=2, cores=8)
    await mesh.refused(gang, "NEVER_FITS")
    assert not one.assignments
    two = await mesh.agent("n2", gpus=2, cores=8)
    job = await mesh.reach(gang, "RUNNING")
    assert sorted(part.node_id for part in job.attempt.allocations) == ["n1", "n2"]
    (first,), (second,) = one.assignments.values(), two.assignments.values()
    assert (first.world_size, second.world_size) == (2, 2)
    assert {first.node_rank, second.node_rank} == {0, 1}
    assert first.master_address == second.master_address == job.attempt.allocations[0].node_id
    assert first.epoch == second.epoch == job.attempt.epoch


async def gang_of_two(mesh: Mesh, **fields: int) -> str:
    for node_id in ("n1", "n2"):
        await mesh.agent(node_id, gpus=2, cores=8)
    job_id = await mesh.submit(gpus=2, replicas=2, **fields)
    await mesh.reach(job_id, "RUNNING")
    return job_id


async def test_a_failed_replica_stops_its_gang(mesh: Mesh) -> None:
    gang = await gang_of_two(mesh)
    mesh.agents["n2"].refuses_to_stop = True
    mesh.agents["n1"].finish((gang, 1), code=9)
    await mesh.reach(gang, "STOPPING")
    (order,) = mesh.agents["n2"].stops
    assert order.reason == job_pb2.STOP_REASON_GANG_BROKEN
    assert not mesh.agents["n1"].stops
    used = (await mesh.node("n1")).used_gpu_milli
    assert used == 2000  # nothing is reused before the whole gang has stopped
    mesh.agents["n2"].end((gang, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    job = await mesh.reach(gang, "FAILED")
    assert (job.attempt.exit.code, job.attempt.exit.node_id) == (9, "n1")
    assert job.attempt.state == job_pb2.ATTEMPT_STATE_FAILED


async def test_a_gang_succeeds_once_all_replicas_have(mesh: Mesh) -> None:
    gang = await gang_of_two(mesh)
    mesh.agents["n1"].finish((gang, 1))
    await until(lambda: mesh.parts["placement"].service.cluster.attempts[gang].ended_on("n1"))
    assert (await mesh.job(gang)).phase == job_pb2.JOB_PHASE_RUNNING
    await mesh.restart("placement")  # the agents report again which parts had ended
    mesh.agents["n2"].finish((gang, 1))
    await mesh.reach(gang, "SUCCEEDED")


async def test_an_ended_part_stays_ended_despite_later_reports(mesh: Mesh) -> None:
    gang = await gang_of_two(mesh)
    one, live = mesh.agents["n1"], mesh.parts["placement"].service.cluster.attempts[gang]
    one.finish((gang, 1))
    one.report((gang, 1), job_pb2.ATTEMPT_STATE_RUNNING)
    one.report((gang, 1), job_pb2.ATTEMPT_STATE_FAILED, 1)
    await until(lambda: live.ended_on("n1"))
    mesh.agents["n2"].finish((gang, 1))
    await mesh.reach(gang, "SUCCEEDED")


async def test_a_gang_that_loses_a_node_holds_the_rest_until_it_stops(mesh: Mesh) -> None:
    gang = await gang_of_two(mesh)
    one, two = mesh.agents["n1"], mesh.agents["n2"]
    two.refuses_to_stop = True
    await one.stop()
    one.forget()
    one.start()
    await mesh.reach(gang, "STOPPING")
    assert (await mesh.node("n2")).used_gpu_milli == 2000
    two.end((gang, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    job = await mesh.reach(gang, "RUNNING", lambda job: job.attempt.number == 2)
    assert job.past_attempts[0].state == job_pb2.ATTEMPT_STATE_LOST
    assert "n1 no longer has it" in job.past_attempts[0].message
    assert job.failures == 0


# Failures ----------------------------------------------------------------------------------------------------


async def test_failures_are_retried_with_growing_back_off(mesh: Mesh) -> None:
    mesh.parts["queue"].service.attempt_watcher.failure_classifier.retrying = RetryRules(untold_back_off_seconds=0.05)
    agent = await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=2)
    for number in (1, 2, 3):
        await mesh.reach(job_id, "RUNNING", lambda job, number=number: job.attempt.number == number)  # type: ignore[misc]  # bound now
        agent.finish((job_id, number), code=number)
    job = await mesh.reach(job_id, "FAILED")
    assert job.failures == 3
    assert [past.exit.code for past in job.past_attempts] == [1, 2]
    story = (await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))).events
    waits = [event.detail for event in story if kind_of(event) == "requeued"]
    assert ["0.05 s" in waits[0], "0.1 s" in waits[1]] == [True, True]


async def test_a_back_off_survives_a_queue_restart(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit(retries_max=1)
    await mesh.reach(job_id, "RUNNING")
    agent.finish((job_id, 1), code=1)
    job = await mesh.refused(job_id, "BACK_OFF")
    assert "exited with status 1" in job.refusal.detail
    await mesh.restart("queue")
    await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)


def test_the_record_of_a_large_gang_with_many_attempts_stays_small() -> None:
    stored = records_pb2.StoredJob()
    stored.job.phase = job_pb2.JOB_PHASE_QUEUED
    stored.job.spec.retries_max = 1000
    for number in range(1, 30):
        attempt = job_pb2.Attempt(job_id="a", number=number, epoch=number, state=job_pb2.ATTEMPT_STATE_FAILED)
        part = attempt.allocations.add(node_id="n1")
        for rank in range(1000):
            part.tasks.add(role="worker", rank=rank, core_ids=range(8), cpu_ids=range(16))
        assert transitions.apply_attempt(stored, attempt)
    assert stored.ByteSize() < 512 * 1024
    assert stored.job.past_attempts[-1].number == 28


# Preemption --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tenant", "whom"), [("default", "(small)"), ("other", "(of another tenant)")])
async def test_a_new_job_preempts_a_job_with_more_attained_service(tenant: str, whom: str) -> None:
    async with running(queue_config=LAS) as mesh:
        agent = await mesh.agent("n1", gpus=2, cores=8)
        old = await mesh.submit(gpus=2, retries_max=0)
        await mesh.reach(old, "RUNNING")
        await eventually(lambda: attained(mesh, old, 0.06))
        agent.refuses_to_stop = True
        new = await mesh.submit(gpus=1, tenant=tenant, name="small")
        refused = await mesh.refused(new, "MAKING_ROOM")
        assert "1 job with a lower rank" in refused.refusal.detail or "already stopping" in refused.refusal.detail
        assert agent.stops[0].reason == job_pb2.STOP_REASON_PREEMPTED
        assert (await mesh.job(old)).phase == job_pb2.JOB_PHASE_STOPPING
        agent.end((old, 1), job_pb2.ATTEMPT_STATE_STOPPED)
        await mesh.reach(new, "RUNNING")
        job = await mesh.job(old)
        assert job.phase == job_pb2.JOB_PHASE_QUEUED
        assert job.phase_reason == f"preempted: made room for {new} {whom}"
        assert (job.preemptions, job.failures) == (1, 0)
        assert job.attained_gpu_seconds >= 0.06
        assert len(agent.stops) == 1
        agent.refuses_to_stop = False
        agent.finish((new, 1))
        again = await mesh.reach(old, "RUNNING")
        assert again.attempt.number == 2
        assert again.attained_gpu_seconds >= job.attained_gpu_seconds


async def attained(mesh: Mesh, job_id: str, seconds: float) -> bool:
    return (await mesh.job(job_id)).attained_gpu_seconds > seconds


async def test_a_non_preemptible_job_is_not_preempted() -> None:
    async with running(queue_config=LAS) as mesh:
        agent = await mesh.agent("n1", gpus=1)
        old = await mesh.submit(preemptible=False)
        await mesh.reach(old, "RUNNING")
        await eventually(lambda: attained(mesh, old, 0.06))
        new = await mesh.submit()
        await mesh.refused(new, "OUTRANKED")
        assert not agent.stops
        answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1)))
        assert (answer.starts_now, answer.refusal.code) == (False, "OUTRANKED")


async def test_what_if_names_the_victims() -> None:
    async with running(queue_config=LAS) as mesh:
        agent = await mesh.agent("n1", gpus=1)
        old = await mesh.submit()
        await mesh.reach(old, "RUNNING")
        await eventually(lambda: attained(mesh, old, 0.06))
        answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1)))
        assert list(answer.preempted_job_ids) == [old]
        assert answer.refusal.code == "MAKING_ROOM"
        assert not agent.stops


# Restarts and races ------------------------------------------------------------------------------------------


async def test_running_jobs_survive_all_restarts(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    ids = [await mesh.submit() for _ in range(3)]
    for job_id in ids:
        await mesh.reach(job_id, "RUNNING")
    for names in (("queue",), ("placement",), ("placement", "queue"), ("queue", "placement")):
        await mesh.restart(*names)
        for job_id in ids:
            job = await mesh.reach(job_id, "RUNNING")
            assert job.attempt.number == 1
            assert job.attempt.HasField("start_time")
    assert not agent.stops
    assert len(agent.assignments) == 3
    for job_id in ids:
        agent.finish((job_id, 1))
        await mesh.reach(job_id, "SUCCEEDED")


async def test_an_attempt_assigned_to_a_disconnected_agent_starts_on_reconnect(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    placement = mesh.parts["placement"]
    placement.store.held_back = asyncio.Event()
    job_id = await mesh.submit()
    await until(lambda: job_id in placement.service.cluster.attempts)
    await agent.stop()
    placement.store.held_back.set()
    placement.store.held_back = None
    await mesh.reach(job_id, "STARTING")
    await mesh.restart("placement")
    assert not agent.assignments
    agent.start()
    job = await mesh.reach(job_id, "RUNNING")
    assert job.attempt.number == 1
    assert agent.assignments[job_id, 1].epoch == job.attempt.epoch


async def test_a_plan_completes_although_the_queue_dies(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    placement = mesh.parts["placement"]
    placement.store.held_back = asyncio.Event()
    job_id = await mesh.submit()
    await until(lambda: job_id in placement.service.cluster.attempts)
    await mesh.kill("queue")
    placement.store.held_back.set()
    placement.store.held_back = None
    await until(lambda: (job_id, 1) in agent.assignments)
    await mesh.start("queue")
    assert (await mesh.reach(job_id, "RUNNING")).attempt.number == 1


async def test_stale_attempt_events_are_ignored(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit()
    job = await mesh.reach(job_id, "RUNNING")
    attempt_watcher = mesh.parts["queue"].service.attempt_watcher
    stale = job_pb2.Attempt()
    stale.CopyFrom(job.attempt)
    stale.state = job_pb2.ATTEMPT_STATE_ASSIGNED
    stale.ClearField("start_time")
    attempt_watcher.apply_attempt(stale, AttemptEvidence())
    again = await mesh.job(job_id)
    assert again.attempt == job.attempt
    assert again.run_time.seconds < 60


def test_attempts_placed_by_another_queue_are_ignored() -> None:
    """A replaced queue, which cannot know that it was, receives the next attempt before it committed the end of one."""
    stored = records_pb2.StoredJob()
    stored.job.phase = job_pb2.JOB_PHASE_QUEUED
    assert transitions.apply_attempt(stored, job_pb2.Attempt(job_id="a", number=1, state=job_pb2.ATTEMPT_STATE_RUNNING))
    before = stored.SerializeToString()
    for state in (job_pb2.ATTEMPT_STATE_ASSIGNED, job_pb2.ATTEMPT_STATE_RUNNING, job_pb2.ATTEMPT_STATE_STOPPING):
        assert not transitions.apply_attempt(stored, job_pb2.Attempt(job_id="a", number=2, state=state))
    assert stored.SerializeToString() == before


async def test_a_job_is_not_placed_while_the_end_of_its_attempt_is_committed(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    first, second = [await mesh.submit(name=name) for name in ("first", "second")]
    await mesh.reach(first, "RUNNING")
    changed = job_pb2.Job(id=first, spec=job_pb2.JobSpec(priority=1))
    await mesh.jobs.UpdateJob(pb.UpdateJobRequest(job=changed, update_mask=FieldMask(paths=["spec.priority"])))
    await mesh.kill("queue")
    agent.finish((first, 1))
    await until(lambda: (first, 1) in agent.acked)
    await mesh.start("queue")
    mesh.parts["queue"].store.held_back = kept = asyncio.Event()
    await until(lambda: not {(first, 2), (second, 1)}.isdisjoint(agent.assignments))
    assert (first, 2) not in agent.assignments
    kept.set()
    assert (await mesh.reach(first, "SUCCEEDED")).attempt.number == 1


@pytest.mark.parametrize("turns", range(5))
async def test_scheduling_stops_despite_a_concurrent_event(mesh: Mesh, turns: int) -> None:
    scheduler, begun = mesh.parts["queue"].service.scheduler, asyncio.Event()

    async def cycle() -> float:
        begun.set()
        return 100.0

    scheduler.cycle = cycle
    task = asyncio.create_task(scheduler.run())
    scheduler.wake()
    await begun.wait()
    scheduler.wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done


async def test_a_resize_is_applied_and_stale_events_are_not(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job = await mesh.reach(await mesh.submit(cores=4), "RUNNING")
    state = mesh.parts["queue"].service.state
    record, resized = state.records[job.id], job_pb2.Attempt()
    resized.CopyFrom(record.job.attempt)
    del resized.allocations[0].tasks[0].core_ids[2:]
    resized.resize_time.GetCurrentTime()
    for epoch, cores in ((resized.epoch + 5, 2), (resized.epoch + 1, 2)):
        resized.epoch = epoch
        mesh.parts["queue"].service.attempt_watcher.apply_attempt(resized, AttemptEvidence())
        held = transitions.held_by(record).cores
        assert (held, state.table.jobs(0.0).cores[0], record.job.attempt.epoch) == (cores, cores, job.attempt.epoch + 5)
        resized.allocations[0].tasks[0].core_ids.append(7)
    assert [event.detail for event in record.stored.events if kind_of(event) == "resized"] == [
        "from 4 cores to 2: as requested"
    ]


async def test_an_attempt_newer_than_the_snapshot_is_not_lost(mesh: Mesh) -> None:
    await mesh.agent("n1")
    job_id = await mesh.submit()
    job = await mesh.reach(job_id, "RUNNING")
    attempt_watcher = mesh.parts["queue"].service.attempt_watcher
    await attempt_watcher._handle_event(placement_pb2.WatchAttemptsResponse(snapshot=True, revision=job.attempt.epoch))
    assert (await mesh.job(job_id)).phase == job_pb2.JOB_PHASE_RUNNING
    await attempt_watcher._handle_event(
        placement_pb2.WatchAttemptsResponse(snapshot=True, revision=job.attempt.epoch + 1)
    )
    await mesh.reach(job_id, "QUEUED", lambda job: "no longer knows" in job.phase_reason)


@pytest.mark.parametrize("over", ["CANCELLED", "SUSPENDED"])
async def test_a_wish_takes_effect_once_placement_has_no_attempt(mesh: Mesh, over: str) -> None:
    """As when another queue has committed the end of its attempt before this one received it."""
    queue, job_id = mesh.parts["queue"].service, await mesh.submit()
    record, wish = queue.state.records[job_id], job_pb2.JobPhase.Value(f"JOB_PHASE_{over}")
    await queue.job_store.change(record, lambda stored: desired_state.set_wish(stored, wish))
    await queue.attempt_watcher._handle_event(placement_pb2.WatchAttemptsResponse(snapshot=True, revision=1))
    await mesh.reach(job_id, over)


async def test_undecodable_events_end_nothing(mesh: Mesh) -> None:
    await mesh.agent("n1", run_seconds=0.05)
    attempt_watcher = mesh.parts["queue"].service.attempt_watcher
    take, broken = attempt_watcher._handle_event, list[placement_pb2.WatchAttemptsResponse]()

    async def take_once_broken(event: placement_pb2.WatchAttemptsResponse) -> None:
        if event.attempts and not broken:
            broken.append(event)
            raise ValueError("what is this?")
        await take(event)

    attempt_watcher._handle_event = take_once_broken
    job_id = await mesh.submit()
    await mesh.reach(job_id, "SUCCEEDED")
    assert broken


async def test_a_stale_capacity_answer_hides_no_node() -> None:
    """Otherwise nothing would be tried until the set of nodes changes again."""
    async with running(queue_config=LAS) as mesh:
        await mesh.agent("n1")
        scheduler, node = mesh.parts["queue"].service.scheduler, {"id": "n1"}
        plan = scheduler.placement.PlanPlacement
        await until(lambda: scheduler.state.capacity.gpu_milli > 0)

        async def slow(*call: Any, **options: Any) -> Any:
            await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(**node))
            await until(lambda: scheduler.state.capacity.gpu_milli == 0)
            response = await plan(*call, **options)
            assert [one.refusal.code for one in response.refused] == ["NO_NODES"]
            scheduler.placement.PlanPlacement = plan
            await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(**node))
            await until(lambda: scheduler.state.capacity.gpu_milli > 0)
            return response

        scheduler.placement.PlanPlacement = slow
        await mesh.reach(await mesh.submit(), "RUNNING")


async def test_a_late_capacity_answer_hides_no_node() -> None:
    """Two requests may be under way when a leader of placement is new, and their answers may change places."""
    async with running(queue_config=LAS) as mesh:
        await mesh.agent("n1")
        attempt_watcher, node = mesh.parts["queue"].service.attempt_watcher, {"id": "n1"}
        state, ask = mesh.parts["queue"].service.state, attempt_watcher.placement.GetCapacity
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(**node))
        await until(lambda: state.capacity.gpu_milli == 0)
        asked, released = asyncio.Event(), asyncio.Event()

        async def slow(request: placement_pb2.GetCapacityRequest) -> placement_pb2.GetCapacityResponse:
            attempt_watcher.placement.GetCapacity = ask
            response: placement_pb2.GetCapacityResponse = await ask(request)
            asked.set()
            await released.wait()
            return response

        attempt_watcher.placement.GetCapacity = slow
        late = asyncio.create_task(attempt_watcher._refresh_capacity())
        await asked.wait()
        await mesh.nodes.UncordonNode(node_pb2.UncordonNodeRequest(**node))
        await until(lambda: state.capacity.gpu_milli > 0)
        released.set()
        await late
        assert state.capacity.gpu_milli > 0
