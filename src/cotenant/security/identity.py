"""Identities: who makes a call, according to its token or certificate, and what servicers check of it."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from cotenant.codec import errors
from cotenant.codec.errors import Problem
from cotenant.core.model.job import TENANT_DEFAULT
from cotenant.core.model.validation import shown
from cotenant.security.permissions import Role, Rule, Scope

Metadata = Sequence[tuple[str, str | bytes]]
Peer = Callable[[], Mapping[str, Iterable[bytes]]]
SCHEME = "Bearer "
CALLER = "cotenant-caller"  # metadata: on whose behalf a service calls
CALLER_BYTES_MAX = 4096
LISTS_MAX = 3  # the value, its roles and its tenants; deeper nesting is rejected
HINT = "the token is in the file `token` of the server's state directory; pass it in COTENANT_TOKEN"
RESERVED_NAMES = frozenset({"anyone", "operator"})  # their jobs run as the agent's user
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,126}")
FORWARDED_NAME = re.compile(r"((agent|service)/)?[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,252}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller's identity.

    `tenants` are the tenants whose jobs the caller may see, None means all; `node` is the node that an agent acts for,
    None for the holder of the mesh's own token. `via` is the service that forwarded the call. `expires_seconds` is when
    its credentials expire, in Unix seconds; 0: never, or unknown.
    """

    name: str
    roles: frozenset[Role] = frozenset()
    tenants: frozenset[str] | None = frozenset()
    node: str | None = ""
    via: str = field(default="", compare=False)
    expires_seconds: float = field(default=0.0, compare=False)

    def scope(self, rule: Rule) -> Scope | None:
        """Return the scope in which this caller may call a method; None if it may not.

        >>> from cotenant.security.permissions import ROLES
        >>> create = ROLES["/cotenant.v1.JobService/CreateJob"]
        >>> Identity("eve", frozenset({Role.USER}), frozenset({"lab"})).scope(create).name
        'TENANT'
        """
        scopes = [scope for role in self.roles if (scope := rule.scopes.get(role)) is not None]
        if self.tenants is not None:
            scopes = [scope for scope in scopes if scope is not Scope.ALL_TENANTS]
        return max(scopes, default=None)


ANYONE = Identity("anyone", frozenset(Role), tenants=None, node=None)
OPERATOR = Identity("operator", frozenset(Role), tenants=None, node=None)  # the holder of the mesh's own token

_identity: ContextVar[Identity] = ContextVar("identity", default=ANYONE)
_scope: ContextVar[Scope] = ContextVar("scope", default=Scope.ANY)


class Authenticator(Protocol):
    """Authenticates callers by what their calls carry."""

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Return the caller's identity; `peer` reads the connection's certificates, if it has any.

        Raises:
            Problem: UNAUTHENTICATED, or PERMISSION_DENIED for this method.
        """


class Anyone:
    """Admits everybody: for a server on a loopback port of its own process, and for tests."""

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Admit every caller."""
        return ANYONE


class BearerToken:
    """Admits callers with the mesh's own token."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("the token must not be empty: every caller would be admitted")
        self._expected = token.encode()

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Compare the token in constant time, so that timing reveals nothing about it."""
        token = bearer_token(metadata)
        if token is None:
            raise token_missing()
        if not self.knows(token):
            raise token_wrong()
        return OPERATOR

    def knows(self, token: str) -> bool:
        """Return whether this is the token."""
        return hmac.compare_digest(token.encode(errors="replace"), self._expected)


def bearer_token(metadata: Metadata) -> str | None:
    """Return the bearer token of a call; None if it carries none, "" if it carries another kind of credential."""
    for key, value in metadata:
        if key == "authorization":
            text = value if isinstance(value, str) else value.decode(errors="replace")
            return text[len(SCHEME) :] if text[: len(SCHEME)].lower() == SCHEME.lower() else ""
    return None


def token_missing() -> Problem:
    """Return the problem of a call without credentials."""
    return errors.unauthenticated("TOKEN_MISSING", f"the call has no token; {HINT}")


def token_wrong() -> Problem:
    """Return the problem of a call with an unknown token."""
    return errors.unauthenticated("TOKEN_WRONG", f"this server does not know the call's token; {HINT}")


def check_name(name: str) -> str:
    """Return why a caller's name is invalid; "" if it is valid.

    >>> check_name("eve@example.org"), check_name("operator")
    ('', "'operator' is reserved for the mesh's own token")
    """
    if name in RESERVED_NAMES:
        return f"{shown(name)} is reserved for the mesh's own token"
    if not NAME.fullmatch(name):
        return f"{shown(name)} is not a valid name: use letters, digits and _.@+-, at most 127"
    return ""


# Acting on behalf of callers --------------------------------------------------------------------------------------


def on_behalf_header(identity: Identity) -> tuple[str, str]:
    """Return the metadata with which a service forwards a call, so that it is authorized as its caller's call."""
    told = {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "tenants": None if identity.tenants is None else sorted(identity.tenants),
        "node": identity.node,
    }
    return CALLER, json.dumps(told, separators=(",", ":"))


def acting_identity(identity: Identity, metadata: Metadata) -> Identity:
    """Return whose call it is: the caller's own, or that of the caller on whose behalf a service acts.

    Raises:
        Problem: PERMISSION_DENIED: the caller acts on behalf of another and is not a service, or the metadata is
            invalid.
    """
    told = [value for key, value in metadata if key == CALLER]
    if not told:
        return identity
    if Role.SERVICE not in identity.roles:
        raise denied("SPEAKS_FOR_OTHERS", f"{identity.name} is not a service and may not act on behalf of others")
    try:
        if len(told) > 1 or len(told[0]) > CALLER_BYTES_MAX or sum(map(str(told[0]).count, "[{")) > LISTS_MAX:
            raise ValueError
        return _read(json.loads(told[0]), identity.name)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise denied("CALLER_UNREADABLE", f"invalid caller metadata from {identity.name}") from None


def _read(told: Mapping[str, object], via: str) -> Identity:
    name, roles, tenants, node = told["name"], told["roles"], told["tenants"], told["node"]
    if not (isinstance(name, str) and isinstance(roles, list) and isinstance(node, str | None)):
        raise TypeError
    if not (tenants is None or isinstance(tenants, list)) or not all(isinstance(one, str) for one in tenants or ()):
        raise TypeError
    if not FORWARDED_NAME.fullmatch(name):
        raise ValueError
    kept = None if tenants is None else frozenset(str(one) for one in tenants)
    return Identity(name, frozenset(Role(role) for role in roles), kept, node, via)


# Checks for servicers ---------------------------------------------------------------------------------------------


def caller() -> Identity:
    """Return the identity that made the current call."""
    return _identity.get()


def scope() -> Scope:
    """Return the scope of the current call."""
    return _scope.get()


def set_caller(identity: Identity, scope: Scope = Scope.ANY) -> None:
    """Set the identity of the current call. Each call has its own context, so nothing needs to be reset."""
    _identity.set(identity)
    _scope.set(scope)


def check_node(node_id: str) -> None:
    """Reject an agent that acts for another node than its own.

    Raises:
        Problem: PERMISSION_DENIED.
    """
    identity = caller()
    if scope() is Scope.OWN_NODE and identity.node is not None and identity.node != node_id:
        raise denied("NOT_YOUR_NODE", f"{identity.name} acts for node {shown(identity.node)}, not {shown(node_id)}")


def check_tenant(tenant: str) -> None:
    """Reject a caller that does not belong to a tenant.

    Raises:
        Problem: PERMISSION_DENIED.
    """
    identity = caller()
    if scope() <= Scope.TENANT and identity.tenants is not None and tenant not in identity.tenants:
        yours = ", ".join(sorted(identity.tenants)) or "none"
        raise denied("NOT_YOUR_TENANT", f"tenant {shown(tenant)} is not among the tenants of {identity.name}: {yours}")


def resolve_tenant(named: str) -> str:
    """Return the tenant that a caller means: the named one, else its only one, else the default."""
    tenants = caller().tenants
    if not named and tenants is not None and TENANT_DEFAULT not in tenants and len(tenants) == 1:
        (named,) = tenants
    return named or TENANT_DEFAULT


def denied(reason: str, message: str) -> Problem:
    """Return the problem of a caller that may not do this."""
    return Problem(grpc.StatusCode.PERMISSION_DENIED, reason, message)
