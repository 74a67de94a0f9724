"""A follower serves ended jobs as the leader does, and forwards everything else."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import pytest
from google.protobuf.message import Message
from tests.unit.services.mesh import Mesh, running, until

from cotenant.leadership.replica import REVISION
from cotenant.leadership.store_cache import StoreCache
from cotenant.security.identity import Identity, set_caller
from cotenant.security.permissions import Role
from cotenant.services.queue.api.follower_reads import QueueReader
from cotenant.services.queue.api.server import JobQueue
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.queue_replica import QueueReplica
from cotenant.store.port import NotLeader
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import node_service_pb2 as node_pb2

SERVICE = "/cotenant.v1.JobService/"


class Trailers:
    """The part of a call's context that is used."""

    told: dict[str, str]

    def set_trailing_metadata(self, trailers: Any) -> None:
        self.told = dict(trailers)


async def ask(reader: QueueReader, method: str, request: Message, answer: type[Any]) -> Any:
    context = Trailers()
    told = await reader.answer(SERVICE + method, request.SerializeToString(), context)
    assert told is None or int(context.told[REVISION]) > 1
    return None if told is None else answer.FromString(told)


async def followed(mesh: Mesh, check: Callable[[QueueReader], Any]) -> None:
    reader = QueueReader()
    cache = StoreCache(mesh.store, "queue/", lambda keys: reader.take(cache, keys))
    tasks = [asyncio.create_task(cache.run()), asyncio.create_task(reader.run())]
    last = (await mesh.store.list("queue/")).entries
    await until(lambda: cache.revision >= max(entry.mod_revision for entry in last) and not reader._pending)
    await check(reader)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_follower_serves_ended_jobs_as_the_leader_does() -> None:
    async with running() as mesh:
        await mesh.agent("n1", run_seconds=0.01)
        ended = [await mesh.submit(name=f"ended {number}") for number in range(5)]
        for job_id in ended:
            await mesh.reach(job_id, "SUCCEEDED")
        await mesh.nodes.CordonNode(node_pb2.CordonNodeRequest(id="n1"))
        waiting = await mesh.submit(name="waits")
        cancelled = await mesh.submit(name="cancelled")
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=cancelled))

        async def check(reader: QueueReader) -> None:
            for job_id in (*ended, cancelled):
                asked = pb.GetJobRequest(id=job_id)
                basic = pb.GetJobRequest(id=job_id, view=pb.JOB_VIEW_BASIC)
                assert await ask(reader, "GetJob", basic, pb.GetJobResponse) == await mesh.jobs.GetJob(basic)
                assert await ask(reader, "GetJob", asked, pb.GetJobResponse) == await mesh.jobs.GetJob(asked)
            assert await ask(reader, "GetJob", pb.GetJobRequest(id=waiting), pb.GetJobResponse) is None
            assert await ask(reader, "GetJob", pb.GetJobRequest(id="nobody"), pb.GetJobResponse) is None
            phases = [job_pb2.JOB_PHASE_SUCCEEDED, job_pb2.JOB_PHASE_CANCELLED]
            for order, view in (("", pb.JOB_VIEW_BASIC), ("name, end_time desc", pb.JOB_VIEW_FULL)):
                listing = pb.ListJobsRequest(filter=pb.JobFilter(phases=phases), page_size=4, order_by=order, view=view)
                while True:
                    told = await ask(reader, "ListJobs", listing, pb.ListJobsResponse)
                    assert told == await mesh.jobs.ListJobs(listing)
                    assert told.total_size == 6
                    assert [bool(job.spec.command) for job in told.jobs] == [bool(order)] * len(told.jobs)
                    if not told.next_page_token:
                        break
                    listing.page_token = told.next_page_token
            for lives in ([], [job_pb2.JOB_PHASE_QUEUED], [*phases, job_pb2.JOB_PHASE_RUNNING], [99]):
                asked_of = pb.ListJobsRequest(filter=pb.JobFilter(phases=lives))  # type: ignore[arg-type]  # 99 is none
                assert await ask(reader, "ListJobs", asked_of, pb.ListJobsResponse) is None
            failures = pb.SummarizeFailuresRequest()
            told = await ask(reader, "SummarizeFailures", failures, pb.SummarizeFailuresResponse)
            assert told == await mesh.jobs.SummarizeFailures(failures)
            some = Identity("eve", frozenset({Role.VIEWER}), frozenset({"lab"}))
            told = contextvars.copy_context()
            told.run(set_caller, some)
            asked = pb.GetJobRequest(id=cancelled)
            hidden = asyncio.create_task(ask(reader, "GetJob", asked, pb.GetJobResponse), context=told)
            assert await hidden is None
            assert await reader.answer(SERVICE + "GetJob", b"\xff\xff", Trailers()) is None
            assert await reader.answer(SERVICE + "CreateJob", b"", Trailers()) is None

        await followed(mesh, check)


async def test_a_leader_started_from_follower_records_equals_a_fresh_one() -> None:
    async with running() as mesh:
        await mesh.agent("n1", run_seconds=0.01)
        rng = Random(7)
        for number in range(20):
            job_id = await mesh.submit(gpus=rng.choice([1, 8]), name=f"job {number}")
            if rng.random() < 0.3:
                await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))

        async def check(reader: QueueReader) -> None:
            changed = next(iter(reader.records))
            reader.records[changed].revision -= 1  # as if it had changed since
            read, known = State(), State()
            await JobStore(mesh.store, read).load()
            await JobStore(mesh.store, known).load(reader.records)
            assert known.ids == read.ids
            assert known.table.ids == read.table.ids
            for job_id in read.ids:
                assert known.records[job_id].stored == read.records[job_id].stored
                assert known.records[job_id].revision == read.records[job_id].revision
                assert (known.records[job_id] is reader.records[job_id]) == (job_id != changed)

        await mesh.kill("queue")
        await followed(mesh, check)


async def test_records_of_a_failed_leader_start_are_not_reused() -> None:
    async with running() as mesh:
        replicated = QueueReplica(mesh.queue_config, mesh.channel("placement"), mesh.channel("predictor"))
        records = replicated.read(lambda: None).records
        records["job"] = Mock()
        given: list[int] = []

        async def start(_: JobQueue, known: dict[str, Any]) -> None:
            given.append(len(known))
            raise NotLeader("another process leads now")

        with patch.object(JobQueue, "start", start):
            for _ in range(2):
                with pytest.raises(NotLeader):
                    await replicated.lead(Mock(), mesh.store, Mock(lease=None))
        assert given == [1, 0]
