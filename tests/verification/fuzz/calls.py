"""Calls of every method with invalid messages, and bytes that are not HTTP/2, against a whole mesh.

A call may be answered with OK or a refusal: INTERNAL and UNKNOWN are findings, and so is every logged traceback.
Afterwards the ledger is recounted, and the mesh must run another job.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, cast

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tests.unit.services.mesh import Mesh, again, running, spec, until
from tests.verification.fuzz.inflater import Inflater
from tests.verification.fuzz.loop_lag import LoopLag
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.mutator import Mutator
from tests.verification.fuzz.runner import FINDINGS_MAX, SETTLED_SHARE, Finding, Outcome, live_bytes
from tests.verification.fuzz.valid_requests import ValidRequests
from tools import methods as api

from cotenant.leadership.process_service import serve_process_service
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.contention.api import server as contention
from cotenant.v1 import job_pb2, process_service_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import tenant_service_pb2 as tenants_pb

HEAVY = "heavy calls"
NAMES = ("unary calls", "streaming calls", HEAVY, "undecodable calls", "invalid HTTP/2")
SERVED_BY = {
    **dict.fromkeys(("JobService", "ArrayService", "TenantService", "FolderService"), "queue"),
    **dict.fromkeys(("SecretService", "ScheduleService"), "queue"),
    **dict.fromkeys(("NodeService", "AgentService", "PlacementService"), "placement"),
    **dict.fromkeys(("PredictorService", "ObservationService", "AdviceService"), "predictor"),
    **dict.fromkeys(("ContentionService", "SampleService"), "contention"),
    "ProcessService": "contention",
    "PolicyService": "queue",
}
AT_ONCE = 64  # most of a call is waiting
STREAM_SECONDS = 0.15
CALL_SECONDS = 20.0
SETTLE_SECONDS = 20.0
PROBE_EVERY = 200
OF_THE_CLIENT = "Internal error from Core"  # a stream was refused during its request
LOOP_BEFORE = "Event loop is closed"  # still known to gRPC's poller
FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
Watch = Callable[[Outcome], None]


def methods() -> Iterator[MethodDescriptor]:
    """Yield every method of the API."""
    return (method for _, method in api.methods())


def run(name: str, inputs: int, seed: int | str, directory: Path, watch: Watch = lambda outcome: None) -> Outcome:
    """Fuzz one of `NAMES` with a number of inputs."""
    outcome = Outcome(name)
    heard = LogFindings(outcome)
    lag = LoopLag()
    with heard.listening(), lag.watching():
        asyncio.run(_Fuzzing(outcome, Random(f"{name} {seed}"), watch, lag).run(name, inputs))
    return outcome


class LogFindings(logging.Handler):
    """Reports each logged traceback as a finding, once per place."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(logging.ERROR)
        self.outcome = outcome
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Process records of gRPC and asyncio."""
        if not record.exc_info or record.name.startswith("grpc._cython"):  # it logs each header that is not text
            return
        if str(record.exc_info[1]) != LOOP_BEFORE:
            self.report(record.getMessage()[:80], record.exc_info[1])

    def process(self, logger: Any, method: str, event: dict[str, Any]) -> Any:
        """Process events of the services."""
        exc_info = event.get("exc_info")
        if exc_info:
            self.report(
                f"{event.get('event')} {event.get('method', '')}",
                exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1],
            )
        raise structlog.DropEvent

    def report(self, what: str, error: BaseException | None) -> None:
        """Report a finding, unless it is known."""
        from tests.verification.fuzz.runner import _describe

        where = _describe(error) if error else ""
        kind = where.partition(":")[0] + where[where.rfind("[") :]
        if kind not in self._seen and len(self.outcome.findings) < FINDINGS_MAX:
            self._seen.add(kind)
            self.outcome.findings.append(Finding(self.outcome.target, f"logged: {what}: {where}", b""))

    def listening(self) -> Any:
        """Capture logs within the context."""
        return _LogCapture(self)


class _LogCapture:
    def __init__(self, heard: LogFindings) -> None:
        self._heard = heard

    def __enter__(self) -> None:
        logging.getLogger().addHandler(self._heard)
        structlog.configure(
            processors=[cast("structlog.typing.Processor", self._heard.process)],
            wrapper_class=structlog.make_filtering_bound_logger(40),
            cache_logger_on_first_use=False,
        )

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._heard)
        structlog.reset_defaults()


class _Fuzzing:
    def __init__(self, outcome: Outcome, rng: Random, watch: Watch, lag: LoopLag) -> None:
        self.outcome, self.rng, self.watch, self.lag = outcome, rng, watch, lag
        self.heavy = 0.02  # share of requests that are inflated
        self.sent: list[tuple[MethodDescriptor, list[bytes]]] = []  # of the current round
        self.known: dict[str, list[str]] = {
            "job_id": [],
            "Job": [],
            "node": ["n1", "n2"],
            "tenant": ["default", "t1"],
            "Tenant": ["default", "t1"],
            "policy": ["fifo", "las"],
            "model": ["resnet50"],
            "gpu": ["GPU-n1-0", "declared"],
            "request_id": ["r1"],
            "role": ["worker"],
            "queue": ["default"],
            "phase": ["validation"],
        }
        self.drawer = Drawer(rng, self.known)
        self.inflater = Inflater(rng, self.drawer)
        self.methods = list(methods())
        self.begun = time.monotonic()
        self.channels: dict[str, Any] = {}

    async def run(self, name: str, inputs: int) -> None:
        async with running() as mesh:
            self.mesh = mesh
            await self._start_contention()
            self.agents = [await mesh.agent("n1", run_seconds=0.05), await mesh.agent("n2", gpus=2, run_seconds=0.2)]
            await mesh.tenants.CreateTenant(tenants_pb.CreateTenantRequest(tenant=tenants_pb.Tenant(id="t1")))
            self.well_meant = ValidRequests(self.rng, self.known, self.agents[0].inventory)
            for _ in range(3):
                self._know(await mesh.submit(gpus=1))
            settled = 0
            made = self._bytes if name == "undecodable calls" else self._requests
            if name == HEAVY:
                self.heavy = 0.9
            wanted = [
                method
                for method in self.methods
                if name.startswith("bytes") or name == HEAVY or (name == "streaming calls") == _streams(method)
            ]
            self.lag.take()  # it is running
            while self.outcome.inputs < inputs and len(self.outcome.findings) < FINDINGS_MAX:
                chosen = [self.rng.choice(wanted) for _ in range(min(AT_ONCE, inputs))]
                if name == "invalid HTTP/2":
                    await asyncio.gather(*map(self._connection, chosen))
                else:  # requests are built in a thread: their CPU time is not the loop's
                    requests = await asyncio.to_thread(lambda: [made(method) for method in chosen])  # noqa: B023  # awaited
                    await asyncio.gather(*map(self._sent, chosen, requests))
                self.outcome.inputs += min(AT_ONCE, inputs)
                await self._judge_lag()
                if not settled and self.outcome.inputs >= inputs * SETTLED_SHARE:
                    settled = await self._memory_bytes()
                if self.outcome.inputs % (AT_ONCE * 4) == 0:
                    self.outcome.seconds = time.monotonic() - self.begun
                    self.watch(self.outcome)
            self.outcome.seconds = time.monotonic() - self.begun
            if name != HEAVY:  # large jobs that were admitted are stored
                self.outcome.grown_bytes = await self._memory_bytes() - settled if settled else 0
            await self._afterwards()
            for channel in self.channels.values():
                await channel.close()

    async def _memory_bytes(self) -> int:
        """Measure memory, and exclude its CPU time from the loop lag."""
        measured = live_bytes()
        await asyncio.sleep(0)  # end the measuring callback
        self.lag.take()
        return measured

    async def _judge_lag(self) -> None:
        """Find the call of the round that blocked the loop, if any: repeat each call alone."""
        sent, self.sent = self.sent, []
        if not (what := self.lag.finding()):
            return
        for method, requests in sent:
            await self._sent(method, requests)
            if alone := self.lag.finding():
                self._finding(f"{method.name} {alone.partition(':')[0]}", b"\n".join(requests))
                return
        longest = max(sent, key=lambda one: sum(map(len, one[1])), default=None)
        if longest is not None:
            names = ", ".join(sorted({method.name for method, _ in sent}))
            print(f"  a round {what}, but none of its calls did so alone: {names}", file=sys.stderr)

    async def _start_contention(self) -> None:
        server = Server("127.0.0.1:0")
        self.mesh.ports["contention"] = server.bind()
        service = await contention.start(server, serve_policies(server), queue=self.mesh.channel("queue"))
        serve_process_service(server, lambda: process_service_pb2.Replica(service="contention"))
        await server.start()
        from tests.unit.services.mesh import CuttableStore, Part

        self.mesh.parts["contention"] = Part(
            CuttableStore(self.mesh.store), server, service, self.mesh.ports["contention"]
        )

    def _plain(self, part: str) -> Any:
        """Return a channel that sends any bytes."""
        if part not in self.channels:
            self.channels[part] = grpc.aio.insecure_channel(f"127.0.0.1:{self.mesh.ports[part]}")
        return self.channels[part]

    def _know(self, job_id: str) -> None:
        for texts in (self.known["job_id"], self.known["Job"]):
            texts.append(job_id)
            del texts[:-8]

    def _finding(self, what: str, data: bytes = b"") -> None:
        if all(finding.what != what for finding in self.outcome.findings):
            self.outcome.findings.append(Finding(self.outcome.target, what, data))

    # Calls -----------------------------------------------------------------------------------------------------

    def _request(self, method: MethodDescriptor) -> Message:
        message = GetMessageClass(method.input_type)()
        template = self.well_meant.request(method.input_type)
        if self.rng.random() < self.heavy:
            if template:
                message.CopyFrom(template)
            return self.inflater.inflate(message)
        if template and self.rng.random() < 0.7:
            message.CopyFrom(template)
            return self.drawer.change(message)
        return self.drawer.fill(message, share=self.rng.choice((0.1, 0.5, 0.9)))

    def _requests(self, method: MethodDescriptor) -> list[bytes]:
        count = self.rng.randint(1, 6) if method.client_streaming else 1
        return [self._request(method).SerializeToString() for _ in range(count)]

    def _bytes(self, method: MethodDescriptor) -> list[bytes]:
        """Return bytes that are an invalid message, or barely a valid one."""
        good = self._request(method).SerializeToString()
        return [Mutator(self.rng, [good or b"\x08"]).draw()]

    async def _sent(self, method: MethodDescriptor, requests: list[bytes]) -> None:
        self.sent.append((method, requests))
        path = f"/{method.containing_service.full_name}/{method.name}"
        channel: Any = self._plain(SERVED_BY[method.containing_service.name])
        answered = GetMessageClass(method.output_type).FromString
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        call = getattr(channel, kind)(path, request_serializer=bytes, response_deserializer=answered)
        seconds = STREAM_SECONDS if _streams(method) else CALL_SECONDS
        try:
            answer = call(_each(requests) if method.client_streaming else requests[0], timeout=seconds)
            if method.server_streaming:
                async for _ in answer:
                    pass
            else:
                response = await answer
                if isinstance(response, jobs_pb.CreateJobResponse):
                    self._know(response.job.id)
        except asyncio.CancelledError:  # so gRPC informs a writer of a stream of a refusal
            self.outcome.refused += 1
        except grpc.aio.AioRpcError as error:
            self.outcome.refused += 1
            if error.code() in FORBIDDEN and error.details() != OF_THE_CLIENT:
                self._finding(f"{method.name}: {error.code().name}: {_stable(error.details())}", b"\n".join(requests))
            elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not _streams(method):
                self._finding(f"{method.name} hung", requests[0])

    # Connections -----------------------------------------------------------------------------------------------

    _recorded: bytes = b""

    async def _connection(self, method: MethodDescriptor) -> None:
        """Send the bytes of a connection, damaged or truncated, and disconnect."""
        if not self._recorded:
            self._recorded = b"PRI"  # clients without a valid preface do not wait
            self._recorded = await self._record()
        data = Mutator(self.rng, [self._recorded]).draw()
        part = self.rng.choice(("queue", "placement", "predictor", "contention"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.mesh.ports[part])
        except OSError:  # it accepts nothing for a moment: the probe checks that it recovers
            self.outcome.refused += 1
            return
        with suppress(OSError):
            writer.write(data)
            await writer.drain()
            if self.rng.random() < 0.5:
                writer.write_eof()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 16), self.rng.choice((0.0, 0.005, 0.05)))
        writer.transport.abort()
        if self.rng.random() < 1 / PROBE_EVERY:
            await again(lambda: self.mesh.jobs.ListJobs(jobs_pb.ListJobsRequest(), timeout=CALL_SECONDS))

    async def _record(self) -> bytes:
        """Record the bytes of a client that makes two calls."""
        sent = bytearray()

        async def between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            back, out = await asyncio.open_connection("127.0.0.1", self.mesh.ports["queue"])

            async def answers() -> None:
                while data := await back.read(1 << 16):
                    writer.write(data)

            answering = asyncio.create_task(answers())
            while data := await reader.read(1 << 16):
                sent.extend(data)
                out.write(data)
            answering.cancel()
            out.close()
            writer.close()

        server = await asyncio.start_server(between, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name, request in (
                ("ListJobs", b""),
                ("CreateJob", jobs_pb.CreateJobRequest(spec=spec()).SerializeToString()),
            ):
                await channel.unary_unary(f"/cotenant.v1.JobService/{name}", request_serializer=bytes)(request)
        server.close()
        return bytes(sent)

    # Afterwards ------------------------------------------------------------------------------------------------

    async def _afterwards(self) -> None:
        """Recount the ledger, and run a job."""
        try:  # a plan of a disconnected caller holds its places until it is committed
            await until(lambda: not any(recount(self.mesh)))
        except TimeoutError:
            for wrong in recount(self.mesh):
                self._finding(f"the ledger: {wrong}")
        try:
            await asyncio.wait_for(self._serves(), SETTLE_SECONDS * 3)
        except (TimeoutError, AssertionError, grpc.aio.AioRpcError) as error:
            self._finding(f"no job runs afterwards: {type(error).__name__} {str(error)[:300]}")
        for wrong in recount(self.mesh):
            self._finding(f"the ledger, at the end: {wrong}")

    async def _serves(self) -> None:
        from cotenant.v1 import contention_service_pb2, contention_service_pb2_grpc

        agent = self.mesh.agents["after"] = self.agents[0].__class__(
            "after", self.mesh.channel("placement"), cores=40, run_seconds=0.01
        )
        agent.start()
        await until(lambda: bool(agent.welcomes))
        incidents: Any = contention_service_pb2_grpc.ContentionServiceStub(self.mesh.channel("contention"))
        await incidents.ListIncidents(contention_service_pb2.ListIncidentsRequest())
        own = tenants_pb.Tenant(id="after")  # the other tenants may have limits by now
        await self.mesh.tenants.CreateTenant(tenants_pb.CreateTenantRequest(tenant=own))
        job_id = await self.mesh.submit(gpus=0, cores=1, kind=job_pb2.JOB_KIND_CPU, priority=1000, tenant=own.id)
        await self.mesh.reach(job_id, "SUCCEEDED")


def recount(mesh: Mesh) -> Iterator[str]:
    """Yield where the ledger's free resources are not those that no attempt holds."""
    cluster = mesh.parts["placement"].service.cluster
    ledger = cluster.ledger
    held = [holding for live in cluster.attempts.values() if not live.state.ended for holding in live.holdings]
    for number, shape in enumerate(ledger.shapes):
        here = [holding for holding in held if holding.node == number]
        shared = {gpu for holding in here for gpu, _ in holding.shares}
        counted = (
            shape.gpus - sum(holding.gpus for holding in here) - len(shared),
            shape.cores - sum(holding.cores for holding in here),
            shape.memory_bytes - sum(holding.memory_bytes for holding in here),
        )
        free = (int(ledger.free_gpus[number]), int(ledger.free_cores[number]), int(ledger.free_memory[number]))
        if free != counted:
            yield f"node {number} has {free} free, but {shape} minus its attempts is {counted}"


def _streams(method: MethodDescriptor) -> bool:
    return method.client_streaming or method.server_streaming


async def _each(requests: list[bytes]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


def _stable(details: str | None) -> str:
    """Return an error's text without its incident number."""
    return " ".join(word for word in (details or "").split() if not any(letter.isdigit() for letter in word))[:160]
