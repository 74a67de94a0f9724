"""Which service of the mesh (queue, placement, predictor, contention) serves which gRPC service of the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

PUBLIC_PACKAGE = "cotenant.v1"

HOMES: Mapping[str, str] = MappingProxyType(
    {
        "cotenant.v1.JobService": "queue",
        "cotenant.v1.ArrayService": "queue",
        "cotenant.v1.TenantService": "queue",
        "cotenant.v1.FolderService": "queue",
        "cotenant.v1.SecretService": "queue",
        "cotenant.v1.ScheduleService": "queue",
        "cotenant.v1.NodeService": "placement",
        "cotenant.v1.PredictorService": "predictor",
        "cotenant.v1.AdviceService": "predictor",
        "cotenant.v1.ContentionService": "contention",
        "cotenant.agent.v1.AgentService": "placement",
        "cotenant.agent.v1.SampleService": "contention",
        "cotenant.internal.v1.ObservationService": "predictor",
        "cotenant.internal.v1.PlacementService": "placement",
    }
)
# Served by every process; the answers describe that process.
EVERYWHERE = frozenset({"cotenant.v1.PolicyService", "cotenant.v1.ProcessService"})
# Each process answers only for itself, so a caller may choose the process. Contention: each replica has its own nodes.
ADDRESSABLE = EVERYWHERE | {"cotenant.v1.ContentionService"}


def service_of(path: str) -> str:
    """Return the gRPC service of a method's path.

    >>> service_of("/cotenant.v1.JobService/GetJob")
    'cotenant.v1.JobService'
    """
    return path[1 : path.rfind("/")]


def is_public(service: str) -> bool:
    """Return whether a gRPC service belongs to the public API.

    >>> is_public("cotenant.v1.JobService"), is_public("cotenant.agent.v1.AgentService")
    (True, False)
    """
    return service.rpartition(".")[0] == PUBLIC_PACKAGE


def homes_of(services: Iterable[str]) -> frozenset[str]:
    """Return the services of the mesh to which some gRPC services belong.

    >>> sorted(homes_of(["cotenant.v1.JobService", "cotenant.v1.TenantService", "cotenant.v1.PolicyService"]))
    ['queue']
    """
    return frozenset(HOMES[service] for service in services if service in HOMES)
