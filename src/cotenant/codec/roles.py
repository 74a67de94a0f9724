"""Encodes and decodes the roles of a job."""

from __future__ import annotations

from cotenant.core.model.job import OPEN_REPLICAS_MAX_DEFAULT, OpenReplicas, ReplicaRange, Request, Role
from cotenant.core.model.resources import amounts_of
from cotenant.v1 import job_pb2, resources_pb2

MIN_REPLICAS_DEFAULT = OpenReplicas().least


def role_from_wire(message: job_pb2.Role) -> Role:
    """Decode a role, with defaults for unset fields."""
    left_open = None
    if message.HasField("open"):
        left_open = OpenReplicas(
            message.open.min or MIN_REPLICAS_DEFAULT, message.open.max or OPEN_REPLICAS_MAX_DEFAULT
        )
    elastic = ReplicaRange(message.elastic.min, message.elastic.max) if message.HasField("elastic") else None
    bounds = left_open or elastic
    return Role(
        message.name or "worker",
        message.replicas or (max(1, bounds.least) if bounds else 0),
        _request_from_wire(message.resources),
        tuple(message.command),
        left_open,
        elastic,
    )


def role_to_wire(role: Role) -> job_pb2.Role:
    """Encode a role, defaults included."""
    request = role.request
    resources = resources_pb2.ResourceRequest(
        gpu_milli=request.gpu_milli,
        cores=request.cores,
        gpu_type=request.gpu_type,
        **amounts_of(request),
    )
    left_open = job_pb2.OpenReplicas(min=role.open.least, max=role.open.most) if role.open else None
    elastic = job_pb2.ReplicaRange(min=role.elastic.least, max=role.elastic.most) if role.elastic else None
    return job_pb2.Role(
        name=role.name,
        replicas=role.replicas,
        resources=resources,
        command=role.command,
        open=left_open,
        elastic=elastic,
    )


def _request_from_wire(message: resources_pb2.ResourceRequest) -> Request:
    return Request(
        message.gpu_milli,
        message.cores if message.HasField("cores") else None,
        message.gpu_type,
        **amounts_of(message),
    )
