"""Reads: pages, filters, watches, refusals, output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.services.mesh import Mesh, eventually, reason, running, spec, until

from cotenant.codec.job_events import kind_of
from cotenant.codec.specs import seconds
from cotenant.services.queue.api.server import QueueConfig
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with running() as mesh:
        yield mesh


async def listed(mesh: Mesh, **conditions: Any) -> list[str]:
    response = await mesh.jobs.ListJobs(pb.ListJobsRequest(filter=pb.JobFilter(**conditions)))
    return [job.id for job in response.jobs]


async def test_pages_contain_every_job_once_newest_first(mesh: Mesh) -> None:
    ids = [await mesh.submit() for _ in range(7)]
    seen: list[str] = []
    token = ""
    while True:
        page = await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=3, page_token=token))
        seen += [job.id for job in page.jobs]
        token = page.next_page_token
        assert page.total_size == 7 + (len(seen) > 3)
        if len(seen) == 3:
            await mesh.submit()  # a job submitted in between is newer than the rest of the list
        if not token:
            break
    assert seen == ids[::-1]


async def test_a_token_belongs_to_its_filter(mesh: Mesh) -> None:
    for _ in range(3):
        await mesh.submit()
    page = await mesh.jobs.ListJobs(pb.ListJobsRequest(page_size=1))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await mesh.jobs.ListJobs(pb.ListJobsRequest(page_token=page.next_page_token, filter=pb.JobFilter(name="x")))
    assert reason(refused.value) == "INVALID_ARGUMENT"


async def test_filter_conditions_are_combined(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    first = await mesh.submit(name="a", labels={"k": "1", "l": "2"}, tenant="t")
    await mesh.reach(first, "RUNNING")
    second = await mesh.submit(name="b", labels={"k": "1"})
    assert await listed(mesh, labels={"k": "1"}) == [second, first]
    assert await listed(mesh, labels={"k": "1", "l": "2"}) == [first]
    assert await listed(mesh, phases=[job_pb2.JOB_PHASE_QUEUED]) == [second]
    assert await listed(mesh, tenant="t", name="b") == []
    assert await listed(mesh, node_id="n1") == [first]
    assert await listed(mesh, ids=[second, "nobody"]) == [second]


async def test_a_watch_yields_the_present_state_then_changes(mesh: Mesh) -> None:
    first = await mesh.submit()
    watch = mesh.jobs.WatchJobs(pb.WatchJobsRequest())
    told = aiter(watch)
    begun = await anext(told)
    assert ([job.id for job in begun.jobs], begun.synced) == ([first], True)
    second = await mesh.submit()
    while second not in [job.id for job in (await anext(told)).jobs]:
        pass
    watch.cancel()


async def test_a_watch_until_the_end_ends(mesh: Mesh) -> None:
    await mesh.agent("n1", run_seconds=0.05)
    ids = [await mesh.submit() for _ in range(3)]
    last: dict[str, int] = {}
    async for response in mesh.jobs.WatchJobs(pb.WatchJobsRequest(until_ended=True)):
        last |= {job.id: job.phase for job in response.jobs}
    assert last == dict.fromkeys(ids, job_pb2.JOB_PHASE_SUCCEEDED)


async def test_a_watch_until_the_end_ends_although_jobs_no_longer_match(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    running_jobs = pb.JobFilter(phases=[job_pb2.JOB_PHASE_RUNNING])
    phases = []
    async with asyncio.timeout(60):
        async for response in mesh.jobs.WatchJobs(pb.WatchJobsRequest(filter=running_jobs, until_ended=True)):
            phases += [job.phase for job in response.jobs]
            if response.synced:
                agent.finish((job_id, 1))
    assert phases[-1] == job_pb2.JOB_PHASE_SUCCEEDED


async def test_a_slow_watcher_gets_the_latest_state_and_delays_no_other(mesh: Mesh) -> None:
    watchers = mesh.parts["queue"].service.state._watchers
    before = {*watchers}
    watch = mesh.jobs.WatchJobs(pb.WatchJobsRequest())
    told = aiter(watch)
    assert (await anext(told)).synced
    (watcher,) = watchers.keys() - before
    await mesh.agent("n1", run_seconds=0.0)
    ids = {await mesh.submit() for _ in range(100)}
    await mesh.all_ended()
    assert len(watcher.changed) <= len(ids)
    last: dict[str, int] = {}
    while any(last.get(job_id) != job_pb2.JOB_PHASE_SUCCEEDED for job_id in ids):
        last |= {job.id: job.phase for job in (await anext(told)).jobs}
    watch.cancel()


async def test_deleted_jobs_end_their_watches() -> None:
    async with running(queue_config=QueueConfig(ended_kept_max=1)) as mesh:
        await mesh.agent("n1", run_seconds=0.0)
        ids = [await mesh.submit() for _ in range(3)]
        await mesh.all_ended()
        queue = mesh.parts["queue"].service
        await queue.job_store.purge(ids[:2])
        assert await listed(mesh) == ids[2:]
        await eventually(lambda: left(mesh, "placement/attempts/", 0))
        assert len(await mesh.records_left("queue/jobs/")) == 1
        assert len(await mesh.records_left("queue/requests/")) == 1


async def left(mesh: Mesh, prefix: str, count: int) -> bool:
    return len(await mesh.records_left(prefix)) == count


# Reasons -----------------------------------------------------------------------------------------------------


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    response: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return response


async def test_the_remaining_time_in_an_explanation_shrinks(mesh: Mesh) -> None:
    waiting = await mesh.submit(gpus=2, expected_duration=Duration(seconds=600))
    await mesh.refused(waiting, "NO_NODES")
    told = (await explained(mesh, waiting)).estimate
    assert (told.predictable, told.remaining.seconds) == (True, 600)
    assert told.source == "history: its user expects 600 s in total"
    await mesh.agent("n1", gpus=2, cores=6)
    job = await mesh.reach(waiting, "RUNNING")
    left = (await explained(mesh, waiting)).estimate.remaining.ToTimedelta().total_seconds()
    assert 600 - (time.time() - seconds(job.attempt.start_time)) <= left < 600
    mesh.agents["n1"].finish((waiting, 1))
    ended = await mesh.reach(waiting, "SUCCEEDED")
    assert (ended.predicted_run_time.seconds, ended.prediction_source) == (600, "history")


async def test_each_phase_is_explained(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=2, cores=6)
    first = await mesh.submit(gpus=2)
    await mesh.reach(first, "RUNNING")
    told = await explained(mesh, first)
    assert told.summary.startswith("running on n1, attempt 1")
    assert "share of a node's cores" in told.sizing
    second = await mesh.submit(gpus=2)
    third = await mesh.submit(gpus=1)
    await mesh.refused(third, "CAPACITY")
    told = await explained(mesh, second)
    assert (told.position, told.waiting, told.queue_policy) == (1, 2, "fifo")
    assert "needs 2 GPUs, 0 of 2 free" in told.summary
    agent.refuses_to_stop = True
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=first))
    await mesh.reach(first, "STOPPING")
    assert (await explained(mesh, first)).summary == "is stopping on n1 because it was cancelled"
    agent.end((first, 1), job_pb2.ATTEMPT_STATE_STOPPED)
    await mesh.reach(first, "CANCELLED")
    assert (await explained(mesh, first)).summary == "cancelled"
    await mesh.jobs.SuspendJob(pb.SuspendJobRequest(id=third))
    assert "suspended by its owner" in (await explained(mesh, third)).summary
    await mesh.reach(second, "RUNNING")
    agent.finish((second, 1), code=3)
    job = await mesh.reach(second, "FAILED")
    assert (await explained(mesh, second)).summary == "failed: exited with status 3 (rank 0 on n1)"
    assert [kind_of(event) for event in (await explained(mesh, second)).events] == [
        "queued",
        "assigned",
        "running",
        "failed",
    ]
    assert job.failures == 1


async def test_jobs_behind_the_head_of_a_strict_queue_keep_their_refusal_time() -> None:
    async with running(queue_config=QueueConfig()) as mesh:
        await mesh.agent("n1", gpus=2)
        await mesh.reach(await mesh.submit(gpus=2), "RUNNING")
        head = await mesh.submit(gpus=2)
        behind = await mesh.refused(await mesh.submit(gpus=1), "BEHIND")
        assert head in behind.refusal.detail
        assert (await mesh.job(head)).refusal.code == "CAPACITY"
        later = await mesh.submit(gpus=1)
        await mesh.refused(later, "BEHIND")
        assert (await mesh.job(behind.id)).refusal.since == behind.refusal.since


async def test_a_refusal_is_replaced_by_that_of_the_next_cycle(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=2)
    await mesh.agent("n2", gpus=2)
    await mesh.reach(await mesh.submit(gpus=1), "RUNNING")
    waiting = await mesh.refused(await mesh.submit(gpus=2, replicas=2), "CAPACITY")
    assert "3 of 4 free" in waiting.refusal.detail
    await mesh.reach(await mesh.submit(gpus=1), "RUNNING")
    await eventually(lambda: _says(mesh, waiting.id, "2 of 4 free"))


async def _says(mesh: Mesh, job_id: str, text: str) -> bool:
    return text in (await mesh.job(job_id)).refusal.detail


# What if -----------------------------------------------------------------------------------------------------


async def state_of(mesh: Mesh) -> tuple[Any, ...]:
    service = mesh.parts["placement"].service
    ledger = service.cluster.ledger
    books = [(sorted(node.book.free_cores), dict(node.book.free_milli)) for node in service.cluster.nodes.values()]
    entries = (await mesh.store.list("")).entries
    return ledger.free_gpus.tolist(), ledger.free_cores.tolist(), books, sorted(service.cluster.attempts), entries


async def test_what_if_returns_the_placement_and_leaves_no_trace(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=4, cores=12)
    await mesh.reach(await mesh.submit(gpus=1), "RUNNING")
    before = await state_of(mesh)
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=3)))
    assert answer.starts_now
    assert [part.node_id for part in answer.allocations] == ["n1"]
    assert len(answer.allocations[0].tasks[0].gpus) == 3
    assert answer.position == 1
    assert await state_of(mesh) == before
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=4)))
    assert not answer.starts_now
    assert answer.refusal.code == "CAPACITY"
    assert await state_of(mesh) == before


async def test_what_if_accounts_for_jobs_ahead_only(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=4, cores=12)
    await mesh.reach(await mesh.submit(gpus=3), "RUNNING")
    await mesh.refused(await mesh.submit(gpus=2), "CAPACITY")
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1)))
    assert (answer.starts_now, answer.position) == (True, 2)
    answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(gpus=1, priority=5)))
    assert (answer.starts_now, answer.position) == (True, 1)


# Output ------------------------------------------------------------------------------------------------------


async def read(mesh: Mesh, job_id: str, **fields: Any) -> bytes:
    data = b""
    async for piece in mesh.jobs.ReadLogs(pb.ReadLogsRequest(id=job_id, **fields)):
        data += piece.data
    return data


async def test_output_is_relayed(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.output[job_id] = b"hello, world"
    assert await read(mesh, job_id) == b"hello, world"
    assert await read(mesh, job_id, rank=0, tail_bytes=5) == b"hello, world"
    assert (agent.reads[-1].rank, agent.reads[-1].tail_bytes) == (0, 5)
    agent.finish((job_id, 1))
    await mesh.reach(job_id, "SUCCEEDED")
    assert await read(mesh, job_id, follow=True) == b"hello, world"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(mesh, job_id, attempt=7)
    assert reason(refused.value) == "ATTEMPT_NOT_FOUND"


async def test_reading_missing_output_ends_at_once(mesh: Mesh) -> None:
    agent = await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(mesh, job_id)
    assert reason(refused.value) == "NO_OUTPUT"
    waiting = await mesh.submit()
    assert await read(mesh, waiting) == b""
    await agent.stop()
    await eventually(lambda: away(mesh))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(mesh, job_id)
    assert reason(refused.value) == "NODE_AWAY"


async def away(mesh: Mesh) -> bool:
    return not mesh.parts["placement"].service.cluster.nodes["n1"].connected


async def test_reading_output_ends_if_the_agent_disconnects(mesh: Mesh) -> None:
    agent = await mesh.agent("n1")
    job_id = await mesh.submit()
    await mesh.reach(job_id, "RUNNING")
    agent.answers_reads = False
    reading = asyncio.create_task(read(mesh, job_id, follow=True))
    await until(lambda: bool(agent.reads))
    await agent.stop()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reading
    assert reason(refused.value) == "NODE_AWAY"


async def test_following_output_waits_for_the_first_attempt_and_continues_with_the_next(mesh: Mesh) -> None:
    job_id = await mesh.submit(retries_max=1)
    reading = asyncio.create_task(read(mesh, job_id, follow=True))
    agent = await mesh.agent("n1", output={job_id: b"one "})  # it may be read at once
    await until(lambda: bool(agent.reads))
    agent.finish((job_id, 1), code=1)
    await mesh.reach(job_id, "RUNNING", lambda job: job.attempt.number == 2)
    await until(lambda: len(agent.reads) == 2)
    agent.finish((job_id, 2))
    assert await reading == b"one one "
