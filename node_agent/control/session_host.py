"""Carries sessions in this node's attempts: commands, and connections to ports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress

import grpc.aio
import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec.session_checks import is_size, start_violations
from cotenant.node_agent.control.attempt import Attempts
from cotenant.node_agent.control.output_upload import NotConnected
from cotenant.node_agent.control.session_endpoints import CommandEndpoint, Endpoint, SocketEndpoint
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.runtime_port import Runtime, SessionCommand, SessionFailed, SessionRuntime
from cotenant.rpc.session_peer import SessionBroken, SessionPeer
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.v1.session_pb2 import SessionEnd, SessionFrame, SessionStart, TerminalSize

log = structlog.get_logger()

SESSIONS_MAX, SESSIONS_PER_JOB_MAX = 64, 16  # commands, of a node and of a job
CONNECTIONS_MAX, CONNECTIONS_PER_JOB_MAX = 1_024, 256
END_SECONDS_MAX = 5.0  # for the caller to take the end of a session
JOB_END_SECONDS_MAX = 1.0  # between the end of a command and that of its job, which killed it

Up = AsyncIterator[agent_pb2.ServeSessionRequest]
Down = AsyncGenerator[agent_pb2.ServeSessionResponse, None]
Serve = Callable[[Up], Down]


class SessionHost:
    """The sessions that this agent carries, each over a call of its own to placement."""

    def __init__(self, runtime: Runtime, attempts: Attempts) -> None:
        self._runtime, self._attempts = runtime, attempts
        self._commands: Counter[str] = Counter()  # by job
        self._connections: Counter[str] = Counter()
        self._ended: dict[AttemptKey, set[asyncio.Event]] = {}  # of the attempts with sessions
        self._background = BackgroundTasks()

    def order(self, order: agent_pb2.SessionOrder, serve: Serve) -> None:
        """Start to carry a session over a call that `serve` makes."""
        self._background.start(self._carry(order, serve))

    def attempt_ended(self, key: AttemptKey) -> None:
        """End the sessions of an attempt."""
        for ended in self._ended.get(key, ()):
            ended.set()

    async def close(self) -> None:
        """End all sessions."""
        await self._background.close()

    async def _carry(self, order: agent_pb2.SessionOrder, serve: Serve) -> None:
        start, key = order.start, AttemptKey(order.start.id, order.number)
        counts = self._commands if start.HasField("exec") else self._connections
        counts[key.job_id] += 1
        job_ended = asyncio.Event()
        self._ended.setdefault(key, set()).add(job_ended)
        try:
            await self._serve(order.session_id, start, key, serve, job_ended)
        except (grpc.aio.AioRpcError, NotConnected, SessionBroken, OSError) as error:
            log.info("session_failed", attempt=str(key), error=f"{type(error).__name__}: {error}")
        finally:
            counts[key.job_id] -= 1
            counts += Counter()  # drops what is zero
            self._ended[key].discard(job_ended)
            if not self._ended[key]:
                del self._ended[key]

    async def _serve(
        self, session_id: str, start: SessionStart, key: AttemptKey, serve: Serve, job_ended: asyncio.Event
    ) -> None:
        try:
            endpoint = await self._open(start, key)
        except SessionFailed as error:
            await _refuse(session_id, serve, SessionEnd(error=str(error), reason="SESSION_NOT_STARTED"))
            return
        try:
            await _run(session_id, endpoint, serve, job_ended)
        finally:
            await endpoint.close()

    async def _open(self, start: SessionStart, key: AttemptKey) -> Endpoint:
        """Start what a session is to do. Raises `SessionFailed`."""
        if wrong := start_violations(start):
            raise SessionFailed("; ".join(f"{one.field} {one.description}" for one in wrong))
        attempt = self._attempts.get(key)
        if attempt is None or attempt.status.ended:
            raise SessionFailed(f"job {key.job_id} is not running on this node")
        self._check_counts(start, key.job_id)
        if start.HasField("forward"):
            return await SocketEndpoint.connect(start.forward.port, key.job_id)
        if not isinstance(self._runtime, SessionRuntime):
            raise SessionFailed(f"the runtime {self._runtime.name} runs no commands in jobs")
        with_terminal = start.exec.HasField("terminal")
        size = (start.exec.terminal.rows, start.exec.terminal.columns) if with_terminal else None
        variables = {"TERM": start.exec.terminal_type or "dumb"} if with_terminal else {}
        wanted = SessionCommand(list(start.exec.command), start.rank, size, variables)
        endpoint = CommandEndpoint(await self._runtime.open_session(key, wanted))
        try:
            await endpoint.started()
        except BaseException:
            await endpoint.close()
            raise
        return endpoint

    def _check_counts(self, start: SessionStart, job_id: str) -> None:
        """Refuse a session, which is counted already, beyond the limits. Raises `SessionFailed`."""
        counts, most, most_of_job, what = (
            (self._connections, CONNECTIONS_MAX, CONNECTIONS_PER_JOB_MAX, "forwarded connections")
            if start.HasField("forward")
            else (self._commands, SESSIONS_MAX, SESSIONS_PER_JOB_MAX, "sessions")
        )
        if counts[job_id] > most_of_job:
            raise SessionFailed(f"job {job_id} has {most_of_job} {what} on this node already, which is the limit")
        if counts.total() > most:
            raise SessionFailed(f"this node has {most} {what} already, which is the limit")


async def _run(session_id: str, endpoint: Endpoint, serve: Serve, job_ended: asyncio.Event) -> None:
    """Carry a session that is open until it ends, its job ends or its caller is gone."""

    def resize(size: TerminalSize) -> None:
        if is_size(size):
            endpoint.resize(size.rows, size.columns)

    peer = SessionPeer(endpoint.sources, endpoint.sinks, on_terminal=resize)
    await peer.send(SessionFrame(started=True))
    carrying = asyncio.create_task(_exchange(peer, serve(_requests(session_id, peer))), name="session")
    ending = asyncio.create_task(_end(endpoint, peer, job_ended), name="session-end")
    try:
        await asyncio.wait({carrying, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await peer.finish(ending.result())
            with suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS_MAX):
                    await asyncio.wait({carrying})
        if carrying.done():
            carrying.result()
    finally:
        await cancel_and_wait(carrying, ending)


async def _end(endpoint: Endpoint, peer: SessionPeer, job_ended: asyncio.Event) -> SessionEnd:
    """Wait for the end of a session or of its job; return how it ended."""
    ended = asyncio.create_task(endpoint.ended(peer))
    job = asyncio.create_task(job_ended.wait())
    try:
        await asyncio.wait({ended, job}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and ended.result().signal:  # perhaps because its job was ending
            await asyncio.wait({job}, timeout=JOB_END_SECONDS_MAX)
        if job.done():
            return SessionEnd(error="the job has ended, and the session with it", reason="JOB_ENDED")
        return ended.result()
    finally:
        await cancel_and_wait(ended, job)


async def _exchange(peer: SessionPeer, responses: Down) -> None:
    """Carry a session over a call, and end the call with it."""
    async with aclosing(responses), aclosing(_frames(responses)) as frames:
        await peer.run(frames)


async def _requests(session_id: str, peer: SessionPeer) -> Up:
    yield agent_pb2.ServeSessionRequest(session_id=session_id)
    async for frame in peer.frames():
        yield agent_pb2.ServeSessionRequest(frame=frame)


async def _frames(responses: Down) -> AsyncGenerator[SessionFrame, None]:
    async for response in responses:
        yield response.frame


async def _refuse(session_id: str, serve: Serve, end: SessionEnd) -> None:
    """Answer an order that cannot be carried out."""

    async def answer() -> Up:
        yield agent_pb2.ServeSessionRequest(session_id=session_id)
        yield agent_pb2.ServeSessionRequest(frame=SessionFrame(end=end))

    async for _ in serve(answer()):
        continue
