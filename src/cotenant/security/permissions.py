"""Who may call what: a table of all methods of the API, enforced by the interceptor and shown in `docs/security.md`.

A method that is not in the table is closed to all roles. A test compares the table with the protos.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

from cotenant.codec.methods import PACKAGE


class Role(StrEnum):
    """The role of a caller in the mesh."""

    VIEWER = "viewer"
    USER = "user"
    TENANT_ADMIN = "tenant-admin"
    OPERATOR = "operator"
    AGENT = "agent"
    SERVICE = "service"


class Scope(IntEnum):
    """What a role may call a method on; the widest scope of a caller's roles counts."""

    OWN_NODE = 1  # an agent's reports about its own node
    OWN_JOBS = 2  # jobs that the caller submitted, in its tenants
    TENANT = 3  # what belongs to the caller's tenants
    ALL_TENANTS = 4  # everything, if the caller has all tenants: the answer does not separate them
    ANY = 5  # everything


SCOPE_LABELS: Mapping[Scope, str] = MappingProxyType(
    {
        Scope.OWN_NODE: "own node",
        Scope.OWN_JOBS: "own jobs",
        Scope.TENANT: "own tenants",
        Scope.ALL_TENANTS: "if of all tenants",
        Scope.ANY: "any",
    }
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which roles may call a method, in which scope, and whether it changes anything and so is audited."""

    scopes: Mapping[Role, Scope]
    changes: bool = False


def _rule(
    viewer: Scope | None = None,
    user: Scope | None = None,
    tenant_admin: Scope | None = None,
    operator: Scope | None = Scope.ANY,
    agent: Scope | None = None,
    service: Scope | None = None,
    *,
    changes: bool = False,
) -> Rule:
    given = zip(Role, (viewer, user, tenant_admin, operator, agent, service), strict=True)
    return Rule(MappingProxyType({role: scope for role, scope in given if scope is not None}), changes)


_TENANT = (Scope.TENANT, Scope.TENANT, Scope.TENANT)
_ALL_TENANTS = (Scope.ALL_TENANTS, Scope.ALL_TENANTS, Scope.ALL_TENANTS)
_ANY = (Scope.ANY, Scope.ANY, Scope.ANY)

_SEE_JOBS = _rule(*_TENANT)
_SUBMIT = _rule(None, Scope.TENANT, Scope.TENANT, changes=True)
_CHANGE_JOBS = _rule(None, Scope.OWN_JOBS, Scope.TENANT, changes=True)
_MOVE_JOBS = _rule(None, Scope.OWN_JOBS, Scope.TENANT, service=Scope.ANY, changes=True)  # the contention service does
_SEE_TENANTS = _rule(*_TENANT)
_SEE_CLUSTER = _rule(*_ANY)
_SEE_ALL = _rule(*_ALL_TENANTS)
_RUN_CLUSTER = _rule(changes=True)
_OF_SERVICES = _rule(operator=None, service=Scope.ANY)
_CHANGE_OF_SERVICES = _rule(operator=None, service=Scope.ANY, changes=True)
_OF_AGENTS = _rule(operator=None, agent=Scope.OWN_NODE)

_BY_SERVICE: Mapping[str, Mapping[str, Rule]] = {
    "JobService": {
        "CreateJob": _SUBMIT,
        "GetJob": _SEE_JOBS,
        "ListJobs": _SEE_JOBS,
        "WatchJobs": _SEE_JOBS,
        "ReadLogs": _SEE_JOBS,
        "ExplainJob": _SEE_JOBS,
        "SummarizeFailures": _SEE_JOBS,
        "SimulateJob": _SEE_JOBS,
        "CancelJob": _CHANGE_JOBS,
        "SuspendJob": _CHANGE_JOBS,
        "ResumeJob": _CHANGE_JOBS,
        "UpdateJob": _CHANGE_JOBS,
        "MoveJob": _MOVE_JOBS,
    },
    "TenantService": {
        "CreateTenant": _RUN_CLUSTER,
        "GetTenant": _SEE_TENANTS,
        "ListTenants": _SEE_TENANTS,
        "UpdateTenant": _RUN_CLUSTER,
        "DeleteTenant": _RUN_CLUSTER,
        "ListQueues": _SEE_CLUSTER,
    },
    "NodeService": {
        "GetNode": _SEE_CLUSTER,
        "ListNodes": _SEE_CLUSTER,
        "DrainNode": _RUN_CLUSTER,
        "CordonNode": _RUN_CLUSTER,
        "UncordonNode": _RUN_CLUSTER,
        "ReleaseGpu": _RUN_CLUSTER,
        "ForgetNode": _RUN_CLUSTER,
    },
    "AgentService": {
        "Connect": _rule(operator=None, agent=Scope.OWN_NODE, changes=True),
        "UploadOutput": _OF_AGENTS,
    },
    "PlacementService": {
        "PlanPlacement": _OF_SERVICES,  # several a second; their results are in the store
        "StopAttempts": _CHANGE_OF_SERVICES,
        "ForgetAttempts": _OF_SERVICES,
        "AdviseAttempts": _OF_SERVICES,
        "WatchAttempts": _OF_SERVICES,
        "ForecastStarts": _OF_SERVICES,
        "ReadAttemptLogs": _OF_SERVICES,
        "GetCapacity": _rule(service=Scope.ANY),
    },
    "PredictorService": {
        "Estimate": _rule(*_TENANT, service=Scope.ANY),
        "Observe": _OF_SERVICES,
        "PlanProfile": _rule(*_ALL_TENANTS, service=Scope.ANY),
        "ListProfiles": _SEE_ALL,
    },
    "ContentionService": {
        "StreamSamples": _OF_AGENTS,
        "ListIncidents": _SEE_ALL,
        "ListSamples": _SEE_ALL,
    },
    "ReplicaService": {
        "ListReplicas": _SEE_CLUSTER,
    },
    "PolicyService": {
        "ListPolicies": _SEE_CLUSTER,
    },
}

ROLES: Mapping[str, Rule] = MappingProxyType(
    {f"/{PACKAGE}.{service}/{name}": rule for service, methods in _BY_SERVICE.items() for name, rule in methods.items()}
)
