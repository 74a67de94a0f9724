"""Who may call what, by the options of the methods in protos/: enforced by the interceptor, shown in docs/security.md.

A method that is not in the table is closed to all roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

from cotenant.codec.method_table import METHOD_RULES


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


ROLES: Mapping[str, Rule] = MappingProxyType(
    {
        path: Rule(MappingProxyType({Role(role): Scope[scope] for role, scope in rules.scopes.items()}), rules.audited)
        for path, rules in METHOD_RULES.items()
    }
)
