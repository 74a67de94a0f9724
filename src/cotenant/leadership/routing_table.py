"""Which replica answers which call of a replicated service. Tests compare this table with the protos and the docs.

Only the leader has what no record holds: reasons, positions, progress, streams, and the right to write. Records of
ended jobs no longer change, so any replica that follows the records can return them. Every replica answers for what it
holds itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from cotenant.codec.methods import PACKAGE


class Route(Enum):
    """Which replica answers."""

    LEADER = "the leader, whichever replica is asked"
    ENDED = "any replica, of what has ended; else the leader"
    ANY = "the replica that is asked"
    NODE = "the replica that the node's name chooses"


_BY_SERVICE = {
    "JobService": {
        "CreateJob": Route.LEADER,
        "GetJob": Route.ENDED,
        "ListJobs": Route.ENDED,  # if the filter selects final phases only, and nothing is folded
        "WatchJobs": Route.LEADER,
        "CancelJob": Route.LEADER,
        "SuspendJob": Route.LEADER,
        "ResumeJob": Route.LEADER,
        "UpdateJob": Route.LEADER,
        "MoveJob": Route.LEADER,
        "ExplainJob": Route.LEADER,
        "SimulateJob": Route.LEADER,
        "SummarizeFailures": Route.ENDED,
        "ReadLogs": Route.LEADER,
    },
    "TenantService": {
        "CreateTenant": Route.LEADER,
        "GetTenant": Route.LEADER,  # current usage is in no record
        "ListTenants": Route.LEADER,
        "UpdateTenant": Route.LEADER,
        "DeleteTenant": Route.LEADER,
        "ListQueues": Route.LEADER,
    },
    "PlacementService": {
        "PlanPlacement": Route.LEADER,
        "StopAttempts": Route.LEADER,
        "AdviseAttempts": Route.LEADER,
        "WatchAttempts": Route.LEADER,
        "ForgetAttempts": Route.LEADER,
        "ForecastStarts": Route.LEADER,
        "GetCapacity": Route.LEADER,
        "ReadAttemptLogs": Route.LEADER,
    },
    "NodeService": {
        "GetNode": Route.LEADER,  # only the holder of the agent's stream knows whether it is connected
        "ListNodes": Route.LEADER,
        "DrainNode": Route.LEADER,
        "CordonNode": Route.LEADER,
        "UncordonNode": Route.LEADER,
        "ReleaseGpu": Route.LEADER,
        "ForgetNode": Route.LEADER,
    },
    "AgentService": {"Connect": Route.LEADER, "UploadOutput": Route.LEADER},
    "PredictorService": {
        "Estimate": Route.ANY,
        "Observe": Route.LEADER,
        "PlanProfile": Route.ANY,
        "ListProfiles": Route.ANY,
    },
    "ContentionService": {
        "StreamSamples": Route.NODE,
        "ListIncidents": Route.NODE,
        "ListSamples": Route.NODE,
    },
    "ReplicaService": {"ListReplicas": Route.ANY},
    "PolicyService": {"ListPolicies": Route.ANY},
}

ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        f"/{PACKAGE}.{service}/{name}": route
        for service, methods in _BY_SERVICE.items()
        for name, route in methods.items()
    }
)
