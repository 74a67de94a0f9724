"""Tokens of callers, limits per caller, and the audit log."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import jwt
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.unit.rpc.conftest import Mesh, consume, problem_of
from tests.unit.security.test_tokens import by, reason_of

from cotenant import telemetry
from cotenant.codec.errors import Problem
from cotenant.internal.v1 import observation_service_pb2 as observation_pb
from cotenant.internal.v1 import observation_service_pb2_grpc as observation_grpc
from cotenant.security.audit import Audit, rotated
from cotenant.security.credentials import Credentials
from cotenant.security.identity import OPERATOR, Identity
from cotenant.security.limits import LimitRules, Limits
from cotenant.security.oidc import BadOidc, Oidc, OidcRules
from cotenant.security.permissions import ROLES, Role
from cotenant.security.server_security import Security
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb

if TYPE_CHECKING:
    from tests.support.otlp_receiver import OtlpReceiver

pytest_plugins = ("tests.support.otlp_receiver",)

EVE = Subject.parse("user/eve?tenants=lab")


# Tokens of a provider ----------------------------------------------------------------------------------------------

ISSUER = "https://login.example"
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
CURVE = ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def jwks(tmp_path: Path) -> Path:
    keys = []
    for key_id, algorithm, key in (("r", "RS256", RSA), ("e", "ES256", CURVE)):
        shown = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
        keys.append({**shown, "kid": key_id, "alg": algorithm, "use": "sig"})
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": keys}))
    return path


def signed(key: Any = CURVE, algorithm: str = "ES256", key_id: str | None = "e", **claims: Any) -> str:
    told = {"iss": ISSUER, "aud": "cotenant", "sub": "eve", "exp": time.time() + 60}
    told |= {"cotenant_role": "user", "cotenant_tenants": ["lab"], **claims}
    headers = {"kid": key_id} if key_id else {}
    return jwt.encode({k: v for k, v in told.items() if v is not None}, key, algorithm, headers=headers)


def provider(jwks: Path, **rules: Any) -> Credentials:
    return Credentials("mesh", None, Oidc(OidcRules(ISSUER, "cotenant", str(jwks), **rules)))


def test_a_providers_token_is_identified_by_its_claims(jwks: Path) -> None:
    known = provider(jwks)
    assert by(known, signed()) == EVE.identity
    assert by(known, signed(RSA, "RS256", "r", cotenant_tenants="lab")) == EVE.identity
    assert by(known, signed(cotenant_tenants="*")).tenants is None
    assert by(known, signed(aud=["other", "cotenant"])).name == "eve"
    mapped = provider(jwks, name_claim="email", role_default="viewer", tenants_claim="groups")
    told = by(mapped, signed(email="eve@example.org", cotenant_role=None, groups=["a", "b"]))
    assert told == Identity("eve@example.org", frozenset({Role.VIEWER}), frozenset({"a", "b"}))


WRONG: dict[str, dict[str, Any]] = {
    "TOKEN_EXPIRED": {"exp": 1000},
    "TOKEN_NOT_YET_VALID": {"nbf": 4e9},
    "TOKEN_OF_ANOTHER_AUDIENCE": {"aud": "other"},
    "TOKEN_OF_ANOTHER_ISSUER": {"iss": "https://evil.example"},
    "TOKEN_WITHOUT_ROLE": {"cotenant_role": "service"},
    "TOKEN_KEY_UNKNOWN": {"key_id": "x"},
    "TOKEN_WRONG": {"key": ec.generate_private_key(ec.SECP256R1())},
    "TOKEN_ALGORITHM": {"key": RSA, "algorithm": "RS256"},
}


@pytest.mark.parametrize("reason", WRONG)
def test_each_error_of_a_token_has_its_own_reason(jwks: Path, reason: str) -> None:
    assert reason_of(provider(jwks), signed(**WRONG[reason])) == reason


@pytest.mark.parametrize(
    "claims",
    [
        {"sub": "operator"},
        {"sub": "a b"},
        {"sub": ""},
        {"cotenant_tenants": None},
        {"cotenant_tenants": ["*", "lab"]},
        {"cotenant_tenants": 7},
        {"cotenant_tenants": ["UPPER"]},
        {"exp": None},
        {"exp": 10**400},
    ],
)
def test_invalid_claims_are_rejected(jwks: Path, claims: dict[str, Any]) -> None:
    assert reason_of(provider(jwks), signed(**claims)) in ("TOKEN_CLAIMS", "TOKEN_UNREADABLE")


def test_unsigned_and_symmetrically_signed_tokens_are_rejected(jwks: Path) -> None:
    unsigned: tuple[tuple[str, Any], ...] = (("none", None), ("HS256", "x" * 32))
    for algorithm, key in unsigned:
        told = {"iss": ISSUER, "aud": "cotenant", "sub": "eve", "exp": time.time() + 60, "cotenant_role": "operator"}
        token = jwt.encode(told, key, algorithm, headers={"kid": "e"})
        assert reason_of(provider(jwks), token) in ("TOKEN_ALGORITHM", "TOKEN_WRONG")


def test_clocks_may_differ_a_little(jwks: Path) -> None:
    assert by(provider(jwks, leeway_seconds=30), signed(exp=time.time() - 10)).name == "eve"
    assert reason_of(provider(jwks, leeway_seconds=0), signed(exp=time.time() - 10)) == "TOKEN_EXPIRED"


def test_new_keys_of_the_provider_are_used(jwks: Path, tmp_path: Path) -> None:
    known = provider(jwks)
    fresh = ec.generate_private_key(ec.SECP256R1())
    shown = jwt.get_algorithm_by_name("ES256").to_jwk(fresh.public_key(), as_dict=True)
    (tmp_path / "new").write_text(json.dumps({"keys": [{**shown, "kid": "n", "alg": "ES256"}]}))
    (tmp_path / "new").replace(jwks)
    assert by(known, signed(fresh, key_id="n")).name == "eve"
    assert reason_of(known, signed()) == "TOKEN_KEY_UNKNOWN"


@pytest.mark.parametrize(
    "url", ["http://login.example/keys", "ftp://x/keys", "file:///etc/passwd", "/nowhere", "http://127.0.0.1:1@x"]
)
def test_keys_over_an_unprotected_connection_are_refused(url: str) -> None:
    with pytest.raises(BadOidc, match=r"\[oidc\]"):
        Oidc(OidcRules(ISSUER, "cotenant", url))


# Limits ------------------------------------------------------------------------------------------------------------


def test_a_bucket_fills_again_with_time_and_each_caller_has_its_own() -> None:
    now = [0.0]
    limits = Limits(LimitRules(2.0, 4, 1), now=lambda: now[0])
    eve, ann = (Identity(name, frozenset({Role.USER}), None) for name in ("eve", "ann"))
    for _ in range(4):
        limits.take(eve)
    with pytest.raises(Problem) as refused:
        limits.take(eve)
    assert (refused.value.reason, refused.value.retry_after_seconds) == ("TOO_MANY_CALLS", 0.5)
    limits.take(ann)
    now[0] = 0.5
    limits.take(eve)
    now[0] = 100.0
    for _ in range(4):
        limits.take(eve)
    for uncounted in (OPERATOR, Identity("service/queue", frozenset({Role.SERVICE}), None)):
        for _ in range(100):
            limits.take(uncounted)


async def test_limits_have_a_retry_delay_and_streams_are_released(mesh: Mesh, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, token = file.create(EVE)
    rules = LimitRules(calls_per_second=0.001, calls_at_once=4, streams=1)
    await mesh.serve(token=None, security=Security(Credentials("", file), None, Limits(rules)))
    hold, begun = asyncio.Event(), asyncio.Event()

    async def wait(request: Any, context: Any) -> None:
        begun.set()
        await hold.wait()

    mesh.jobs.answer = wait
    stub = mesh.job_stub(token)
    first = asyncio.ensure_future(consume(stub.WatchJobs(jobs_pb.WatchJobsRequest())))
    await begun.wait()
    second = await problem_of(consume(stub.WatchJobs(jobs_pb.WatchJobsRequest())))
    assert (second.code, second.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
    hold.set()
    await first
    await consume(stub.WatchJobs(jobs_pb.WatchJobsRequest()))
    await stub.GetJob(jobs_pb.GetJobRequest())
    third = await problem_of(stub.GetJob(jobs_pb.GetJobRequest()))
    assert (third.code, third.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert third.retry_after_seconds
    assert third.retry_after_seconds > 100


# The audit log -----------------------------------------------------------------------------------------------------


class Audited:
    def __init__(self, mesh: Mesh, path: Path) -> None:
        self.mesh, self.path = mesh, path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


async def audited(mesh: Mesh, tmp_path: Path, **options: Any) -> tuple[Audited, str]:
    file = TokenFile(tmp_path / "tokens.json")
    _, token = file.create(EVE)
    audit = Audit(tmp_path / "audit.jsonl", "queue", **options)
    await mesh.serve(token=None, security=Security(Credentials("", file), None, None, audit))
    return Audited(mesh, tmp_path / "audit.jsonl"), token


SPEC = job_pb2.JobSpec(name="train", tenant="lab", command=["run", "--password=hunter2"], environment={"KEY": "s3cret"})


async def test_changes_are_audited_without_secrets(mesh: Mesh, tmp_path: Path) -> None:
    log, token = await audited(mesh, tmp_path)
    await mesh.job_stub(token).GetJob(jobs_pb.GetJobRequest(id="0abc"))
    assert log.lines() == []  # reads only if enabled
    await mesh.job_stub(token).CreateJob(jobs_pb.CreateJobRequest(spec=SPEC, request_id="r1"))
    (line,) = log.lines()
    assert {key: line[key] for key in ("who", "roles", "what", "on", "answer", "service")} == {
        "who": "eve", "roles": ["user"], "what": "CreateJob", "on": {"name": "train", "tenant": "lab"}, "answer": "OK",
        "service": "queue",
    }  # fmt: skip
    assert line["from"].startswith("ipv4:127.0.0.1:")
    text = log.path.read_text()
    assert not [secret for secret in ("hunter2", "s3cret", token) if secret in text]
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    await mesh.job_stub(token).CreateJob(jobs_pb.CreateJobRequest(spec=SPEC, validate_only=True))
    assert len(log.lines()) == 1  # nothing was changed


async def test_forwarded_calls_are_decoded_for_the_audit_log(tmp_path: Path) -> None:
    """A follower forwards bytes; a rejected stream is audited all the same."""
    audit = Audit(tmp_path / "audit.jsonl", "queue")
    path = "/cotenant.v1.JobService/CreateJob"
    request = jobs_pb.CreateJobRequest(spec=SPEC).SerializeToString()
    made = jobs_pb.CreateJobResponse(job=job_pb2.Job(id="0abc")).SerializeToString()
    await audit.entry(path, ROLES[path], "ipv4:1").answered(request, made)
    await audit.entry(path, ROLES[path], "ipv4:1").answered(b"\xff\xff", b"\xff\xff")
    connect = "/cotenant.agent.v1.AgentService/Connect"
    await audit.entry(connect, ROLES[connect], "ipv4:1").refused(iter([]), Problem(grpc.StatusCode.UNKNOWN, "X", ""))
    told = [json.loads(line)["on"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert told == [{"id": "0abc", "name": "train", "tenant": "lab"}, {}, {}]


async def test_a_missing_directory_is_created(tmp_path: Path) -> None:
    """A service with certificates creates no token there, and so no directory."""
    audit = Audit(tmp_path / "state" / "audit.jsonl", "queue")
    await audit.append({"what": "CreateJob"})
    assert json.loads((tmp_path / "state" / "audit.jsonl").read_text())["what"] == "CreateJob"


async def test_rejected_callers_are_audited_for_every_method(mesh: Mesh, tmp_path: Path) -> None:
    log, token = await audited(mesh, tmp_path)
    await problem_of(mesh.job_stub("guessed").GetJob(jobs_pb.GetJobRequest(id="0abc")))
    await problem_of(
        observation_grpc.ObservationServiceStub(mesh.channel(token)).Observe(observation_pb.ObserveRequest())
    )
    await problem_of(consume(mesh.job_stub("").WatchJobs(jobs_pb.WatchJobsRequest())))
    told = [(line["who"], line["what"], line["answer"], line["reason"]) for line in log.lines()]
    assert told == [
        ("", "GetJob", "UNAUTHENTICATED", "TOKEN_WRONG"),
        ("eve", "Observe", "PERMISSION_DENIED", "ROLE_MAY_NOT"),
        ("", "WatchJobs", "UNAUTHENTICATED", "TOKEN_MISSING"),
    ]
    assert "guessed" not in log.path.read_text()


async def test_a_rejected_stream_is_audited_without_a_target(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    entry = Audit(path, "placement").entry(
        "/cotenant.agent.v1.AgentService/Connect", ROLES["/cotenant.v1.JobService/CreateJob"], "ipv4:127.0.0.1:1"
    )
    await entry.refused(iter(()), Problem(grpc.StatusCode.UNAVAILABLE, "NOT_LEADER", "another one leads"))
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["what"], line["on"], line["reason"]) == ("Connect", {}, "NOT_LEADER")


async def test_a_rejected_change_has_its_reason_and_reads_are_optional(mesh: Mesh, tmp_path: Path) -> None:
    log, token = await audited(mesh, tmp_path, reads=True, fsync=True)

    async def fail(request: Any, context: Any) -> None:
        raise Problem(grpc.StatusCode.NOT_FOUND, "JOB_NOT_FOUND", "there is none")

    mesh.jobs.answer = fail
    hostile = '0abc\n{"who": "forged"}' + "x" * 4000
    await problem_of(mesh.job_stub(token).GetJob(jobs_pb.GetJobRequest(id=hostile)))
    (line,) = log.lines()  # one line, whatever the id holds
    assert (line["answer"], line["reason"]) == ("NOT_FOUND", "JOB_NOT_FOUND")
    assert len(line["on"]["id"]) == 256


async def test_a_renamed_log_is_recreated_and_an_unwritable_log_stops_no_call(mesh: Mesh, tmp_path: Path) -> None:
    log, token = await audited(mesh, tmp_path, clock=count().__next__)
    create = jobs_pb.CreateJobRequest(spec=SPEC)
    await mesh.job_stub(token).CreateJob(create)
    log.path.rename(tmp_path / "audit.jsonl.1")
    await mesh.job_stub(token).CreateJob(create)
    assert len(log.lines()) == 1
    log.path.unlink()
    log.path.mkdir()
    await mesh.job_stub(token).CreateJob(create)
    log.path.rmdir()
    await mesh.job_stub(token).CreateJob(create)
    assert len(log.lines()) == 2  # with the one that was deleted within a second


async def test_the_log_is_limited_in_files_and_bytes(tmp_path: Path) -> None:
    """Two processes share it: each file is rotated once, and only lines of the oldest file are lost."""
    path = tmp_path / "audit.jsonl"
    ticks = count().__next__
    logs = [Audit(path, name, bytes_max=2_000, files=3, clock=ticks) for name in ("queue", "placement")]
    for number in range(200):
        await logs[number % 2].append({"number": number, "what": "x" * 100})
    files = sorted(path.parent.glob("audit.jsonl*"))
    assert [one.name for one in files] == ["audit.jsonl", *(f"audit.jsonl.{n}" for n in (1, 2, 3)), "audit.jsonl.lock"]
    assert all(one.stat().st_size < 2_300 for one in files)
    kept = [json.loads(line)["number"] for one in rotated(path, 3) for line in one.read_text().splitlines()]
    assert kept == list(range(200 - len(kept), 200))
    assert len(kept) > 30
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_log_that_cannot_be_rotated_keeps_growing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    (tmp_path / "audit.jsonl.1").mkdir()
    (tmp_path / "audit.jsonl.1" / "x").touch()
    audit = Audit(path, "queue", bytes_max=1, files=1)
    for _ in range(3):
        await audit.append({"what": "x"})
    assert len(path.read_text().splitlines()) == 3


async def test_a_truncated_line_damages_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = Audit(tmp_path / "audit.jsonl", "queue")
    with monkeypatch.context() as patch:
        whole = os.write
        patch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:20]))  # the disk is full
        await audit.append({"what": "cut"})
    await audit.append({"what": "whole"})
    assert json.loads((tmp_path / "audit.jsonl").read_text().splitlines()[1])["what"] == "whole"


async def test_each_line_is_also_exported_as_a_log_record(
    mesh: Mesh, tmp_path: Path, otlp: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", otlp.endpoint)
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "otlp")
    telemetry.setup("queue")
    try:
        log, token = await audited(mesh, tmp_path)
        await mesh.job_stub(token).CreateJob(jobs_pb.CreateJobRequest(spec=SPEC, request_id="r1"))
    finally:
        await asyncio.to_thread(telemetry.shutdown)
        structlog.reset_defaults()
    [(body, told)] = otlp.records
    [line] = log.lines()
    assert body == "audit"
    assert (told["who"], told["what"], told["on.name"], told["answer"]) == ("eve", "CreateJob", "train", "OK")
    assert told["roles"] == line["roles"] == ["user"]
    assert set(told) == {*(set(line) - {"on"}), "on.name", "on.tenant"}
    assert "hunter2" not in str(told)


def test_two_processes_append_to_one_file(tmp_path: Path) -> None:
    async def both() -> None:
        logs = [Audit(tmp_path / "audit.jsonl", name) for name in ("queue", "placement")]
        await asyncio.gather(*(log.append({"what": "x" * 300}) for log in logs for _ in range(50)))

    asyncio.run(both())
    assert len([json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]) == 100
    assert os.stat(tmp_path / "audit.jsonl").st_size > 30_000


async def test_a_change_by_a_caller_that_left_is_audited_too(mesh: Mesh, tmp_path: Path) -> None:
    log, token = await audited(mesh, tmp_path)
    begun = asyncio.Event()

    async def hang(request: Any, context: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    mesh.jobs.answer = hang
    stub = mesh.job_stub(token)
    for validate_only in (True, False):
        call = stub.CreateJob(jobs_pb.CreateJobRequest(spec=SPEC, validate_only=validate_only))
        await begun.wait()
        begun.clear()
        call.cancel()
    async with asyncio.timeout(60):
        while not log.lines():  # noqa: ASYNC110  # nobody hears of the line
            await asyncio.sleep(0.01)
    (line,) = log.lines()
    told = {key: line[key] for key in ("who", "what", "on", "answer", "reason")}
    assert told == {
        "who": "eve", "what": "CreateJob", "on": {"name": "train", "tenant": "lab"}, "answer": "CANCELLED",
        "reason": "NOT_ANSWERED",
    }  # fmt: skip
