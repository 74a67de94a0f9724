"""The gateway before a mesh of one service, in one process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from cotenant.codec import errors
from cotenant.gateway import application
from cotenant.gateway.application import Gateway
from cotenant.rpc.access import AccessError
from cotenant.rpc.channel import Channel, connect
from cotenant.v1.job_pb2 import Job, JobSpec
from cotenant.v1.job_service_pb2 import (
    CancelJobResponse,
    CreateJobResponse,
    GetJobResponse,
    ListJobsResponse,
    ReadLogsResponse,
    WatchJobsResponse,
)
from cotenant.v1.job_service_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server

PORTAL = "https://portal.example"
ASKS: dict[str, Any] = {"origin": PORTAL, "access_control_request_method": "POST", "authorization": ""}
TOKEN = {"authorization": "Bearer secret"}
LAG_SECONDS_MAX = 0.1

MANY = ListJobsResponse(
    jobs=[Job(id=str(n), spec=JobSpec(environment={str(m): "x" for m in range(50)})) for n in range(1000)]
)


class Jobs(JobServiceServicer):
    """A queue with answers of its own."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.request: Any = None
        self.waiting, self.cancelled = asyncio.Event(), asyncio.Event()

    async def GetJob(self, request: Any, context: Any) -> GetJobResponse:
        self.metadata, self.request = dict(context.invocation_metadata()), request
        if request.id == "none":
            status = errors.to_status(errors.not_found("job", "none"))
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                status.message,
                trailing_metadata=((errors.DETAILS_KEY, status.SerializeToString()),),
            )
        if request.id == "away":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        return GetJobResponse(job=Job(id=request.id))

    async def CreateJob(self, request: Any, context: Any) -> CreateJobResponse:
        self.request = request
        return CreateJobResponse(job=Job(id="1", spec=request.spec))

    async def CancelJob(self, request: Any, context: Any) -> CancelJobResponse:
        await self._forever()
        return CancelJobResponse()

    async def ListJobs(self, request: Any, context: Any) -> ListJobsResponse:
        return MANY

    async def WatchJobs(self, request: Any, context: Any) -> AsyncIterator[WatchJobsResponse]:
        if request.after_revision:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "too old")
        yield WatchJobsResponse(jobs=[Job(id="1")])
        yield WatchJobsResponse(synced=True, revision="a.1")
        await self._forever()

    async def ReadLogs(self, request: Any, context: Any) -> AsyncIterator[ReadLogsResponse]:
        yield ReadLogsResponse(data=b"one\n")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the node is gone")

    async def _forever(self) -> None:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@dataclass
class OneService:
    """As much of a mesh as the gateway uses."""

    channel: Channel
    looked: list[str] = field(default_factory=list)

    def channel_to(self, service: str) -> Channel:
        return self.channel

    async def find_again(self) -> None:
        self.looked.append("again")

    async def close(self) -> None:
        await self.channel.close()


@dataclass
class Caller:
    """An HTTP client without a server between."""

    gateway: Gateway
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)
    received: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(
        self, verb: str, path: str, body: Any = None, parts: int = 1, *, parse: bool = True, **headers: str
    ) -> Any:
        """Return the JSON of the answer."""
        text = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(text) // parts) or 1
        rest = [text[at : at + size] for at in range(0, len(text), size)] or [b""]
        plain, _, query = path.partition("?")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {"content-type": "application/json", **TOKEN, **named}

        async def receive() -> dict[str, Any]:
            if rest:
                part = rest.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(rest)}
            await self.leaving.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                self.sent.clear()
            elif message.get("body"):
                self.sent.append(message["body"])
                self.received.set()

        scope = {
            "type": "http", "method": verb, "path": plain, "raw_path": plain.encode(), "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
        }  # fmt: skip
        await self.gateway(scope, receive, send)
        is_json = self.headers.get("content-type") == "application/json"
        return json.loads(b"".join(self.sent)) if parse and is_json else None

    def lines(self) -> list[Any]:
        """Return the lines of a stream so far."""
        return [json.loads(line) for line in b"".join(self.sent).splitlines()]


@pytest.fixture
async def jobs() -> Jobs:
    kind: Any = Jobs  # the other methods are not called
    made: Jobs = kind()
    return made


@pytest.fixture
async def call(jobs: Jobs) -> AsyncIterator[Caller]:
    server = grpc.aio.server()
    add_JobServiceServicer_to_server(jobs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    mesh: Any = OneService(connect(f"127.0.0.1:{port}"))
    gateway = Gateway(lambda: mesh, [PORTAL])
    try:
        yield Caller(gateway)
    finally:
        await gateway.close()
        await server.stop(0)


def reason(answer: Any) -> str:
    """Return the reason in the details of an error."""
    return str(answer["details"][0]["reason"])


async def test_a_call_is_made_with_the_callers_token(call: Caller, jobs: Jobs) -> None:
    assert await call("GET", "/v1/jobs/17?view=JOB_VIEW_BASIC", cotenant_to="queue", cookie="a=b") == {
        "job": {"id": "17"}
    }
    assert call.status == 200
    assert (jobs.request.id, jobs.request.view) == ("17", 1)
    assert jobs.metadata["authorization"] == "Bearer secret"
    assert jobs.metadata["cotenant-to"] == "queue"
    assert "cookie" not in jobs.metadata


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic secret", "Bearer two words", "secret"])
async def test_without_a_token_nothing_is_called(call: Caller, jobs: Jobs, header: str) -> None:
    answer = await call("GET", "/v1/jobs/17", authorization=header)
    assert (call.status, answer["code"], reason(answer)) == (401, 16, "TOKEN_MISSING")
    assert call.headers["www-authenticate"].startswith("Bearer")
    assert jobs.request is None


async def test_errors_are_the_status_with_its_details(call: Caller) -> None:
    answer = await call("GET", "/v1/jobs/none")
    assert (call.status, answer["code"], reason(answer)) == (404, 5, "JOB_NOT_FOUND")
    assert answer["details"][0]["metadata"] == {"kind": "job", "id": "none"}
    answer = await call("GET", "/v1/jobs/away")
    assert (call.status, answer["code"]) == (400, 9)


async def test_a_request_id_is_added_so_that_a_retry_is_harmless(call: Caller, jobs: Jobs) -> None:
    await call("POST", "/v1/jobs", {"spec": {"name": "a"}})
    assert jobs.request.request_id
    await call("POST", "/v1/jobs", {"spec": {"name": "a"}, "requestId": "mine"})
    assert jobs.request.request_id == "mine"


@pytest.mark.parametrize("parts", [1, 20])
async def test_a_large_body_arrives(call: Caller, jobs: Jobs, parts: int) -> None:
    environment = {str(n): "x" * 50 for n in range(2000)}
    answer = await call("POST", "/v1/jobs", {"spec": {"environment": environment}}, parts)
    assert (call.status, answer["job"]["spec"]["environment"]) == (200, environment)
    assert dict(jobs.request.spec.environment) == environment


async def test_a_body_that_is_too_large_is_refused_before_it_is_read(call: Caller, jobs: Jobs) -> None:
    answer = await call("POST", "/v1/jobs", b"{}", content_length="9" * 9)
    assert (call.status, reason(answer)) == (413, "REQUEST_TOO_LARGE")
    answer = await call("POST", "/v1/jobs", b" " * 2**20, 100)
    assert (call.status, reason(answer), jobs.request) == (413, "REQUEST_TOO_LARGE", None)


async def test_a_slow_body_is_given_up(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "BODY_SECONDS_MAX", 0.05)

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(application, "_read_part", lambda *given: never())
    answer = await call("POST", "/v1/jobs", {})
    assert (call.status, reason(answer)) == (408, "BODY_TOO_SLOW")


async def test_only_json_is_taken(call: Caller) -> None:
    answer = await call("POST", "/v1/jobs", b"a=b", content_type="application/x-www-form-urlencoded")
    assert (call.status, reason(answer)) == (415, "NOT_JSON")
    await call("POST", "/v1/jobs", {"spec": {}}, content_type="application/json; charset=utf-8")
    assert call.status == 200


async def test_a_wrong_method_names_the_right_ones(call: Caller) -> None:
    answer = await call("DELETE", "/v1/jobs/17")
    assert (call.status, reason(answer), call.headers["allow"]) == (405, "METHOD_NOT_ALLOWED", "GET, PATCH")


async def test_a_stream_of_requests_needs_grpc(call: Caller) -> None:
    assert reason(await call("POST", "/v1/jobs:session")) == "NEEDS_GRPC"
    assert call.status == 501


async def test_a_call_ends_when_its_caller_disconnects(call: Caller, jobs: Jobs) -> None:
    calling = asyncio.create_task(call("POST", "/v1/jobs/17:cancel"))
    await jobs.waiting.wait()
    call.leaving.set()
    await calling
    await asyncio.wait_for(jobs.cancelled.wait(), 5.0)
    assert call.status == 0


async def test_a_watch_sends_lines_until_its_caller_disconnects(call: Caller, jobs: Jobs) -> None:
    calling = asyncio.create_task(call("GET", "/v1/jobs:watch"))
    while len(call.sent) < 2:
        call.received.clear()
        await asyncio.wait_for(call.received.wait(), 5.0)
    assert (call.status, call.headers["content-type"]) == (200, "application/x-ndjson")
    assert call.lines() == [
        {"result": {"jobs": [{"id": "1"}]}},
        {"result": {"synced": True, "revision": "a.1"}},
    ]
    call.leaving.set()
    await calling
    await asyncio.wait_for(jobs.cancelled.wait(), 5.0)


async def test_a_refused_stream_has_the_status_of_its_refusal(call: Caller) -> None:
    answer = await call("GET", "/v1/jobs:watch?afterRevision=x")
    assert (call.status, answer["code"]) == (400, 11)


async def test_a_stream_that_breaks_ends_with_a_line_that_says_so(call: Caller) -> None:
    await call("GET", "/v1/jobs/17/logs")
    piece, broken = call.lines()
    assert (call.status, piece) == (200, {"result": {"data": "b25lCg=="}})
    assert broken["error"]["code"] == 14


async def test_a_large_answer_does_not_delay_others(call: Caller) -> None:
    longest = 0.0

    async def watch_lag() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()  # of this thread: others may have the processor
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    watching = asyncio.create_task(watch_lag())
    await call("GET", "/v1/jobs", parse=False)
    watching.cancel()
    assert len(json.loads(b"".join(call.sent))["jobs"]) == 1000
    assert longest < LAG_SECONDS_MAX


async def test_too_many_requests_are_refused(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "REQUESTS_MAX", 0)
    answer = await call("GET", "/v1/jobs/17")
    assert (call.status, reason(answer)) == (503, "TOO_MANY_REQUESTS")
    assert call.headers["retry-after"] == "1"


async def test_a_mesh_that_is_not_found_is_said_so() -> None:
    def connect_nowhere() -> Any:
        raise AccessError("no services are running")

    call = Caller(Gateway(connect_nowhere))
    answer = await call("GET", "/v1/jobs/17")
    assert call.status == 503
    assert "no services are running" in answer["message"]


async def test_the_document_needs_no_token(call: Caller) -> None:
    answer = await call("GET", "/openapi.json", authorization="")
    assert (call.status, answer["openapi"]) == (200, "3.1.0")


async def test_a_named_site_may_call_and_read_errors(call: Caller, jobs: Jobs) -> None:
    for path, status in (("/v1/jobs/17", 200), ("/v1/jobs/none", 404)):
        await call("GET", path, origin=PORTAL)
        assert (call.status, call.headers["access-control-allow-origin"]) == (status, PORTAL)
        assert call.headers["vary"] == "origin"
        assert "retry-after" in call.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in call.headers


async def test_a_preflight_is_answered_without_a_token_or_a_call(call: Caller, jobs: Jobs) -> None:
    await call("OPTIONS", "/v1/jobs", **ASKS)
    assert (call.status, call.sent, jobs.request) == (204, [], None)
    assert call.headers["access-control-allow-origin"] == PORTAL
    assert "POST" in call.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(call.headers["access-control-allow-headers"].split(", "))


@pytest.mark.parametrize(
    "origin", ["", "null", "https://evil.example", f"{PORTAL}.evil.example", "http://portal.example"]
)
async def test_other_sites_are_not_named(call: Caller, origin: str) -> None:
    await call("GET", "/v1/jobs/17", origin=origin)
    assert "access-control-allow-origin" not in call.headers
    await call("OPTIONS", "/v1/jobs", **{**ASKS, "origin": origin})
    assert not [name for name in call.headers if name.startswith("access-control")]


async def test_without_named_sites_there_are_no_cors_headers(call: Caller) -> None:
    call.gateway = Gateway(call.gateway._connect)
    await call("GET", "/v1/jobs/17", origin=PORTAL)
    assert (call.status, {"vary", "access-control-allow-origin"} & set(call.headers)) == (200, set())
    await call("OPTIONS", "/v1/jobs", **ASKS)
    assert (call.status, "access-control-allow-origin" in call.headers) == (405, False)
