"""Two replicas of a service on one store: the leader answers whichever is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.unit.leadership.test_election import TTL_SECONDS, until

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.agent.v1 import agent_service_pb2_grpc
from cotenant.codec import errors
from cotenant.leadership.election import Election
from cotenant.leadership.fenced_store import FencedStore, WarmStore
from cotenant.leadership.forwarding import ABANDON_SECONDS, PATIENCE_SECONDS
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.leadership.replica import Replica
from cotenant.rpc.channel import Channel, connect, forwarding_channel
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.server import Host, Server
from cotenant.security.audit import CALL, FORWARDED, Audit
from cotenant.security.identity import caller
from cotenant.security.server_security import Security
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put, Store, StoreUnavailable
from cotenant.v1 import job_pb2, job_service_pb2_grpc
from cotenant.v1 import job_service_pb2 as pb

JOB, AGENT = "cotenant.v1.JobService", "cotenant.agent.v1.AgentService"
TOKEN = "a-token-for-tests"
KEY = "svc/leader"


class Service(job_service_pb2_grpc.JobServiceServicer, agent_service_pb2_grpc.AgentServiceServicer):
    """Answers with its name, or does what the request's ID says."""

    def __init__(self, name: str, store: Store) -> None:
        self.name, self.store = name, store
        self.calls = 0
        self.entered = asyncio.Event()
        self.closed = False

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.GetJobResponse:
        self.calls += 1
        self.entered.set()
        match request.id:
            case "missing":
                raise errors.not_found("job", "missing")
            case "write":
                await self.store.transact([], [Put("svc/x", self.name.encode())])
            case "long":
                await asyncio.sleep(60)
            case "deadline":
                return pb.GetJobResponse(job=job_pb2.Job(id=f"{context.time_remaining():.0f}"))
        context.set_trailing_metadata((("told", self.name),))
        return pb.GetJobResponse(job=job_pb2.Job(id=self.name, submitter=caller().name))

    async def WatchJobs(self, request: pb.WatchJobsRequest, context: Any) -> AsyncIterator[pb.WatchJobsResponse]:
        yield pb.WatchJobsResponse(jobs=[job_pb2.Job(id=self.name)])
        if request.until_ended:
            raise errors.failed_precondition("TOLD", "that is all")
        await asyncio.sleep(60)

    async def Connect(self, requests: Any, context: Any) -> AsyncIterator[agent_pb2.ConnectResponse]:
        async for request in requests:
            yield agent_pb2.ConnectResponse(heard=request.beat + 1)

    async def UploadOutput(self, requests: Any, context: Any) -> agent_pb2.UploadOutputResponse:
        pieces = [one async for one in requests]
        raise errors.failed_precondition("PIECES", str(len(pieces)))

    async def close(self) -> None:
        self.closed = True


class Process:
    """A replica as a process would run it."""

    def __init__(
        self, name: str, store: Store, alone: bool, fails: list[Exception], ttl_seconds: float, log: Path | None
    ) -> None:
        self.name, self.store, self._fails = name, store, fails
        self.log = log / f"{name}.jsonl" if log else None
        audit = Audit(self.log, name, reads=True) if self.log else None
        self.server = Server("127.0.0.1:0", TOKEN, security=Security(audit=audit))
        self.address = f"127.0.0.1:{self.server.bind()}"
        self.election = Election(store, KEY, self.address, ttl_seconds=ttl_seconds, alone=alone)
        self.replica = Replica(self.server, store, self.election, (JOB, AGENT), "svc/", self._lead)
        self.services: list[Service] = []
        self.running: asyncio.Task[None] | None = None
        self.given: Store | None = None  # the store that it leads with
        self.channel: Channel = connect(self.address, TOKEN)
        self.jobs: Any = job_service_pb2_grpc.JobServiceStub(self.channel)
        self.agents: Any = agent_service_pb2_grpc.AgentServiceStub(self.channel)

    async def _lead(self, host: Host, store: Store, held: HeldTerm) -> Service:
        if self._fails:
            raise self._fails.pop()
        self.given = store
        service = Service(f"{self.name}{len(self.services) + 1}", FencedStore(store, held))  # type: ignore[abstract]  # the generated base answers the rest
        host.add(job_service_pb2_grpc.add_JobServiceServicer_to_server, service, JOB)
        host.add(agent_service_pb2_grpc.add_AgentServiceServicer_to_server, service, AGENT)
        self.services.append(service)
        return service

    async def start(self) -> None:
        await self.replica.start()
        await self.server.start()
        self.running = asyncio.create_task(self.replica.run())

    async def kill(self) -> None:
        """Kill it."""
        if self.running:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
            self.running = None
        await self.server.stop(0)

    async def get(self, job_id: str = "", **more: Any) -> str:
        answer = await self.jobs.GetJob(pb.GetJobRequest(id=job_id), **more)
        return str(answer.job.id)

    @property
    def told(self) -> list[dict[str, Any]]:
        """Return the lines of its audit log."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log else []

    async def serving(self) -> bool:
        async with forwarding_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service=JOB)
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Replicas:
    def __init__(self, stack: AsyncExitStack, log: Path | None) -> None:
        self.store = MemoryStore()
        self._stack, self._log = stack, log

    async def start(
        self,
        name: str,
        *,
        alone: bool = False,
        fails: tuple[Exception, ...] = (),
        ttl_seconds: float = TTL_SECONDS,
    ) -> Process:
        process = Process(name, self.store, alone, list(fails), ttl_seconds, self._log)
        self._stack.push_async_callback(process.channel.close)
        self._stack.push_async_callback(process.replica.close)
        self._stack.push_async_callback(process.kill)
        await process.start()
        return process

    async def two(self, ttl_seconds: float = TTL_SECONDS) -> tuple[Process, Process]:
        """Return a leader and a follower."""
        leader = await self.start("a", ttl_seconds=ttl_seconds)
        await until(lambda: leader.replica.leads)
        return leader, await self.start("b", ttl_seconds=ttl_seconds)


@asynccontextmanager
async def replicas(log: Path | None = None) -> AsyncIterator[Replicas]:
    async with AsyncExitStack() as stack:
        yield Replicas(stack, log)


async def failure(call: Any) -> errors.Problem:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return errors.from_error(failed.value)


async def test_the_leader_answers_whichever_replica_is_called() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        assert [await leader.get(), await follower.get()] == ["a1", "a1"]
        assert not follower.services


async def test_a_routed_call_is_forwarded_from_a_follower_to_the_leader(tmp_path: Path) -> None:
    async with replicas(tmp_path) as all_, AsyncExitStack() as stack:
        leader, follower = await all_.two()
        audit = Audit(tmp_path / "entry.jsonl", "entry", reads=True)
        entry = Server("127.0.0.1:0", TOKEN, security=Security(audit=audit))
        entry.route(Endpoints(queue=follower.address))
        address = f"127.0.0.1:{await entry.start()}"
        stack.push_async_callback(entry.stop, 0)
        channel = await stack.enter_async_context(connect(address, TOKEN))
        jobs: Any = job_service_pb2_grpc.JobServiceStub(channel)
        call = jobs.GetJob(pb.GetJobRequest())
        assert (await call).job.id == "a1"
        assert dict(await call.trailing_metadata())["told"] == "a1"
        watch = jobs.WatchJobs(pb.WatchJobsRequest(until_ended=True))
        assert (await watch.read()).jobs[0].id == "a1"
        assert (await failure(watch.read())).reason == "TOLD"
        first = json.loads((tmp_path / "entry.jsonl").read_text().splitlines()[0])
        assert first["forwarded"] == follower.address
        assert [line["call"] for line in (follower.told[0], leader.told[0])] == [first["call"]] * 2


async def test_metadata_is_forwarded_in_both_directions() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        call = follower.jobs.GetJob(pb.GetJobRequest())
        assert (await call).job.submitter == "operator"  # the caller's token reached the leader
        assert dict(await call.trailing_metadata())["told"] == "a1"
        assert await follower.get("deadline", timeout=30) in ("29", "30")
        missing = await failure(follower.get("missing"))
        assert (missing.code, missing.reason) == (grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND")
        assert missing.metadata == {"kind": "job", "id": "missing"}
        async with forwarding_channel(follower.address) as channel:
            stranger: Any = job_service_pb2_grpc.JobServiceStub(channel)
            assert (await failure(stranger.GetJob(pb.GetJobRequest()))).code is grpc.StatusCode.UNAUTHENTICATED
        assert leader.services[0].calls == 3


async def test_streams_are_forwarded_in_both_directions() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        for process in (leader, follower):
            told = process.jobs.WatchJobs(pb.WatchJobsRequest(until_ended=True))
            assert (await told.read()).jobs[0].id == "a1"
            assert (await failure(told.read())).reason == "TOLD"
            call = process.agents.Connect()
            for beat in (1, 5):
                await call.write(agent_pb2.ConnectRequest(beat=beat))
                assert (await call.read()).heard == beat + 1
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            pieces = (agent_pb2.UploadOutputRequest() for _ in range(3))
            assert (await failure(process.agents.UploadOutput(pieces))).message == "3"


async def test_the_next_leader_builds_its_own_service_under_a_higher_term() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        await leader.kill()
        assert await follower.get(timeout=60) == "b1"  # the call waits for the next leader
        assert follower.replica.leads


async def test_a_leader_drops_the_cache_of_its_time_as_a_follower() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        await leader.get("write")
        await leader.kill()
        assert await follower.get(timeout=60) == "b1"
        warm = follower.given
        assert isinstance(warm, WarmStore)
        await until(lambda: not warm._cache.entries)
        assert "svc/x" in [entry.key for entry in (await warm.list("svc/")).entries]
        assert not warm._cache.entries


async def test_a_leader_that_stops_is_replaced_at_once() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        assert leader.running
        leader.running.cancel()
        await leader.replica.resign()
        assert leader.services[0].closed
        async with asyncio.timeout(TTL_SECONDS / 2):
            await until(lambda: follower.replica.leads)
        assert await leader.get() == "b1"  # as long as its server still serves


async def test_a_leader_that_lost_its_lease_writes_nothing_and_follows() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two(ttl_seconds=60.0)
        held = leader.replica._held
        assert held
        assert held.lease
        leader.election._held = None  # it ignores updates of the leader key
        await all_.store.revoke(held.lease)
        await until(lambda: follower.replica.leads)
        assert leader.services[0].calls == 0
        assert await leader.get("write") == "b1"  # its write is rejected, so it forwards the call
        entry = await all_.store.get("svc/x")
        assert entry
        assert entry.value == b"b1"
        assert leader.services[0].calls == 1
        await until(lambda: leader.services[0].closed)


async def test_not_found_is_answered_only_by_a_current_leader() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two(ttl_seconds=60.0)
        assert (await failure(leader.get("missing"))).code is grpc.StatusCode.NOT_FOUND
        held = leader.replica._held
        assert held
        assert held.lease
        leader.election._held = None  # it ignores updates of the leader key
        await all_.store.revoke(held.lease)
        await until(lambda: follower.replica.leads)
        away = AsyncMock(side_effect=StoreUnavailable("cut off"))
        with patch.object(leader.replica, "_store", Mock(get=away)):
            assert (await failure(leader.get("missing"))).code is grpc.StatusCode.UNAVAILABLE
        assert follower.services[0].calls == 0
        assert (await failure(leader.get("missing"))).code is grpc.StatusCode.NOT_FOUND
        assert follower.services[0].calls == 1, "it is the one who leads that says so"
        await until(lambda: leader.services[0].closed)


async def test_a_refusal_is_dropped_if_the_leadership_was_lost_before_the_answer() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two(ttl_seconds=60.0)
        held, leader_handlers = leader.replica._held, leader.replica._leader_handlers
        assert held
        assert held.lease
        assert leader_handlers
        answer, lease = leader_handlers.answer, held.lease

        async def late(*call: Any) -> bytes:
            try:
                return await answer(*call)
            finally:
                await all_.store.revoke(lease)
                held.lose("as when it hears so")
                await until(lambda: follower.replica.leads and leader.replica._held is None)

        with patch.object(leader_handlers, "answer", late):
            assert (await failure(leader.get("missing"))).code is grpc.StatusCode.NOT_FOUND
        assert follower.services[0].calls == 1, "it is the one who leads that says so"


async def test_a_lost_lease_is_won_back_and_all_state_is_read_again() -> None:
    async with replicas() as all_:
        leader = await all_.start("a")
        await until(lambda: leader.replica.leads)
        held = leader.replica._held
        assert held
        assert held.lease
        await all_.store.revoke(held.lease)
        await until(lambda: len(leader.services) == 2)
        assert await leader.get() == "a2"


async def test_a_repeatable_call_is_retried_after_a_change_of_leader() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        call = asyncio.ensure_future(leader.get("long", timeout=30))
        stream = leader.jobs.WatchJobs(pb.WatchJobsRequest())
        await stream.read()
        await leader.services[0].entered.wait()
        service = leader.services[0]
        assert leader.running
        leader.running.cancel()
        await leader.replica.resign()
        assert service.closed
        ended = await failure(stream.read())
        assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "LEADER_CHANGED")
        await until(lambda: follower.services and follower.services[0].entered.is_set())
        call.cancel()


async def test_calls_to_a_halted_and_replaced_leader_are_abandoned() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two(ttl_seconds=60.0)
        call = asyncio.ensure_future(follower.get("long", timeout=30))
        stream, link = follower.jobs.WatchJobs(pb.WatchJobsRequest()), follower.agents.Connect()
        await stream.read()
        await link.write(agent_pb2.ConnectRequest(beat=1))
        assert (await link.read()).heard == 2
        await leader.services[0].entered.wait()
        held = leader.replica._held
        assert held
        assert held.lease
        leader.election._held = None  # it is halted, and its connections stay open
        await all_.store.revoke(held.lease)
        async with asyncio.timeout(ABANDON_SECONDS + 5):
            for ended in (await failure(stream.read()), await failure(link.read())):
                assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
            await until(lambda: follower.services and follower.services[0].entered.is_set())  # the call is retried
        assert follower.replica.leads
        assert not leader.services[0].closed
        call.cancel()


async def test_forwarded_calls_continue_while_there_is_no_other_leader() -> None:
    async with replicas() as all_:
        _, follower = await all_.two(ttl_seconds=60.0)
        stream = follower.jobs.WatchJobs(pb.WatchJobsRequest())
        await stream.read()
        follower.replica._forwarder.follow(None)
        follower.replica._forwarder.follow(follower.election.leader)
        waiting = asyncio.ensure_future(stream.read())
        await asyncio.wait([waiting], timeout=ABANDON_SECONDS + 0.2)
        assert not waiting.done()
        waiting.cancel()


async def test_without_a_leader_a_call_fails_with_a_retry_delay() -> None:
    async with replicas() as all_:
        follower = await all_.start("b", fails=(StoreUnavailable("away"),) * 1000)
        follower.replica._forwarder._patience_seconds = 0.2
        problem = await failure(follower.jobs.GetJob(pb.GetJobRequest(), timeout=60))
        assert (problem.code, problem.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_LEADER")
        assert problem.retry_after_seconds
        assert not follower.services


async def test_a_replica_that_starts_without_the_store_fails_with_an_error() -> None:
    async with replicas() as all_:
        away = AsyncMock(side_effect=StoreUnavailable("etcd at a:1: context deadline exceeded"))
        told = "cannot start without the store: etcd at a:1: context deadline exceeded"
        with patch.object(all_.store, "get", away), pytest.raises(StoreUnavailable, match=told):
            await all_.start("a")


async def test_each_replica_describes_itself() -> None:
    async with replicas() as all_:
        leader, follower = await all_.two()
        await until(lambda: follower.election.leader)
        led, followed = leader.replica.describe(), follower.replica.describe()
        assert (led.service, led.leads, followed.leads) == ("svc", True, False)
        assert led.leader_address == followed.leader_address == led.address == leader.address
        assert led.term == followed.term > 0
        assert not led.revision
        await until(lambda: follower.replica.describe().revision >= followed.term)


async def test_health_reports_whether_a_call_would_be_answered() -> None:
    async with replicas() as all_:
        nobody = await all_.start("b", fails=(StoreUnavailable("away"),) * 1000)
        leader, follower = await all_.two()
        for process in (leader, follower, nobody):
            async with asyncio.timeout(60):
                while process.election.leader is None:
                    await process.election.changed()
            assert await process.serving()
        await leader.kill()
        await follower.kill()
        async with asyncio.timeout(60):
            while await nobody.serving():  # noqa: ASYNC110 what is waited for wakes nobody
                await asyncio.sleep(0.01)


async def test_a_forwarded_call_is_not_forwarded_again() -> None:
    async with replicas() as all_:
        _, follower = await all_.two()
        metadata = ((FORWARDED, "1"),)
        async with asyncio.timeout(PATIENCE_SECONDS):
            problem = await failure(follower.jobs.GetJob(pb.GetJobRequest(), metadata=metadata))
        assert problem.reason == "NOT_LEADER"


async def test_a_forwarded_call_is_not_answered_by_a_follower() -> None:
    """The replica that forwarded it may be behind, and be called next."""
    async with replicas() as all_:
        _, follower = await all_.two()
        assert await follower.get() == "a1"
        told = pb.GetJobResponse(job=job_pb2.Job(id="old")).SerializeToString()
        follower.replica._reader = Mock(serves=False, answer=AsyncMock(return_value=told))
        assert await follower.get() == "old"
        problem = await failure(follower.jobs.GetJob(pb.GetJobRequest(), metadata=((FORWARDED, "1"),)))
        assert problem.reason == "NOT_LEADER"


async def test_both_audit_lines_of_a_forwarded_call_have_the_same_call_id(tmp_path: Path) -> None:
    async with replicas(tmp_path) as all_:
        leader, follower = await all_.two(ttl_seconds=2.0)
        await follower.get(metadata=((CALL, "0123456789abcdef"),))  # only a replica may set it
        stream = follower.jobs.WatchJobs(pb.WatchJobsRequest())
        await stream.read()
        stream.cancel()
        assert len(follower.told) == len(leader.told) == 2
        for passed, served in zip(follower.told, leader.told, strict=True):
            assert (passed["call"], passed["what"], passed["answer"]) == (served["call"], served["what"], "OK")
            assert (passed["forwarded"], "forwarded" in served) == (leader.address, False)
        assert len({line["call"] for line in leader.told} - {"0123456789abcdef"}) == 2
        await leader.get()
        await failure(follower.get("missing"))
        assert not {line["call"] for line in leader.told[2:]} & {line["call"] for line in follower.told}
        assert leader.told[3]["reason"] == "JOB_NOT_FOUND"
        await leader.kill()
        assert await follower.get() == "b1"  # first forwarded to the dead leader, then answered here
        stream = follower.jobs.WatchJobs(pb.WatchJobsRequest())
        await stream.read()
        stream.cancel()
        assert [line.get("forwarded") for line in follower.told[2:]] == [None, None]


async def test_an_error_that_prevents_leading_is_raised_and_the_leadership_resigned() -> None:
    async with replicas() as all_:
        process = await all_.start("a", fails=(ValueError("a record that is too new"),))
        assert process.running
        with pytest.raises(ValueError, match="too new"):
            await process.running
        process.running = None
        assert await all_.store.get(KEY) is None


async def test_a_single_process_store_has_a_leader_before_the_first_call() -> None:
    async with replicas() as all_:
        await all_.store.transact([], [Put(KEY, b"0123456789abcdef")])
        process = await all_.start("a", alone=True)
        assert process.replica.leads
        assert await process.get() == "a1"


async def test_undecodable_requests_get_a_clear_error() -> None:
    async with replicas() as all_:
        leader, _ = await all_.two()
        async with forwarding_channel(leader.address) as channel:
            call = channel.unary_unary(f"/{JOB}/GetJob")
            problem = await failure(call(b"\xff\xff", metadata=(("authorization", f"Bearer {TOKEN}"),)))
        assert (problem.code, problem.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_UNDERSTOOD")


async def test_methods_that_the_service_lacks_are_unimplemented() -> None:
    async with replicas() as all_:
        for process in await all_.two():
            problem = await failure(process.jobs.ListJobs(pb.ListJobsRequest()))
            assert problem.code is grpc.StatusCode.UNIMPLEMENTED
