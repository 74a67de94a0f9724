"""Hands placement's orders to the parts that carry them out."""

from __future__ import annotations

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.node_health import NodeHealth
from cotenant.node_agent.control.output_upload import OutputUploads, Upload


class PlacementOrders:
    """The orders of a message, in this order: assignments, resizes, profiles, stops, acknowledgements, the rest."""

    def __init__(self, manager: AttemptManager, health: NodeHealth, uploads: OutputUploads) -> None:
        self._manager, self._health, self._uploads = manager, health, uploads

    def apply(self, response: agent_pb2.ConnectResponse, upload: Upload) -> None:
        """Start to carry out the orders of a message; output that they ask for goes through `upload`."""
        for assignment in response.assignments:
            self._manager.assign(assignment)
        for resize in response.resizes:
            self._manager.resize(resize)
        for profile in response.profiles:
            self._manager.profile(profile)
        for stop in response.stops:
            self._manager.stop(stop)
        for ack in response.acks:
            self._manager.acknowledge(ack)
        if response.released_gpus:
            self._health.release(response.released_gpus)
        for read in response.reads:
            self._uploads.order(read, upload)
