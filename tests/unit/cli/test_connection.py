"""A command that knows one address of a mesh of separate processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest_asyncio
from tests.support.etcd_server import free_ports

from cotenant.cli.connection import Mesh
from cotenant.cli.mesh.replicas import look
from cotenant.leadership.process_service import serve_process_service
from cotenant.rpc.access import Access
from cotenant.rpc.endpoints import Endpoints
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.v1 import contention_service_pb2 as contention_pb
from cotenant.v1 import contention_service_pb2_grpc as contention_grpc
from cotenant.v1 import node_service_pb2_grpc as nodes_grpc
from cotenant.v1.policy_service_pb2 import ListPoliciesRequest

TOKEN = "a-token-for-tests"
NODE, CONTENTION = "cotenant.v1.NodeService", "cotenant.v1.ContentionService"


class Contention(contention_grpc.ContentionServiceServicer):
    """A replica with one node."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    async def ListSamples(self, request: Any, context: Any) -> contention_pb.ListSamplesResponse:
        return contention_pb.ListSamplesResponse(samples=[contention_pb.NodeSample(node_id=self._node_id)])


class Separate:
    """A placement process, and two of contention."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.placement, *self.contention = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.endpoints = Endpoints(placement=self.placement, contention="|".join(self.contention))

    async def start(self) -> None:
        nodes = nodes_grpc.NodeServiceServicer()  # type: ignore[abstract]  # nobody calls it
        await self._serve(self.placement, nodes_grpc.add_NodeServiceServicer_to_server, nodes, NODE)
        for index, address in enumerate(self.contention):
            servicer = Contention(f"n{index}")  # type: ignore[abstract]  # the generated base answers the rest
            await self._serve(address, contention_grpc.add_ContentionServiceServicer_to_server, servicer, CONTENTION)

    async def _serve(self, address: str, add: Any, servicer: Any, service: str) -> None:
        server = Server(address, TOKEN)
        server.add(add, servicer, service)
        group = "cotenant.placement_policies" if service == NODE else "cotenant.contention_policies"
        serve_policies(server).use(group)
        serve_process_service(server)
        server.route(self.endpoints)
        await server.start()
        self._stack.push_async_callback(server.stop, 0)

    def mesh(self, endpoints: Endpoints) -> Mesh:
        mesh = Mesh(lambda: Access(endpoints, TOKEN))
        self._stack.push_async_callback(mesh.close)
        return mesh


@pytest_asyncio.fixture
async def separate() -> AsyncIterator[Separate]:
    async with AsyncExitStack() as stack:
        made = Separate(stack)
        await made.start()
        yield made


def entries(separate: Separate) -> list[Endpoints]:
    """Return the ways in which a user may name the mesh."""
    first, second = separate.contention
    return [
        Endpoints.one(separate.placement),
        Endpoints.one(first),
        Endpoints(placement=separate.placement),
        Endpoints(contention=f"{first}|{second}"),
        separate.endpoints,
    ]


async def test_every_replica_of_contention_answers(separate: Separate) -> None:
    async def listed(stub: Any) -> list[str]:
        return [one.node_id for one in (await stub.ListSamples(contention_pb.ListSamplesRequest())).samples]

    for endpoints in entries(separate):
        assert sorted(await separate.mesh(endpoints).call_contention_replicas(listed)) == ["n0", "n1"], endpoints


async def test_every_process_is_listed_once(separate: Separate) -> None:
    for endpoints in entries(separate):
        found = await look(separate.mesh(endpoints))
        assert [(one["service"], one["address"], one["state"]) for one in found.processes] == sorted(
            [("contention", address, "serves") for address in separate.contention]
            + [("placement", separate.placement, "serves")]
        ), endpoints
        assert found.unknown == ["queue", "predictor"]


async def test_a_process_with_two_names_is_listed_once(separate: Separate) -> None:
    port = separate.placement.rpartition(":")[2]
    found = await look(separate.mesh(Endpoints.one(f"localhost:{port}")))
    assert sorted(one["service"] for one in found.processes) == ["contention", "contention", "placement"]


async def test_policies_of_all_services_are_listed(separate: Separate) -> None:
    for endpoints in entries(separate)[:4]:
        stubs = separate.mesh(endpoints).policies()
        answers = await asyncio.gather(
            *(stub.ListPolicies(ListPoliciesRequest()) for stub in stubs.values()), return_exceptions=True
        )
        groups = {one.group for answer in answers if not isinstance(answer, BaseException) for one in answer.policies}
        assert groups == {"cotenant.placement_policies", "cotenant.contention_policies"}, endpoints
