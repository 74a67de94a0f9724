"""Boards show what is there, and say what is missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

from cotenant.client.errors import CotenantError, PermissionDenied, Unavailable
from cotenant.v1.node_service_pb2 import ListNodesResponse, Node, NodeState
from cotenant.v1.resources_pb2 import Core, Gpu, Inventory
from cotenant.v1.tenant_service_pb2 import ListQueuesResponse, ListTenantUsageResponse, Queue, TenantUsage
from cotenant.web import queue_board
from cotenant.web.boards import MAY_NOT, Board, BoardKind

NO_LEADER = Unavailable("queue has no leader now")


class FakeMesh:
    """A mesh whose methods return or raise what they are given, by service and method."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, service: str) -> Any:
        def method(name: str) -> Callable[[Any], Awaitable[Any]]:
            async def call(request: Any) -> Any:
                answer = self._answers.get(f"{service}_{name}", NO_LEADER)
                answer = answer(request) if callable(answer) else answer
                if isinstance(answer, CotenantError):
                    raise answer
                return answer

            return call

        return type("Stub", (), {"__getattr__": lambda _, name: method(name)})()

    async def ask(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return what `work` returns."""
        return await work(self)


def node(name: str, gpus: int, used: int, *, ill: int = 0, state: Any = NodeState.NODE_STATE_READY) -> Node:
    parts = [Gpu(uuid=f"{name}{one}", unhealthy_reason="ECC" if one < ill else "") for one in range(gpus)]
    return Node(
        id=name,
        state=state,
        inventory=Inventory(gpus=parts, cores=[Core(id=one) for one in range(8)]),
        used_gpu_milli=used,
        used_cores=3,
    )


async def test_without_a_leader_the_queue_page_still_shows_what_is_free() -> None:
    nodes = ListNodesResponse(nodes=[node("a", 4, 1500), node("b", 4, 0, ill=1)])
    found = await queue_board.read(FakeMesh(nodes_ListNodes=nodes).ask)
    assert "no leader" in found["queues"]["trouble"]
    assert "no leader" in found["shares"]["trouble"]
    assert (found["free"]["trouble"], found["free"]["rows"][0]["gpus_free"]) == ("", 5.5)


async def test_without_placement_the_queue_page_still_shows_its_rules_and_shares() -> None:
    queues = ListQueuesResponse(queues=[Queue(id="default", policy="fifo", rules={"preemption": "never"}, waiting=7)])
    usages = ListTenantUsageResponse(usages=[TenantUsage(tenant_id="vision", share=0.5)])
    mesh = FakeMesh(tenants_ListQueues=queues, tenants_ListTenantUsage=usages)
    found = await queue_board.read(mesh.ask)
    [queue] = found["queues"]["rows"]
    assert (queue["policy"], queue["rules"], queue["waiting"]) == ("fifo", {"preemption": "never"}, 7)
    assert found["shares"]["rows"][0]["tenant"] == "vision"
    assert (found["free"]["rows"], found["free"]["trouble"]) == ([], "queue has no leader now")


async def test_what_a_token_may_not_see_is_said_as_such() -> None:
    denied = PermissionDenied("viewer eve may not ListQueues")
    found = await queue_board.read(FakeMesh(tenants_ListQueues=denied).ask)
    assert found["queues"]["trouble"] == MAY_NOT


def test_pieces_count_whole_gpus_of_healthy_nodes_that_take_work() -> None:
    lost = node("c", 8, 0, state=NodeState.NODE_STATE_LOST)
    found = queue_board.pieces([node("a", 4, 1500), node("b", 4, 0, ill=1), lost])
    names = ("nodes", "nodes_ready", "gpus_free", "gpus_free_most", "cores_free", "cores_free_most")
    assert [found[name] for name in names] == [3, 2, 5.5, 3, 10, 5]
    assert found["nodes_by_free_gpus"] == [(3, 1), (2, 1)]


async def test_a_board_is_read_while_it_has_readers_and_keeps_its_rows_through_a_failure() -> None:
    answers: list[Mapping[str, Any] | CotenantError] = [{"a": {"n": 1}, "b": {"n": 2}}, NO_LEADER, {"b": {"n": 3}}]
    reads = SimpleNamespace(count=0)

    async def read(_: Any) -> Mapping[str, Any]:
        reads.count += 1
        answer = answers.pop(0) if answers else {"b": {"n": 3}}
        if isinstance(answer, CotenantError):
            raise answer
        return answer

    board = Board(FakeMesh().ask, BoardKind(read, 0.0))
    with board.reading() as rows, board.reading():
        async with asyncio.timeout(10):
            while rows.ids() != {"b"}:
                await rows.wait(rows.position, 1.0)
            assert reads.count >= 3
    assert [json.loads(row) for row in board.rows.after("").rows] == [{"id": "b", "n": 3}]
    count = reads.count
    for _ in range(20):
        await asyncio.sleep(0)
    assert reads.count == count
