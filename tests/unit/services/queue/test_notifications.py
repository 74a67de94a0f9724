"""Notifications about jobs reach their receivers, at least once, whatever happens in between."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import BACKFILL, Mesh, running

from cotenant.codec.errors import from_error
from cotenant.codec.job_events import kind_of
from cotenant.security.certificates import Authority
from cotenant.security.subjects import Subject
from cotenant.services.queue.jobs.notification_records import NOTIFICATIONS
from cotenant.services.queue.notifications import notifier, schedule
from cotenant.services.queue.notifications.rules import NotificationRules, SmtpRules
from cotenant.services.queue.notifications.webhook import Undelivered, Webhooks
from cotenant.store.memory import MemoryStore
from cotenant.v1 import array_service_pb2 as array_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

KEY = b"a key of the mesh"
LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
RULES = NotificationRules(KEY, {"vision": b"a key of vision"}, LOOPBACK, timeout_seconds=5.0)
NOTIFIED, GIVEN_UP = "notified", "not_notified"
Answer = Callable[["Receiver", asyncio.StreamWriter], Any]


def answering(*statuses: int) -> Answer:
    """Answer with these statuses in turn, then with the last."""

    def answer(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
        status = statuses[min(len(receiver.requests), len(statuses)) - 1]
        where = "Location: http://127.0.0.1:1/\r\n" if status // 100 == 3 else ""
        writer.write(f"HTTP/1.1 {status} x\r\n{where}Content-Length: 0\r\n\r\n".encode())

    return answer


def silent(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
    receiver.held.append(writer)  # keeps the connection open


def resetting(receiver: Receiver, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@dataclass
class Receiver:
    """An HTTP server on loopback that records requests."""

    answer: Answer
    port: int = 0
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    held: list[asyncio.StreamWriter] = field(default_factory=list)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers["Content-Length"]))
        async with self.arrived:
            self.requests.append((first, headers, body))
            self.arrived.notify_all()
        self.answer(self, writer)
        if writer not in self.held:
            writer.close()

    def url(self, path: str = "s3cret") -> str:
        return f"http://127.0.0.1:{self.port}/{path}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.requests]

    async def received(self, count: int = 1) -> None:
        async with asyncio.timeout(30), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)


@asynccontextmanager
async def receiving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver(answer)
    server = await asyncio.start_server(receiver.handle, "127.0.0.1", ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        for writer in receiver.held:
            writer.transport.abort()
        server.close()


@asynccontextmanager
async def notifying(rules: NotificationRules = RULES) -> AsyncIterator[Mesh]:
    async with running(MemoryStore(), queue_config=replace(BACKFILL, notifications=rules)) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "retry_seconds", lambda tries, draw: 0.01)
    monkeypatch.setattr(notifier, "STORE_RETRY_SECONDS", 0.01)


async def ended(mesh: Mesh, **fields: Any) -> str:
    """Return the id of a new job that was cancelled."""
    job_id = await mesh.submit(**fields)
    await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
    return job_id


async def event(mesh: Mesh, job_id: str, kind: str) -> str:
    """Wait for an event and return its detail."""
    async with asyncio.timeout(30):
        while True:
            answer: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
            if found := [one.detail for one in answer.events if kind_of(one) == kind]:
                return found[0]
            await asyncio.sleep(0.02)


async def nothing_left(mesh: Mesh) -> None:
    async with asyncio.timeout(30):
        while True:
            if not await mesh.records_left(NOTIFICATIONS):
                return
            await asyncio.sleep(0.02)


async def test_the_end_of_a_job_is_posted_signed_and_noted() -> None:
    async with receiving(answering(204)) as receiver, notifying() as mesh:
        job_id = await ended(mesh, name="bert", tenant="vision", notify=[receiver.url()])
        await receiver.received()
        first, headers, body = receiver.requests[0]
        assert first == "POST /s3cret HTTP/1.1"
        assert headers["Cotenant-Delivery"] == f"{job_id}.cancelled"
        at, digest = (part.partition("=")[2] for part in headers["Cotenant-Signature"].split(","))
        assert digest == hmac.new(b"a key of vision", f"{at}.".encode() + body, hashlib.sha256).hexdigest()
        said = json.loads(body)
        assert (said["event"], said["id"], said["name"], said["tenant"]) == ("cancelled", job_id, "bert", "vision")
        assert said["phase"] == "cancelled"
        assert said["end_time"]
        assert await event(mesh, job_id, NOTIFIED) == "cancelled, to 127.0.0.1"
        await nothing_left(mesh)
        assert len(receiver.requests) == 1


async def test_a_secret_is_only_in_the_record_of_the_notification() -> None:
    async with receiving(silent) as receiver, notifying() as mesh:
        job_id = await ended(mesh, notify=[receiver.url("s3cret")])
        await receiver.received()
        job = await mesh.job(job_id)
        assert job.spec.notify == [f"http://127.0.0.1:{receiver.port}/…"]
        with_secret = [entry.key for entry in (await mesh.store.list("")).entries if b"s3cret" in entry.value]
        assert with_secret == [NOTIFICATIONS + job_id]


@pytest.mark.parametrize("answer", [answering(500, 429, 200), answering(503, 200)], ids=["500 429", "503"])
async def test_a_failed_try_is_repeated_with_the_same_id(answer: Answer) -> None:
    async with receiving(answer) as receiver, notifying() as mesh:
        job_id = await ended(mesh, notify=[receiver.url()])
        await event(mesh, job_id, NOTIFIED)
        assert len({headers["Cotenant-Delivery"] for _, headers, _ in receiver.requests}) == 1
        assert len(receiver.requests) >= 2


@pytest.mark.parametrize(
    ("status", "why"),
    [(301, "it answered 301; redirects are not followed"), (410, "it answered 410")],
)
async def test_a_final_answer_is_not_tried_again(status: int, why: str) -> None:
    async with receiving(answering(status)) as receiver, notifying() as mesh:
        job_id = await ended(mesh, notify=[receiver.url()])
        assert await event(mesh, job_id, GIVEN_UP) == f"cancelled, to 127.0.0.1: {why}"
        await nothing_left(mesh)
        assert len(receiver.requests) == 1


@pytest.mark.parametrize(
    ("answer", "timeout_seconds", "why"),
    [(silent, 0.1, "no answer within 0.1 s"), (resetting, 30.0, "it closed the connection")],
    ids=["silent", "resetting"],
)
async def test_a_receiver_that_fails_is_given_up_and_holds_no_other(
    answer: Answer, timeout_seconds: float, why: str
) -> None:
    rules = replace(RULES, timeout_seconds=timeout_seconds, give_up_seconds=0.3)
    async with receiving(answer) as bad, notifying(rules) as mesh:
        waiting = [await ended(mesh, notify=[bad.url()]) for _ in range(6)]
        for job_id in waiting:
            assert await event(mesh, job_id, GIVEN_UP) == f"cancelled, to 127.0.0.1: {why}"
        await nothing_left(mesh)


async def test_a_silent_receiver_holds_no_other() -> None:
    async with receiving(silent) as bad, receiving(answering(200)) as good, notifying() as mesh:
        waiting = [await ended(mesh, notify=[bad.url()]) for _ in range(6)]
        await bad.received(schedule.OF_HOST_MAX)
        other = await ended(mesh, notify=[good.url().replace("127.0.0.1", "localhost")])
        assert await event(mesh, other, NOTIFIED) == "cancelled, to localhost"
        assert len(await mesh.records_left(NOTIFICATIONS)) >= len(waiting)


async def test_a_notification_survives_the_death_of_the_queue() -> None:
    async with receiving(silent) as receiver, notifying() as mesh:
        job_id = await ended(mesh, notify=[receiver.url()])
        await receiver.received()
        await mesh.kill("queue")
        receiver.answer = answering(200)
        await mesh.start("queue")
        assert await event(mesh, job_id, NOTIFIED)
        assert {one["id"] for one in receiver.bodies} == {job_id}
        await nothing_left(mesh)


async def test_an_array_sends_one_message_for_all_of_its_jobs() -> None:
    async with receiving(answering(200)) as receiver, notifying() as mesh:
        array = job_pb2.ArraySpec(ranges=[job_pb2.IndexRange(first=0, last=299)])
        array_id = await mesh.submit_array(array=array, notify=[receiver.url()])
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=f"{array_id}_7"))
        await mesh.arrays.CancelArray(array_pb.CancelArrayRequest(id=array_id))
        await nothing_left(mesh)
        [said] = receiver.bodies
        assert (said["kind"], said["id"], said["event"]) == ("array", array_id, "cancelled")
        assert sum(said["jobs"].values()) == 300


async def test_only_the_events_that_were_asked_for_are_sent() -> None:
    async with receiving(answering(200)) as receiver, notifying() as mesh:
        await mesh.agent("n1", gpus=2)
        only = [job_pb2.NOTIFICATION_TRIGGER_STARTED, job_pb2.NOTIFICATION_TRIGGER_FAILED]
        job_id = await mesh.submit(gpus=1, notify=[receiver.url()], notify_on=only)
        await event(mesh, job_id, NOTIFIED)
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=job_id))
        await mesh.reach(job_id, "CANCELLED")
        await nothing_left(mesh)
        assert [one["event"] for one in receiver.bodies] == ["started"]


async def test_a_mesh_without_settings_refuses_every_target_with_a_remedy() -> None:
    async with notifying(NotificationRules()) as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.submit(notify=["https://example.org/x", "mailto:ada@example.org"])
        problem = from_error(refused.value)
        assert [one.field for one in problem.violations] == ["spec.notify[0]", "spec.notify[1]"]
        assert "signing_key_file" in problem.violations[0].description
        assert "--no-notify" in problem.violations[1].description


async def test_an_internal_address_is_refused_before_and_after_its_name_is_resolved() -> None:
    async with receiving(answering(200)) as receiver, notifying(replace(RULES, allowed=())) as mesh:
        for target in ("https://127.0.0.1/", "https://[::1]/", "https://169.254.169.254/", "https://localhost/"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await mesh.submit(notify=[target])
            assert "has an internal address" in from_error(refused.value).violations[0].description
        webhooks = Webhooks(replace(RULES, allowed=()), mesh.parts["queue"].service.notifier._threads)
        with pytest.raises(Undelivered, match="internal address") as undelivered:
            await webhooks.post(f"https://localhost:{receiver.port}/", b"", {})
        assert not undelivered.value.passing
        assert receiver.requests == []


async def test_the_certificate_of_a_receiver_is_checked(tmp_path: Path) -> None:
    lab = Authority(tmp_path)
    lab.create()
    issued = lab.issue(Subject.parse("service/queue"), ["localhost"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(issued.path, issued.key_path)
    async with receiving(answering(200), tls) as receiver, notifying() as mesh:
        threads = mesh.parts["queue"].service.notifier._threads
        url = f"https://localhost:{receiver.port}/"
        with pytest.raises(Undelivered, match="certificate is not valid"):
            await Webhooks(RULES, threads).post(url, b"{}", {})
        await Webhooks(replace(RULES, ca_file=str(lab.cert_path)), threads).post(url, b"{}", {})
        assert len(receiver.requests) == 1


async def test_a_mail_is_sent_by_the_mail_server() -> None:
    mails: list[str] = []

    async def smtp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 sink\r\n")
        while line := await reader.readline():
            word = line[:4].upper()
            if word == b"DATA":
                writer.write(b"354 go on\r\n")
                mails.append((await reader.readuntil(b"\r\n.\r\n")).decode())
            writer.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
        writer.close()

    server = await asyncio.start_server(smtp, "127.0.0.1")
    rules = SmtpRules("127.0.0.1", server.sockets[0].getsockname()[1], "cluster@example.org", starttls=False)
    async with notifying(replace(RULES, smtp=rules)) as mesh:
        job_id = await ended(mesh, name="bert", notify=["mailto:ada@example.org"])
        assert await event(mesh, job_id, NOTIFIED) == "cancelled, to example.org"
    server.close()
    [mail] = mails
    assert "To: ada@example.org" in mail
    assert f"Subject: Cotenant: job {job_id} (bert) was cancelled" in mail
    assert f"Message-ID: <{job_id}.cancelled@example.org>" in mail


async def test_a_tenant_has_only_so_many_pending_notifications() -> None:
    rules = replace(RULES, pending_max=2)
    async with receiving(silent) as receiver, notifying(rules) as mesh:
        jobs = [await ended(mesh, notify=[receiver.url()]) for _ in range(3)]
        assert "too many pending" in await event(mesh, jobs[-1], GIVEN_UP)
        other = await ended(mesh, tenant="vision", notify=[receiver.url().replace("127.0.0.1", "localhost")])
        await receiver.received(3)
        assert other in {one["id"] for one in receiver.bodies}
