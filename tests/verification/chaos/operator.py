"""The operator of a chaos run: drains and cordons nodes, forgets disconnected ones, and changes tenants' weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from google.protobuf.field_mask_pb2 import FieldMask
from tests.verification.chaos.call_log import NO_CODES, PAGE, PAUSE_SECONDS, CallLog

from cotenant.v1 import node_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2

BETWEEN_SECONDS, CORDONED_SECONDS, LOOK_SECONDS = (1.0, 6.0), (1.0, 4.0), 4.0
ACTIONS = {"drain": 45, "cordon": 25, "forget": 30}  # in percent
WEIGHT_MAX = 9
STALE_SECONDS_MAX = 20.0  # a leader cut off from etcd answers from its cache, and does not know its successor
GUEST, REMOVE_SHARE = "guest", 0.4  # a tenant without jobs
GONE = frozenset({grpc.StatusCode.NOT_FOUND})
FORGET_REFUSALS = frozenset({grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND})

Submit = Callable[[str, Random], Awaitable[str]]  # by request ID: submits a job, and takes care of it


@dataclass
class Operator:
    """An operator of all nodes. `submit` submits a job, which marks a point in time in the record."""

    call_log: CallLog
    nodes: Any
    tenants: Any
    submit: Submit
    forgotten: set[str] = field(default_factory=set)  # nodes forgotten at least once, which may be absent at any time
    weights: dict[str, int] = field(default_factory=dict)

    async def run(self, tenants: tuple[str, ...]) -> None:
        """Act from time to time."""
        rng = Random(f"{self.call_log.name} operator")
        while True:
            await self.call_log.pause(BETWEEN_SECONDS, rng)
            if self.call_log.quiescing.is_set():
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            self.call_log.busy += 1
            try:
                await self._set_weight(rng.choice(tenants), rng.randint(1, WEIGHT_MAX))
                if rng.random() < REMOVE_SHARE:
                    await self._set_weight(GUEST, rng.randint(1, WEIGHT_MAX))
                    await self._remove(GUEST)
                await self._act(rng.choices(list(ACTIONS), list(ACTIONS.values()))[0], rng)
            finally:
                self.call_log.busy -= 1

    async def _set_weight(self, tenant_id: str, weight: int) -> None:
        """Set a tenant's weight, which must take effect."""
        tenant = tenant_service_pb2.Tenant(id=tenant_id, weight=weight)
        if tenant_id not in self.weights:
            self.weights[tenant_id] = weight
            await self.call_log.call(self.tenants.CreateTenant, tenant_service_pb2.CreateTenantRequest(tenant=tenant))
        request = tenant_service_pb2.UpdateTenantRequest(tenant=tenant, update_mask=FieldMask(paths=["weight"]))
        await self.call_log.call(self.tenants.UpdateTenant, request)
        self.call_log.record(weighed=tenant_id)
        until, look = time.monotonic() + STALE_SECONDS_MAX, tenant_service_pb2.GetTenantRequest(id=tenant_id)
        while (answer := await self.call_log.call(self.tenants.GetTenant, look)).tenant.weight != weight:
            if time.monotonic() > until:
                self.call_log.record(
                    wrong=f"that {tenant_id} has weight {answer.tenant.weight}, after {weight} was set"
                )
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _remove(self, tenant_id: str) -> None:
        """Delete a tenant, which must then not exist."""
        remove = tenant_service_pb2.DeleteTenantRequest(id=tenant_id)
        await self.call_log.call_unless(GONE, self.tenants.DeleteTenant, remove)  # a retry may find it deleted
        del self.weights[tenant_id]
        self.call_log.record(removed=tenant_id)
        look = tenant_service_pb2.GetTenantRequest(id=tenant_id)
        until = time.monotonic() + STALE_SECONDS_MAX
        while (left := await self.call_log.call_unless(GONE, self.tenants.GetTenant, look)) is not None:
            if time.monotonic() > until:
                self.call_log.record(wrong=f"that {tenant_id} has weight {left.tenant.weight}, after it was deleted")
                return
            await asyncio.sleep(PAUSE_SECONDS)

    async def _act(self, action: str, rng: Random) -> None:
        nodes = (await self.call_log.call(self.nodes.ListNodes, pb.ListNodesRequest(page_size=PAGE))).nodes
        if action == "forget":
            await self._forget(rng)
        elif nodes:
            await self._close_node(rng.choice(sorted(node.id for node in nodes)), rng, drain=action == "drain")

    def _not_found_codes(self, node_id: str) -> frozenset[grpc.StatusCode]:
        return GONE if node_id in self.forgotten else NO_CODES

    async def _close_node(self, node_id: str, rng: Random, *, drain: bool) -> None:
        """Drain a node until it is empty, or cordon it for a while."""
        request_id, gone = self.call_log.request(), self._not_found_codes(node_id)
        if drain:
            asked = pb.DrainNodeRequest(id=node_id, reason="drain test", request_id=request_id)
            answer = await self.call_log.call_unless(gone, self.nodes.DrainNode, asked)
        else:
            held = pb.CordonNodeRequest(id=node_id, reason="cordon test", request_id=request_id)
            answer = await self.call_log.call_unless(gone, self.nodes.CordonNode, held)
        if answer is None:
            return
        since = await self.submit(f"{request_id} since", Random(request_id))
        self.call_log.record(**{"drained" if drain else "cordoned": node_id, "since": since})
        if drain:
            await self._wait_until_empty(node_id)
        else:
            await self.call_log.pause(CORDONED_SECONDS, rng)
        uncordon = pb.UncordonNodeRequest(id=node_id, request_id=f"{request_id} uncordon")
        await self.call_log.call_unless(gone, self.nodes.UncordonNode, uncordon)

    async def _wait_until_empty(self, node_id: str) -> None:
        gone = self._not_found_codes(node_id)
        while answer := await self.call_log.call_unless(gone, self.nodes.GetNode, pb.GetNodeRequest(id=node_id)):
            if not answer.node.attempts:
                return
            await asyncio.sleep(PAUSE_SECONDS * 2)

    async def _forget(self, rng: Random) -> None:
        """Forget a disconnected node, if there is one soon, as if it were permanently lost."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LOOK_SECONDS
        while loop.time() < until and not self.call_log.quiescing.is_set():
            nodes = (await self.call_log.call(self.nodes.ListNodes, pb.ListNodesRequest(page_size=PAGE))).nodes
            if away := sorted(node.id for node in nodes if node.state in (pb.NODE_STATE_AWAY, pb.NODE_STATE_LOST)):
                node_id = rng.choice(away)
                self.forgotten.add(node_id)
                self.call_log.record(forgetting=node_id)
                asked = pb.ForgetNodeRequest(id=node_id, reason="disconnected", request_id=self.call_log.request())
                done = await self.call_log.call_unless(FORGET_REFUSALS, self.nodes.ForgetNode, asked)
                self.call_log.record(forgot=node_id, done=done is not None)
                return
            await asyncio.sleep(PAUSE_SECONDS * 2)
