"""Slurm's nodes, accounts and partitions by the public API."""

from __future__ import annotations

import time
from typing import Any

from cotenant.codec import errors
from cotenant.core.model.job import QUEUE_DEFAULT, TENANT_DEFAULT, WHOLE_GPU_MILLI
from cotenant.rpc.paging import page_of
from cotenant.services.slurm.api.visibility import sees
from cotenant.services.slurm.cluster_watch import ClusterWatch
from cotenant.services.slurm.messages import node_message
from cotenant.services.slurm.placement_view import cores_of
from cotenant.v1 import node_service_pb2, node_service_pb2_grpc, tenant_service_pb2, tenant_service_pb2_grpc


def _ready(watch: ClusterWatch) -> None:
    """Refuse a call before the first reading.

    Raises:
        Problem: UNAVAILABLE.
    """
    if not watch.picture.taken_seconds:
        raise errors.unavailable(watch.problem)


class NodeServicer(node_service_pb2_grpc.NodeServiceServicer):
    """Reads Slurm's nodes."""

    def __init__(self, watch: ClusterWatch) -> None:
        self._watch = watch

    async def GetNode(self, request: node_service_pb2.GetNodeRequest, context: Any) -> node_service_pb2.GetNodeResponse:
        """Return a node."""
        _ready(self._watch)
        picture = self._watch.picture
        if request.id not in picture.nodes:
            raise errors.not_found("node", request.id, picture.nodes)
        node = node_message(picture.nodes[request.id], picture, time.time())
        return node_service_pb2.GetNodeResponse(node=node)

    async def ListNodes(
        self, request: node_service_pb2.ListNodesRequest, context: Any
    ) -> node_service_pb2.ListNodesResponse:
        """Return a page of nodes."""
        _ready(self._watch)
        picture, now = self._watch.picture, time.time()
        names, token = page_of(sorted(picture.nodes), request.page_size, request.page_token, scope="slurm-nodes")
        return node_service_pb2.ListNodesResponse(
            nodes=[node_message(picture.nodes[name], picture, now) for name in names],
            next_page_token=token,
            total_size=len(picture.nodes),
        )


class TenantServicer(tenant_service_pb2_grpc.TenantServiceServicer):
    """Reads the accounts of Slurm's jobs as tenants, and Slurm's queue as the only queue."""

    def __init__(self, watch: ClusterWatch) -> None:
        self._watch = watch

    def _tenants(self) -> dict[str, tenant_service_pb2.Tenant]:
        _ready(self._watch)
        picture = self._watch.picture
        found: dict[str, tenant_service_pb2.Tenant] = {}
        for job in picture.jobs.values():
            name = job.account or TENANT_DEFAULT
            if not sees(job.account):
                continue
            tenant = found.setdefault(name, tenant_service_pb2.Tenant(id=name, weight=1.0))
            if job.runs:
                tenant.used_gpu_milli += WHOLE_GPU_MILLI * job.gpus_total
                tenant.used_cores += cores_of(job.cpus, picture)
        return found

    async def GetTenant(
        self, request: tenant_service_pb2.GetTenantRequest, context: Any
    ) -> tenant_service_pb2.GetTenantResponse:
        """Return an account."""
        found = self._tenants()
        if request.id not in found:
            raise errors.not_found("tenant", request.id, found)
        return tenant_service_pb2.GetTenantResponse(tenant=found[request.id])

    async def ListTenants(
        self, request: tenant_service_pb2.ListTenantsRequest, context: Any
    ) -> tenant_service_pb2.ListTenantsResponse:
        """Return a page of the accounts that jobs have."""
        found = self._tenants()
        names, token = page_of(sorted(found), request.page_size, request.page_token, scope="slurm-tenants")
        return tenant_service_pb2.ListTenantsResponse(tenants=[found[name] for name in names], next_page_token=token)

    async def ListQueues(
        self, request: tenant_service_pb2.ListQueuesRequest, context: Any
    ) -> tenant_service_pb2.ListQueuesResponse:
        """Return the queue: Slurm's priorities with backfill, which is what `fifo` does with jobs of one priority."""
        _ready(self._watch)
        names, token = page_of([QUEUE_DEFAULT], request.page_size, request.page_token, scope="queues")
        jobs = self._watch.picture.jobs.values()
        waiting, running = sum(job.waits for job in jobs), sum(job.runs for job in jobs)
        queues = [
            tenant_service_pb2.Queue(
                id=name, policy="fifo", options={"mode": "backfill"}, waiting=waiting, running=running
            )
            for name in names
        ]
        return tenant_service_pb2.ListQueuesResponse(queues=queues, next_page_token=token)
