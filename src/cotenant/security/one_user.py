"""Restricts submission to the operator, for a mesh in which every job runs as the same user."""

from __future__ import annotations

from collections.abc import Callable

from cotenant.security.identity import ANYONE, OPERATOR, Authenticator, Identity, Metadata, Peer, denied
from cotenant.security.permissions import ROLES, Role

SUBMIT_ROLES = frozenset(ROLES["/cotenant.v1.JobService/CreateJob"].scopes)


class SingleUserAuthenticator:
    """Rejects callers that `inner` admits, that may submit jobs, and for which `refusal` returns a reason."""

    def __init__(self, inner: Authenticator, refusal: Callable[[str], str]) -> None:
        self._inner, self._refusal = inner, refusal

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Return the caller's identity.

        Raises:
            Problem: as `inner`, or PERMISSION_DENIED.
        """
        identity = self._inner.authenticate(method, metadata, peer)
        if identity not in (OPERATOR, ANYONE) and may_submit(identity.roles) and (why := self._refusal(identity.name)):
            raise denied("SHARED_IDENTITY", why)
        return identity


def may_submit(roles: frozenset[Role]) -> bool:
    """Return whether one of these roles may submit jobs."""
    return bool(roles & SUBMIT_ROLES)
