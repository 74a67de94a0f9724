"""Decodes tenants."""

from __future__ import annotations

from cotenant.core.model.tenancy import Tenant
from cotenant.v1 import tenant_service_pb2


def tenant_of(message: tenant_service_pb2.Tenant) -> Tenant:
    """Decode a tenant."""
    return Tenant(
        message.id,
        quota_gpu_milli=message.quota_gpu_milli if message.HasField("quota_gpu_milli") else None,
        quota_cores=message.quota_cores if message.HasField("quota_cores") else None,
        limit_gpu_milli=message.limit_gpu_milli if message.HasField("limit_gpu_milli") else None,
        limit_cores=message.limit_cores if message.HasField("limit_cores") else None,
        weight=message.weight or 1.0,
        parent=message.parent,
    )
