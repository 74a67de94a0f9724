"""Relays sessions between their callers and the agents of the nodes where jobs run; placement keeps none of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import errors
from cotenant.core.model.node_capabilities import Capability
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.rpc.frame_pipe import FramePipe
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.security.identity import check_node
from cotenant.services.placement.agents.agent_sessions import Sessions

ANSWER_SECONDS_MAX = 10.0


class _Relayed:
    """One session: its frames in both directions."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.to_agent, self.to_caller = FramePipe(), FramePipe()
        self.answered = asyncio.Event()  # the agent carries it

    def close(self) -> None:
        """End both directions: the caller is gone, or the agent."""
        self.to_agent.close()
        self.to_caller.close()


class SessionRelay:
    """Sessions in progress, by their ids."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._relayed: dict[str, _Relayed] = {}

    async def open(
        self, requests: AsyncIterator[placement_pb2.OpenAttemptSessionRequest]
    ) -> AsyncGenerator[placement_pb2.OpenAttemptSessionResponse, None]:
        """Order a session from an agent; yield the agent's frames, and pass on the caller's.

        Raises:
            Problem: the agent carries no sessions, is disconnected, does not answer, or disconnects before the end.
        """
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("start"):
            raise errors.invalid([errors.Violation("start", "is missing in the first message")])
        self._sessions.require(first.node_id, Capability.SESSIONS)
        session_id, relayed = secrets.token_hex(16), _Relayed(first.node_id)
        order = agent_pb2.SessionOrder(session_id=session_id, start=first.start, number=first.number)
        self._relayed[session_id] = relayed
        sending = asyncio.create_task(_pass_on(requests, relayed.to_agent), name="session-to-agent")
        try:
            if not self._sessions.send(first.node_id, agent_pb2.ConnectResponse(sessions=[order])):
                raise _away(first.node_id)
            await _answered(relayed)
            while (frame := await relayed.to_caller.get()) is not None:
                yield placement_pb2.OpenAttemptSessionResponse(frame=frame)
                if frame.HasField("end"):
                    return
            raise _away(first.node_id)
        finally:
            del self._relayed[session_id]
            relayed.close()
            await cancel_and_wait(sending)

    async def serve(
        self, requests: AsyncIterator[agent_pb2.ServeSessionRequest]
    ) -> AsyncGenerator[agent_pb2.ServeSessionResponse, None]:
        """Carry a session for an agent: yield the caller's frames, and pass on the agent's."""
        first = await anext(aiter(requests), None)
        relayed = self._relayed.get(first.session_id) if first else None
        if relayed is None or relayed.answered.is_set():
            return  # its caller is gone
        check_node(relayed.node_id)
        relayed.answered.set()
        receiving = asyncio.create_task(_pass_on(requests, relayed.to_caller), name="session-to-caller")
        try:
            while (frame := await relayed.to_agent.get()) is not None:
                yield agent_pb2.ServeSessionResponse(frame=frame)
        finally:
            relayed.close()
            await cancel_and_wait(receiving)


async def _pass_on(
    requests: AsyncIterator[placement_pb2.OpenAttemptSessionRequest] | AsyncIterator[agent_pb2.ServeSessionRequest],
    frames: FramePipe,
) -> None:
    """Put the frames of one side into the pipe to the other, and close it when that side is gone."""
    try:
        async for request in requests:
            if not await frames.put(request.frame):
                return
    finally:
        frames.close()


async def _answered(relayed: _Relayed) -> None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            await relayed.answered.wait()
    except TimeoutError:
        raise errors.unavailable(f"the agent of {relayed.node_id} does not answer", reason="NODE_AWAY") from None


def _away(node_id: str) -> errors.Problem:
    return errors.unavailable(
        f"the agent of {node_id} is disconnected, which ends the session; the job goes on", reason="NODE_AWAY"
    )
