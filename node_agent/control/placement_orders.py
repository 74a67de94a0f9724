"""Hands placement's orders to the parts that carry them out."""

from __future__ import annotations

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.node_health import NodeHealth
from cotenant.node_agent.control.output_upload import OutputUploads, Upload
from cotenant.node_agent.control.session_host import Serve, SessionHost


class PlacementOrders:
    """The orders of a message: assignments, resizes, profiles, time limits, stops, acknowledgements, then the rest."""

    def __init__(
        self, manager: AttemptManager, health: NodeHealth, uploads: OutputUploads, sessions: SessionHost
    ) -> None:
        self._manager, self._health, self._uploads, self._sessions = manager, health, uploads, sessions

    def apply(self, response: agent_pb2.ConnectResponse, upload: Upload, serve: Serve) -> None:
        """Start to carry out the orders of a message; `upload` and `serve` carry the output and the sessions."""
        for assignment in response.assignments:
            self._manager.assign(assignment)
        for resize in response.resizes:
            self._manager.resize(resize)
        for profile in response.profiles:
            self._manager.profile(profile)
        for limit in response.time_limits:
            self._manager.limit_time(limit)
        for stop in response.stops:
            self._manager.stop(stop)
        for ack in response.acks:
            self._manager.acknowledge(ack)
        if response.released_gpus:
            self._health.release(response.released_gpus)
        for read in response.reads:
            self._uploads.order(read, upload)
        for session in response.sessions:
            self._sessions.order(session, serve)
