"""What a caller may see: the jobs of its tenants, which are accounts of Slurm."""

from __future__ import annotations

from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.security.identity import caller, scope
from cotenant.security.permissions import Scope


def sees(account: str) -> bool:
    """Return whether the caller may see jobs of an account."""
    tenants = caller().tenants
    return scope() > Scope.TENANT or tenants is None or (account or TENANT_DEFAULT) in tenants
