"""Tells what a process is among the replicas of its services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cotenant.rpc.server import Server
from cotenant.v1 import replica_service_pb2 as pb
from cotenant.v1 import replica_service_pb2_grpc as pb_grpc

SERVICE = "cotenant.v1.ReplicaService"


class ReplicaServicer(pb_grpc.ReplicaServiceServicer):
    """Describes the process that is asked, never another one."""

    def __init__(self, describe: Sequence[Callable[[], pb.Replica]]) -> None:
        self._describe = describe

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: Any) -> pb.ListReplicasResponse:
        """List the services of this process."""
        return pb.ListReplicasResponse(replicas=[describe() for describe in self._describe])


def serve_description(server: Server, *describe: Callable[[], pb.Replica]) -> None:
    """Add the service to a server that has not started yet."""
    server.add(pb_grpc.add_ReplicaServiceServicer_to_server, ReplicaServicer(describe), SERVICE)
