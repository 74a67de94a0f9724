"""Limits of callers: processing time, concurrent calls, and request sizes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from structlog.testing import capture_logs
from tests.support.paths import ROOT
from tests.unit.rpc.conftest import Mesh, consume, problem_of
from tests.verification.fuzz.calls import methods

from cotenant.codec import request_bytes, request_limits
from cotenant.codec.errors import Problem
from cotenant.core.model import limits as table
from cotenant.rpc.loop_lag import STALL_SECONDS, LoopLagMonitor
from cotenant.security import metering
from cotenant.security.credentials import Credentials
from cotenant.security.identity import OPERATOR, Identity
from cotenant.security.limits import CallsAtOnce, LimitRules, Limits
from cotenant.security.metering import LONGEST, Meter, charge
from cotenant.security.permissions import Role
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb

QUEUED = job_pb2.JOB_PHASE_QUEUED
EVE, ANN = (Identity(name, frozenset({Role.USER})) for name in ("eve", "ann"))
DOCS = ROOT / "docs" / "limits.md"


# Processing time ------------------------------------------------------------------------------------------------


def test_only_the_caller_that_used_up_its_processing_time_waits() -> None:
    now = [100.0]
    limits = Limits(LimitRules(processing_per_second=0.5, processing_seconds=2.0), now=lambda: now[0])
    limits.charge(EVE, 1.9)
    limits.check_processing(EVE)
    limits.charge(EVE, 1.1)  # a call is charged afterwards: the balance is negative now
    with pytest.raises(Problem) as refused:
        limits.check_processing(EVE)
    problem = refused.value
    assert (problem.code, problem.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MUCH_PROCESSING")
    assert problem.retry_after_seconds == pytest.approx(2.0)
    assert problem.message == "calls of eve take more than 0.5 s of processing per second; try again in 2.0 s"
    limits.check_processing(ANN)
    now[0] += 2.1
    limits.check_processing(EVE)


def test_operators_agents_and_services_are_not_charged() -> None:
    limits = Limits(LimitRules(processing_per_second=0.1, processing_seconds=0.1))
    for role in (Role.OPERATOR, Role.AGENT, Role.SERVICE):
        one = Identity("one", frozenset({role}))
        limits.charge(one, 1000.0)
        limits.check_processing(one)
    limits.charge(OPERATOR, 1000.0)
    limits.check_processing(OPERATOR)
    without = Limits(LimitRules(processing_per_second=0.0))
    without.charge(EVE, 1000.0)
    without.check_processing(EVE)


async def test_a_caller_is_charged_for_what_its_calls_take(mesh: Mesh, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    tokens = [file.create(Subject.parse(f"user/{name}?tenants=lab"))[1] for name in ("eve", "ann")]
    rules = LimitRules(0.0, 0, 0, processing_per_second=0.001, processing_seconds=0.05)
    await mesh.serve(token=None, security=Security(Credentials("", file), None, Limits(rules)))

    async def work(request: Any, context: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            begun = time.thread_time()
            while time.thread_time() - begun < 0.01:
                pass

    mesh.jobs.answer = work
    eve, ann = (mesh.job_stub(token) for token in tokens)
    for _ in range(2):
        await eve.GetJob(jobs_pb.GetJobRequest())
    problem = await problem_of(eve.GetJob(jobs_pb.GetJobRequest()))
    assert problem.reason == "TOO_MUCH_PROCESSING"
    assert 0 < (problem.retry_after_seconds or 0) < 60
    await ann.GetJob(jobs_pb.GetJobRequest())
    await consume(ann.WatchJobs(jobs_pb.WatchJobsRequest()))  # a stream is charged too
    assert (await problem_of(ann.WatchJobs(jobs_pb.WatchJobsRequest()).read())).reason == "TOO_MUCH_PROCESSING"


# Steps ----------------------------------------------------------------------------------------------------------


async def test_a_step_that_blocks_the_loop_is_logged_with_its_method(mesh: Mesh) -> None:
    await mesh.serve()

    async def hold(request: Any, context: Any) -> None:
        time.sleep(metering.BLOCKED_SECONDS * 1.5)  # noqa: ASYNC251  # that is what is looked for

    mesh.jobs.answer = hold
    with capture_logs() as logs:
        await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    (told,) = [line for line in logs if line["event"] == "loop_blocked"]
    assert told["method"] == "/cotenant.v1.JobService/GetJob"
    assert told["seconds"] >= metering.BLOCKED_SECONDS > told["cpu_seconds"]


def test_a_stalled_loop_is_logged_with_the_longest_step() -> None:
    stalls = LoopLagMonitor()
    LONGEST.take()
    Meter("short").add(0.1, 0.2)
    Meter("long").add(0.3, 0.7)
    with capture_logs() as logs:
        stalls.take(STALL_SECONDS)
        stalls.take(STALL_SECONDS)
    told = [(line["method"], line["longest_step"]) for line in logs if line["event"] == "loop_stalled"]
    assert told == [("long", 0.7), ("", 0.0)]


async def test_a_metered_coroutine_is_awaited_as_any_other() -> None:
    meter = Meter("m")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("x")

    async def waits() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "cancelled"
        return ""

    async def metered(what: Any) -> Any:
        return await meter.run(what)

    with pytest.raises(ValueError, match="x"):
        await metered(fails())
    task = asyncio.create_task(metered(waits()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "cancelled"
    async with asyncio.timeout(60):
        assert await metered(asyncio.wait_for(asyncio.sleep(0, "value"), 1)) == "value"
    assert 0 < meter.seconds < 1


async def test_a_metered_stream_is_closed_with_its_reader() -> None:
    meter, closed = Meter("m"), asyncio.Event()

    async def numbers() -> Any:
        try:
            for number in range(10):
                yield number
        finally:
            closed.set()

    stream = meter.each(numbers())
    assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
    await stream.aclose()
    assert closed.is_set()


def test_work_that_was_done_elsewhere_is_added_to_the_call() -> None:
    meter = Meter("m")
    charge(1.0)  # no call is served
    metering.begin(meter)
    charge(2.5)
    charge(-1.0)
    assert (meter.take(), meter.take()) == (2.5, 0.0)
    metering._meter.set(None)


# Calls at once --------------------------------------------------------------------------------------------------


async def test_rejected_calls_do_not_raise_the_number_of_concurrent_calls(mesh: Mesh) -> None:
    await mesh.serve(calls_max=3)
    finish, under_way = asyncio.Event(), 0
    most = 0

    async def work(request: Any, context: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await finish.wait()
        finally:
            under_way -= 1

    mesh.jobs.answer = work
    stub = mesh.job_stub()

    async def call() -> str:
        try:
            await stub.GetJob(jobs_pb.GetJobRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    held = [asyncio.ensure_future(call()) for _ in range(3)]
    while under_way < 3:  # noqa: ASYNC110  # the calls come one by one
        await asyncio.sleep(0)
    refused = [await call() for _ in range(8)]
    assert (set(refused), most) == ({"RESOURCE_EXHAUSTED"}, 3)
    finish.set()
    assert await asyncio.gather(*held) == ["OK"] * 3
    assert await call() == "OK"


def test_a_rejected_call_does_not_count() -> None:
    calls = CallsAtOnce(2)
    with calls.hold(), calls.hold():
        for _ in range(5):
            with pytest.raises(Problem, match="2 concurrent calls"), calls.hold():
                pass
        assert calls.count == 2
    assert calls.count == 0


# Requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (
            jobs_pb.ListJobsRequest(filter=jobs_pb.JobFilter(phases=[QUEUED] * 33)),
            "filter.phases: has 33 items; 32 are",
        ),
        (jobs_pb.ListJobsRequest(page_token="x" * 5000), "page_token: has 5000 characters; 4096 are allowed at most"),
        (jobs_pb.GetJobRequest(id="x" * 5000), "id: has 5000 characters; 4096 are allowed at most"),
        (jobs_pb.SimulateJobRequest(more=[{}] * 101), "more: has 101 items; 100 are allowed at most"),  # type: ignore[list-item]  # a dict makes a message
    ],
)
async def test_a_field_beyond_its_limit_is_named(mesh: Mesh, request_: Any, told: str) -> None:
    await mesh.serve()
    name = type(request_).__name__.removesuffix("Request")
    stub = mesh.job_stub()
    with pytest.raises(Problem) as refused:
        request_limits.check(request_)
    assert refused.value.message.startswith(told)
    if name in ("GetJob", "SimulateJob"):
        assert (await problem_of(getattr(stub, name)(request_))).message.startswith(told)
        assert mesh.jobs.asked == []


async def test_a_request_beyond_its_bytes_is_not_even_decoded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    await mesh.serve()
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest(id="x" * 100_000)))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.message == (
        "request: has 100,004 bytes; 65,536 are allowed at most; "
        "id: has 100,004 bytes, of 65,536 allowed for the whole request"
    )


def test_requests_of_unknown_callers_are_not_decoded() -> None:
    """A request stays bytes until its caller is authenticated: see `AuthInterceptor`."""
    for method in methods():
        path = f"/{method.containing_service.full_name}/{method.name}"
        assert request_bytes.bytes_max(path) >= 0


def test_every_repeated_field_and_text_of_every_request_has_a_limit() -> None:
    def walk(kind: Descriptor, depth: int) -> None:
        repeated, texts, inner = request_limits._plan(kind)
        named = {name for name, _ in repeated} | set(texts) | set(inner)
        for field in kind.fields:
            if field.is_repeated:
                assert field.name in named, f"{kind.name}.{field.name}"
        if depth < request_limits.DEPTH_MAX:
            for name in inner:
                message = kind.fields_by_name[name].message_type
                assert message is not None
                walk(message, depth + 1)

    for method in methods():
        walk(method.input_type, 0)


def test_the_table_on_the_page_is_current() -> None:
    text = DOCS.read_text()
    for limit in table.LIMITS.values():
        assert f"| `{limit.field}` | {limit.most:,} {limit.unit} | {limit.about} |" in text, limit.field
