from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from tests.unit.rpc.conftest import JOBS, TOKEN, Mesh, consume, problem_of

from cotenant.agent.v1 import agent_service_pb2 as agents_pb
from cotenant.codec import errors
from cotenant.codec.errors import Problem, Violation
from cotenant.rpc import auth_interceptor
from cotenant.rpc.server import Server
from cotenant.security import identity
from cotenant.security.audit import Audit, UnauthenticatedRate
from cotenant.security.credentials import Credentials
from cotenant.security.limits import LimitRules, Limits
from cotenant.security.permissions import Role
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile
from cotenant.store.port import StoreUnavailable, UnknownOutcome
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1 import job_service_pb2_grpc as jobs_grpc


async def calls_of_every_kind(mesh: Mesh, token: str) -> list[Problem]:
    """Make a call of each of gRPC's four kinds; request streams send nothing before the answer."""
    jobs, agents = mesh.job_stub(token), mesh.agent_stub(token)
    upload = agents.UploadOutput()
    return [
        await problem_of(jobs.GetJob(jobs_pb.GetJobRequest(id="a"))),
        await problem_of(consume(jobs.WatchJobs(jobs_pb.WatchJobsRequest()))),
        await problem_of(consume(agents.Connect())),
        await problem_of(upload),
    ]


@pytest.mark.parametrize(
    ("token", "reason"),
    [("", "TOKEN_MISSING"), ("wrong", "TOKEN_WRONG"), (TOKEN + "x", "TOKEN_WRONG"), (TOKEN[:-1], "TOKEN_WRONG")],
)
async def test_calls_without_the_token_are_rejected(mesh: Mesh, token: str, reason: str) -> None:
    await mesh.serve()
    for problem in await calls_of_every_kind(mesh, token):
        assert (problem.code, problem.reason) == (grpc.StatusCode.UNAUTHENTICATED, reason)
        assert "COTENANT_TOKEN" in problem.message
    assert mesh.jobs.asked == []


async def test_another_authorization_scheme_is_rejected(mesh: Mesh) -> None:
    await mesh.serve()
    stub = jobs_grpc.JobServiceStub(grpc.aio.insecure_channel(mesh.address))
    call = stub.GetJob(jobs_pb.GetJobRequest(), metadata=(("authorization", f"Digest {TOKEN}"),))
    assert (await problem_of(call)).reason == "TOKEN_WRONG"


async def test_an_empty_server_token_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        Server(token="")


async def test_the_caller_is_known_in_every_kind_of_servicer(mesh: Mesh) -> None:
    await mesh.serve()
    seen: list[identity.Identity] = []

    async def look(request: Any, context: Any) -> None:
        seen.append(identity.caller())

    mesh.jobs.answer = mesh.agents.answer = look
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    await consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest()))
    await consume(mesh.agent_stub().Connect(iter([agents_pb.ConnectRequest()])))
    await mesh.agent_stub().UploadOutput(iter([agents_pb.UploadOutputRequest()]))
    assert seen == [identity.OPERATOR] * 4
    assert identity.caller() == identity.ANYONE


async def test_another_authenticator_sees_the_method_and_decides(mesh: Mesh) -> None:
    class ReadOnly:
        def authenticate(self, method: str, metadata: identity.Metadata, peer: identity.Peer) -> identity.Identity:
            if "/Get" in method:
                return identity.Identity("reader", frozenset({Role.VIEWER}))
            raise Problem(grpc.StatusCode.PERMISSION_DENIED, "READ_ONLY", f"{method} is not for readers")

    await mesh.serve(authenticator=ReadOnly())
    await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    problem = await problem_of(mesh.job_stub().CreateJob(jobs_pb.CreateJobRequest()))
    assert (problem.code, problem.reason) == (grpc.StatusCode.PERMISSION_DENIED, "READ_ONLY")


async def test_a_problem_reaches_the_caller_completely_in_every_kind_of_call(mesh: Mesh) -> None:
    await mesh.serve()
    told = Problem(
        grpc.StatusCode.FAILED_PRECONDITION,
        "NODE_DRAINING",
        "the node is being drained – wait",
        metadata={"node": "n1"},
        violations=[Violation("spec.name", "is too long")],
        retry_after_seconds=1.5,
    )

    async def fail(request: Any, context: Any) -> None:
        raise told

    mesh.jobs.answer = mesh.agents.answer = fail
    upload = mesh.agent_stub().UploadOutput(iter([agents_pb.UploadOutputRequest()]))
    for problem in [
        await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest())),
        await problem_of(consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest()))),
        await problem_of(consume(mesh.agent_stub().Connect(iter([agents_pb.ConnectRequest()])))),
        await problem_of(upload),
    ]:
        assert vars(problem) == vars(told)


async def test_a_thousand_violations_fit_into_the_trailers(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise errors.invalid([Violation(f"spec.roles[{index}].name", "π is no name") for index in range(1000)])

    mesh.jobs.answer = fail
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert problem.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem.violations[0] == Violation("spec.roles[0].name", "π is no name")
    assert "more" in problem.violations[-1].description


async def test_an_unavailable_store_disables_channel_retries(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise StoreUnavailable("no quorum")

    mesh.jobs.answer = fail
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    assert problem.retry_after_seconds is not None


@pytest.mark.parametrize(
    ("error", "calls"), [(StoreUnavailable("no quorum"), 1), (UnknownOutcome("lost on its way"), 2)]
)
async def test_a_caller_retries_at_once_if_the_store_is_available(mesh: Mesh, error: Exception, calls: int) -> None:
    await mesh.serve()
    asked = []

    async def fail_once(request: Any, context: Any) -> None:
        asked.append(request)
        if len(asked) == 1:
            raise error

    mesh.jobs.answer = fail_once
    with contextlib.suppress(grpc.aio.AioRpcError):
        await mesh.job_stub().GetJob(jobs_pb.GetJobRequest())
    assert len(asked) == calls


async def test_an_unexpected_error_is_logged_once_and_answered_with_its_incident_id(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise LookupError("a secret of the inside")

    mesh.jobs.answer = fail
    with structlog.testing.capture_logs() as lines:
        problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))
    assert (problem.code, problem.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in problem.message
    (line,) = lines
    assert line["event"] == "call_failed"
    assert line["method"] == f"/{JOBS}/GetJob"
    assert line["incident"] == problem.metadata["incident"]
    assert line["incident"] in problem.message
    assert str(line["exc_info"]) == "a secret of the inside"


async def test_a_servicer_may_abort_with_its_own_status(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    mesh.jobs.answer = fail
    with structlog.testing.capture_logs() as lines:
        for call in (
            mesh.job_stub().GetJob(jobs_pb.GetJobRequest()),
            consume(mesh.job_stub().WatchJobs(jobs_pb.WatchJobsRequest())),
        ):
            problem = await problem_of(call)
            assert (problem.code, problem.message) == (grpc.StatusCode.DATA_LOSS, "gone")
    assert lines == []


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE),
        (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL),
        (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_failure_of_a_required_service_is_not_the_callers_error(
    mesh: Mesh, inner: grpc.StatusCode, outer: grpc.StatusCode
) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise grpc.aio.AioRpcError(inner, grpc.aio.Metadata(), grpc.aio.Metadata(), details="below")

    mesh.jobs.answer = fail
    assert (await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest()))).code is outer


async def test_a_call_without_a_deadline_gets_the_servers(mesh: Mesh) -> None:
    await mesh.serve(deadline_seconds_default=0.05)
    cancelled = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    mesh.jobs.answer = hang
    stub = jobs_grpc.JobServiceStub(grpc.aio.insecure_channel(mesh.address))
    call = stub.GetJob(jobs_pb.GetJobRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
    problem = await problem_of(call)
    assert (problem.code, problem.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
    assert "0.05 s" in problem.message
    assert cancelled.is_set()


async def test_a_servicers_own_time_out_is_not_the_calls_deadline(mesh: Mesh) -> None:
    await mesh.serve()

    async def fail(request: Any, context: Any) -> None:
        raise TimeoutError

    mesh.jobs.answer = fail
    stub = jobs_grpc.JobServiceStub(grpc.aio.insecure_channel(mesh.address))
    call = stub.GetJob(jobs_pb.GetJobRequest(), metadata=(("authorization", f"Bearer {TOKEN}"),))
    assert (await problem_of(call)).code is grpc.StatusCode.INTERNAL


async def test_a_servicer_is_cancelled_when_its_caller_gives_up(mesh: Mesh) -> None:
    await mesh.serve()
    cancelled = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    mesh.jobs.answer = hang
    problem = await problem_of(mesh.job_stub().GetJob(jobs_pb.GetJobRequest(), timeout=1))
    assert problem.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(cancelled.wait(), 10)


async def test_a_method_missing_in_a_servicer_is_unimplemented(mesh: Mesh) -> None:
    await mesh.serve()
    problem = await problem_of(mesh.job_stub().CancelJob(jobs_pb.CancelJobRequest()))
    assert problem.code is grpc.StatusCode.UNIMPLEMENTED
    assert "CancelJob" in problem.message


@pytest.mark.parametrize("asks", ["WatchJobs", "Connect"])
async def test_revoking_a_token_ends_its_streams(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    monkeypatch.setattr(auth_interceptor, "RECHECK_SECONDS", 0.0)
    clock = iter(range(1000))  # the file is checked each time
    file = TokenFile(tmp_path / "tokens.json", clock=lambda: float(next(clock)))
    kept, token = file.create(Subject.parse("user/eve?tenants=lab" if asks == "WatchJobs" else "agent/n1"))
    await mesh.serve(token=None, security=Security(Credentials("", file), None))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Any, context: Any) -> None:
        begun.set()
        await go_on.wait()

    if asks == "WatchJobs":
        mesh.jobs.answer = hold
        call = mesh.job_stub(token).WatchJobs(jobs_pb.WatchJobsRequest())
        await begun.wait()
        file.revoke(kept.id)
        go_on.set()
        problem = await problem_of(consume(call))
    else:
        call = mesh.agent_stub(token).Connect()
        await call.write(agents_pb.ConnectRequest())
        assert await call.read() == agents_pb.ConnectResponse()
        file.revoke(kept.id)
        await call.write(agents_pb.ConnectRequest())
        problem = await problem_of(call.read())
    assert (problem.code, problem.reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_WRONG")


async def test_no_caller_can_flood_the_audit_log(mesh: Mesh, tmp_path: Path) -> None:
    """Neither rejected callers, whose calls count like all others, nor unknown callers, which get only a few lines."""
    file = TokenFile(tmp_path / "tokens.json")
    _, token = file.create(Subject.parse("viewer/eye?tenants=lab"))
    audit = Audit(tmp_path / "audit.jsonl", "queue")
    audit.unauthenticated_rate = UnauthenticatedRate(per_second=0.0, at_once=2)
    limits = Limits(LimitRules(0.001, 3, 0))
    await mesh.serve(token=None, security=Security(Credentials("", file), None, limits, audit))

    async def told(by: str, **metadata: str) -> list[tuple[str, int]]:
        before = len(lines())
        for _ in range(5):
            call = mesh.job_stub(by).CreateJob(jobs_pb.CreateJobRequest(), metadata=tuple(metadata.items()))
            await problem_of(call)
        return [(line["reason"], line.get("left_out", 0)) for line in lines()[before:]]

    def lines() -> list[dict[str, Any]]:
        path = tmp_path / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    key, value = identity.on_behalf_header(identity.OPERATOR)
    assert await told(token, **{key: value}) == [("SPEAKS_FOR_OTHERS", 0)] * 3
    limits._calls._left.clear()
    assert await told(token) == [("ROLE_MAY_NOT", 0)] * 3
    assert await told("guessed") == [("TOKEN_WRONG", 0)] * 2
    audit.unauthenticated_rate._left = 1.0
    assert await told("guessed") == [("TOKEN_WRONG", 3)]
