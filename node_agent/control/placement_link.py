"""The agent's stream to placement: says hello, beats, reports, and hears orders; comes back after every loss."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import grpc
import grpc.aio
import structlog

from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.supervisor.lease import boot_seconds
from cotenant.rpc import channel
from cotenant.rpc.task_cancellation import end
from cotenant.security.validity import Validity
from cotenant.v1 import node_service_pb2, node_service_pb2_grpc, resources_pb2

log = structlog.get_logger()

WELCOME_SECONDS_MAX = 15.0
HEARTBEAT_SECONDS_DEFAULT = 5.0
HEARTBEAT_SECONDS_MIN = 0.05
KEPT_REPORTS_MAX = 1000
BEATS_WITHIN_PATIENCE = 4
LAST_WORDS_SECONDS_MAX = 1.0

Upload = Callable[[AsyncIterator[node_service_pb2.UploadOutputRequest]], Any]


class Unwelcome(Exception):
    """Placement did not take us on, or is not the one to obey."""


class PlacementLink:
    """One stream at a time. What is told while there is none is not kept: the next hello tells all.

    Answers to resizes and profiles alone are kept, for a hello does not have them. A beat goes out at least as often
    as placement wants, and several times within `patience_seconds`.
    """

    def __init__(
        self,
        endpoint: str,
        token: str,
        *,
        hello: Callable[[], node_service_pb2.Hello],
        welcome: Callable[[node_service_pb2.Welcome], bool],
        obey: Callable[[node_service_pb2.ConnectResponse], None],
        heard: Callable[[float], None],
        patience_seconds: Callable[[], float],
        rng: Random,
        condition: Callable[[], node_service_pb2.AgentCondition] = node_service_pb2.AgentCondition,
    ) -> None:
        self._endpoint, self._token = endpoint, token
        self._hello, self._welcome, self._obey, self._heard = hello, welcome, obey, heard
        self._patience_seconds, self._condition = patience_seconds, condition
        self._beat_seconds = 0.0
        self._backoff = Backoff(first_seconds=0.2, longest_seconds=5.0, rng=rng)
        self._outbox = node_service_pb2.ConnectRequest()
        self._progress: dict[AttemptKey, node_service_pb2.ProgressReport] = {}
        self._wake = asyncio.Event()
        self._writing = False
        self._said = asyncio.Event()  # after each message
        self._told_certificate: Validity | None = None  # as placement has heard
        self._stub: node_service_pb2_grpc.AgentServiceAsyncStub | None = None

    def report(self, report: node_service_pb2.AttemptReport) -> None:
        """Tell of an attempt; all reports go out, in order."""
        self._outbox.reports.append(report)
        self._wake.set()

    def report_resize(self, report: node_service_pb2.ResizeReport) -> None:
        """Answer an order to resize; it goes out also where a new stream must be opened first."""
        self._outbox.resized.append(report)
        self._wake.set()

    def report_profile(self, report: node_service_pb2.ProfileReport) -> None:
        """Tell what came of a profile; it goes out also where a new stream must be opened first."""
        self._outbox.profiled.append(report)
        self._wake.set()

    def report_progress(self, report: node_service_pb2.ProgressReport) -> None:
        """Tell how far a job has come; only the newest goes out."""
        self._progress[AttemptKey(report.job_id, report.number)] = report
        self._wake.set()

    def report_inventory(self, inventory: resources_pb2.Inventory) -> None:
        """Tell that the node has changed."""
        self._outbox.inventory.CopyFrom(inventory)
        self._wake.set()

    async def upload(self, pieces: AsyncIterator[node_service_pb2.UploadOutputRequest]) -> None:
        """Send output over the present connection. Raises `Unwelcome` without one, or grpc's error."""
        if self._stub is None:
            raise Unwelcome("there is no connection to placement")
        await self._stub.UploadOutput(pieces)

    async def say_last(self) -> None:
        """Wait until what was told has gone out, where it can and that takes no long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS_MAX):
                while self._stub is not None and (self._writing or self._outbox.ByteSize()):
                    self._said.clear()
                    await self._said.wait()

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        while True:
            try:
                await self._hold_stream()
                reason = "placement ended the stream"
            except Unwelcome as error:
                reason = str(error)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            wait_seconds = self._backoff.next_seconds()
            log.warning("placement_away", endpoint=self._endpoint, why=reason, retry_seconds=round(wait_seconds, 2))
            await asyncio.sleep(wait_seconds)

    async def _hold_stream(self) -> None:
        async with channel.connect(self._endpoint, self._token) as connection:
            stub: Any = node_service_pb2_grpc.AgentServiceStub(connection)
            call = stub.Connect()
            try:
                heartbeat_seconds = await self._enter(call)
                self._stub = stub
                sender = asyncio.create_task(self._send(call, heartbeat_seconds))
                try:
                    await self._receive(call)
                finally:
                    await end(sender)
            finally:
                self._stub = None
                call.cancel()

    async def _enter(self, call: Any) -> float:
        """Say hello and be welcomed; returns the heartbeat's interval in seconds."""
        self._outbox = node_service_pb2.ConnectRequest(
            resized=self._outbox.resized[-KEPT_REPORTS_MAX:], profiled=self._outbox.profiled[-KEPT_REPORTS_MAX:]
        )
        self._progress.clear()
        try:
            async with asyncio.timeout(WELCOME_SECONDS_MAX):
                sent = self._beat()
                first = node_service_pb2.ConnectRequest(hello=self._hello(), beat=sent, condition=self._condition())
                self._told_certificate = None
                self._tell_certificate(first)
                await call.write(first)
                response = await call.read()
        except TimeoutError:
            raise Unwelcome(f"no welcome within {WELCOME_SECONDS_MAX:.0f} s") from None
        if response is grpc.aio.EOF:
            raise Unwelcome(await call.details() or "placement ended the stream at once")
        if not response.HasField("welcome"):
            raise Unwelcome("placement did not begin with a welcome")
        if not self._welcome(response.welcome):
            raise Unwelcome(f"its term {response.welcome.term}, or its store, is older than one that was seen")
        self._backoff.reset()
        self._heard(sent / 1000)
        log.info("placement_joined", endpoint=self._endpoint, term=response.welcome.term)
        self._obey(response)
        told = response.welcome.heartbeat_interval.ToMicroseconds() / 1e6
        return max(HEARTBEAT_SECONDS_MIN, told) if told > 0 else HEARTBEAT_SECONDS_DEFAULT

    async def _receive(self, call: Any) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.HasField("welcome") and not self._welcome(response.welcome):
                raise Unwelcome(f"its term {response.welcome.term}, or its store, is older than one that was seen")
            if response.heard:
                self._heard(response.heard / 1000)
            self._obey(response)
        if await call.code() is not grpc.StatusCode.OK:
            raise Unwelcome(f"{(await call.code()).name}: {await call.details()}")

    async def _send(self, call: Any, heartbeat_seconds: float) -> None:
        """Send what there is, in one message; after a silent interval, a beat alone."""
        try:
            while True:
                hasty = self._patience_seconds() / BEATS_WITHIN_PATIENCE
                beat_seconds = max(HEARTBEAT_SECONDS_MIN, min(heartbeat_seconds, hasty))
                try:
                    async with asyncio.timeout(beat_seconds):
                        await self._wake.wait()
                except TimeoutError:
                    pass  # nothing to say is said by a beat
                self._wake.clear()
                self._writing = True
                await call.write(self._take_outbox(beat_seconds))
                self._writing = False
                self._said.set()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.info("placement_stream_broken", error=type(error).__name__)
            call.cancel()

    def _beat(self) -> int:
        """What placement is to say that it has heard: when this was sent, in milliseconds since boot."""
        self._beat_seconds = boot_seconds()
        return int(self._beat_seconds * 1000)

    def _tell_certificate(self, message: node_service_pb2.ConnectRequest) -> None:
        """Say how long the certificate is valid that is shown, where that is not known there."""
        watched = channel.shown()
        shown = watched.material.validity if watched else None
        if shown and shown != self._told_certificate:
            message.certificate.CopyFrom(shown.to_wire())
        self._told_certificate = shown

    def _take_outbox(self, beat_seconds: float) -> node_service_pb2.ConnectRequest:
        message, self._outbox = self._outbox, node_service_pb2.ConnectRequest()
        message.progress.extend(self._progress.values())
        self._progress.clear()
        self._tell_certificate(message)
        if boot_seconds() - self._beat_seconds >= beat_seconds / 2 or not message.ByteSize():
            message.beat = self._beat()
            message.condition.CopyFrom(self._condition())
        return message
