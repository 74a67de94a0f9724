"""All unary methods of the API, and how clients call them. A test compares this table with the protos.

A method is retried on UNAVAILABLE if a repeat is harmless: it only reads, it has a `request_id` by which the server
recognizes the repeat, or it requests a state that may already hold. Streams are not in the table: their callers resume
them, which a channel cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

PACKAGE = "cotenant.v1"
DEADLINE_SECONDS_DEFAULT = 10.0


@dataclass(frozen=True, slots=True)
class Method:
    """How a method is called."""

    retried: bool = False
    has_request_id: bool = False
    deadline_seconds: float = DEADLINE_SECONDS_DEFAULT


READ = Method(retried=True)
WRITE = Method(retried=True, has_request_id=True)
HARMLESS = Method(retried=True)  # a repeat finds nothing left to do

_BY_SERVICE = {
    "JobService": {
        "CreateJob": WRITE,
        "GetJob": READ,
        "ListJobs": READ,
        "CancelJob": WRITE,
        "SuspendJob": WRITE,
        "ResumeJob": WRITE,
        "UpdateJob": WRITE,
        "MoveJob": WRITE,
        "SummarizeFailures": READ,
        "ExplainJob": READ,
        "SimulateJob": Method(retried=True, deadline_seconds=30),  # a whole scheduling cycle
    },
    "TenantService": {
        "CreateTenant": WRITE,
        "GetTenant": READ,
        "ListTenants": READ,
        "UpdateTenant": WRITE,
        "DeleteTenant": WRITE,
        "ListQueues": READ,
    },
    "NodeService": {
        "GetNode": READ,
        "ListNodes": READ,
        "DrainNode": WRITE,
        "CordonNode": WRITE,
        "UncordonNode": WRITE,
        "ReleaseGpu": WRITE,
        "ForgetNode": WRITE,
    },
    "PlacementService": {
        # Not retried: the next cycle plans again, with the resources free by then.
        "PlanPlacement": Method(has_request_id=True, deadline_seconds=30),
        "StopAttempts": HARMLESS,
        "ForgetAttempts": HARMLESS,
        "AdviseAttempts": HARMLESS,
        "ForecastStarts": Method(retried=True, deadline_seconds=15),
        "GetCapacity": READ,
    },
    "PredictorService": {
        "Estimate": READ,
        "Observe": Method(),  # a repeat would count twice
        "PlanProfile": READ,
        "ListProfiles": READ,
    },
    "ContentionService": {
        "ListIncidents": READ,
        "ListSamples": READ,
    },
    "ReplicaService": {
        "ListReplicas": READ,
    },
    "PolicyService": {
        "ListPolicies": READ,
    },
}

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        f"/{PACKAGE}.{service}/{name}": method
        for service, methods in _BY_SERVICE.items()
        for name, method in methods.items()
    }
)
