"""Describes this process: its release and certificate, its role among the replicas, and its view of the store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from cotenant.rpc.server import Server
from cotenant.rpc.service_homes import homes_of
from cotenant.security.identity import caller
from cotenant.store.capacity import capacity_of
from cotenant.store.guarded_store import GuardedStore
from cotenant.store.identity_check import REMEDY, Trust
from cotenant.store.member_status import HasMembers
from cotenant.store.port import Store, StoreUnavailable
from cotenant.store.recovery_commands import Recovery, recovery_of
from cotenant.telemetry.recent_durations import RecentDurations
from cotenant.v1 import process_service_pb2 as pb
from cotenant.v1 import process_service_pb2_grpc as pb_grpc
from cotenant.v1.condition_pb2 import StoreLatency

SERVICE = "cotenant.v1.ProcessService"
WITNESSES_MAX = 1000  # of each kind in a response


class ProcessServicer(pb_grpc.ProcessServiceServicer):
    """Describes the process that receives the call, never another one."""

    def __init__(self, server: Server, store: Store | None, describe: Sequence[Callable[[], pb.Replica]]) -> None:
        self._server, self._store, self._describe = server, store, describe
        self._process = pb.Process(version=metadata.version("cotenant"), id=secrets.token_hex(8))
        self._process.start_time.GetCurrentTime()

    async def GetProcess(self, request: pb.GetProcessRequest, context: Any) -> pb.GetProcessResponse:
        """Return this process, its services, the endpoints that it knows and the members of its store."""
        answer = pb.GetProcessResponse(process=self._process, replicas=[describe() for describe in self._describe])
        answer.process.services.extend(sorted(homes_of(self._server.services)))
        if self._server.router:
            for service, address, _ in await self._server.router.replicas():
                answer.endpoints.add(service=service, address=address)
        answer.process.loop_lag.CopyFrom(self._server.loop_lag())
        if isinstance(self._store, GuardedStore):
            answer.process.store_latency.CopyFrom(latency_to_wire(self._store.latency))
        if shown := self._server.certificate:
            answer.process.certificate.CopyFrom(shown.to_wire())
        for problem in self._server.problems():
            answer.process.problems.add(reason=problem.reason, remedy=problem.remedy)
        if isinstance(self._store, HasMembers):
            for one in await self._store.member_statuses():
                answer.store_members.add(
                    endpoint=one.endpoint,
                    leads=one.leads,
                    problem=one.problem,
                    version=one.version,
                    size_bytes=one.size_bytes,
                )
        if wire := await self._capacity():
            answer.store_capacity.CopyFrom(wire)
        if isinstance(self._store, GuardedStore) and (trust := self._store.trust).remembered:
            answer.store_trust.CopyFrom(trust_to_wire(trust))
        answer.process.wall_time.GetCurrentTime()  # last: the store may have taken long
        return answer

    async def GetCaller(self, request: pb.GetCallerRequest, context: Any) -> pb.GetCallerResponse:
        """Return who the caller is."""
        identity = caller()
        tenants = identity.tenants
        answer = pb.GetCallerResponse(
            name=identity.name,
            roles=sorted(identity.roles),
            tenants=sorted(tenants or ()),
            all_tenants=tenants is None,
        )
        if identity.expires_seconds:
            answer.expire_time.FromMicroseconds(round(identity.expires_seconds * 1e6))
        return answer

    async def _capacity(self) -> pb.StoreCapacity | None:
        """Return how full the store is; None if it has no limit or does not answer (its member statuses say so)."""
        try:
            capacity = await capacity_of(self._store)
        except StoreUnavailable:
            return None
        if capacity is None:
            return None
        helps = recovery_of(capacity) or Recovery("", "")
        return pb.StoreCapacity(
            size_bytes=capacity.size_bytes,
            in_use_bytes=capacity.in_use_bytes,
            limit_bytes=capacity.limit_bytes,
            admits_below_bytes=capacity.admits_below_bytes,
            problem=helps.problem,
            remedy=helps.remedy,
            commands=helps.commands,
        )


def latency_to_wire(recent: RecentDurations) -> StoreLatency:
    """Encode how long the store took to answer."""
    latency = StoreLatency(calls=recent.count)
    latency.median.FromMicroseconds(round(recent.median_seconds * 1e6))
    latency.longest.FromMicroseconds(round(recent.longest_seconds * 1e6))
    return latency


def trust_to_wire(trust: Trust) -> pb.StoreTrust:
    """Encode what is known of a store's identity."""
    assert trust.remembered
    told = pb.StoreTrust(store_id=trust.remembered.id, generation=trust.remembered.generation, revision=trust.revision)
    if verdict := trust.verdict:
        told.reason, told.problem, told.remedy = verdict.mismatch.value, verdict.text, REMEDY
    for node, memory in sorted(trust.witnesses.marks.items())[:WITNESSES_MAX]:
        told.witnesses.add(name=node, store_id=memory.id, generation=memory.generation, revision=memory.revision)
    for node, store_id in sorted(trust.witnesses.unknown_stores.items())[:WITNESSES_MAX]:
        told.witnesses.add(name=node, store_id=store_id)
    return told


def serve_process_service(server: Server, *describe: Callable[[], pb.Replica], store: Store | None = None) -> None:
    """Add the service to a server that has not started yet."""
    server.add(pb_grpc.add_ProcessServiceServicer_to_server, ProcessServicer(server, store, describe), SERVICE)
