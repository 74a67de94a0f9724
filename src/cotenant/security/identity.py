"""Who calls: what a token or a certificate tells of a caller, and what the servicers ask of it."""

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
CALLER = "cotenant-caller"  # whom a service speaks for
CALLER_BYTES_MAX = 4096
LISTS_MAX = 3  # the whole, its roles and its tenants; a parser is asked for no deeper ones
HINT = "the token is in the file `token` of the server's state directory; pass it in COTENANT_TOKEN"
NAMES_OF_OURS = frozenset({"anyone", "operator"})  # what they submit runs as whoever runs the agent
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,126}")
NAME_ON_THE_WAY = re.compile(r"((agent|service)/)?[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,252}")


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller as the server knows it.

    `tenants` are those whose jobs concern it, None standing for all; `node` is the one that an agent speaks for, None
    for whoever holds the mesh's own token. `via` is the service that passed the call on.
    """

    name: str
    roles: frozenset[Role] = frozenset()
    tenants: frozenset[str] | None = frozenset()
    node: str | None = ""
    via: str = field(default="", compare=False)

    def scope(self, rule: Rule) -> Scope | None:
        """On what this caller may call a method; None where it may not call it.

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
OPERATOR = Identity("operator", frozenset(Role), tenants=None, node=None)  # whoever holds the mesh's own token

_identity: ContextVar[Identity] = ContextVar("identity", default=ANYONE)
_scope: ContextVar[Scope] = ContextVar("scope", default=Scope.ANY)


class Authenticator(Protocol):
    """Tells who calls, from what the call shows."""

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Return the caller's identity; `peer` reads the connection's certificates, where it has any.

        Raises:
            Problem: UNAUTHENTICATED, or PERMISSION_DENIED for this method.
        """


class Anyone:
    """Lets everybody in: for a server on a loopback port of its own process, and for tests."""

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Ask nothing."""
        return ANYONE


class BearerToken:
    """Lets in who knows the mesh's own token."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("an empty token would let everybody in")
        self._expected = token.encode()

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Compare the token in constant time, so that the answer's delay tells nothing of it."""
        token = bearer(metadata)
        if token is None:
            raise token_missing()
        if not self.knows(token):
            raise token_wrong()
        return OPERATOR

    def knows(self, token: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(token.encode(errors="replace"), self._expected)


def bearer(metadata: Metadata) -> str | None:
    """Read the token that a call carries; None where it carries none, "" where it carries something else."""
    for key, value in metadata:
        if key == "authorization":
            text = value if isinstance(value, str) else value.decode(errors="replace")
            return text[len(SCHEME) :] if text[: len(SCHEME)].lower() == SCHEME.lower() else ""
    return None


def token_missing() -> Problem:
    """The call shows nothing by which it could be known."""
    return errors.unauthenticated("TOKEN_MISSING", f"the call carries no token; {HINT}")


def token_wrong() -> Problem:
    """The call's token is nobody's."""
    return errors.unauthenticated("TOKEN_WRONG", f"the call's token is not this server's; {HINT}")


def check_name(name: str) -> str:
    """Say what is wrong with a name that somebody is to be known by; "" where nothing is.

    >>> check_name("eve@example.org"), check_name("operator")
    ('', "'operator' is kept for the mesh's own token")
    """
    if name in NAMES_OF_OURS:
        return f"{shown(name)} is kept for the mesh's own token"
    if not NAME.fullmatch(name):
        return f"{shown(name)} is no name: letters, digits and _.@+- are, at most 127 of them"
    return ""


# Whom a service speaks for ----------------------------------------------------------------------------------------


def speaking_for(identity: Identity) -> tuple[str, str]:
    """Write what a service adds to the metadata of a call that it passes on, so that it is judged as its caller's."""
    told = {
        "name": identity.name,
        "roles": sorted(identity.roles),
        "tenants": None if identity.tenants is None else sorted(identity.tenants),
        "node": identity.node,
    }
    return CALLER, json.dumps(told, separators=(",", ":"))


def spoken_for(identity: Identity, metadata: Metadata) -> Identity:
    """Return whose call it is: the caller's own, or the one's for whom a service speaks.

    Raises:
        Problem: PERMISSION_DENIED where somebody else than a service speaks for others, and where a service does so
            in words that cannot be read.
    """
    told = [value for key, value in metadata if key == CALLER]
    if not told:
        return identity
    if Role.SERVICE not in identity.roles:
        raise denied("SPEAKS_FOR_OTHERS", f"{identity.name} is no service, and may not speak for others")
    try:
        if len(told) > 1 or len(told[0]) > CALLER_BYTES_MAX or sum(map(str(told[0]).count, "[{")) > LISTS_MAX:
            raise ValueError
        return _read(json.loads(told[0]), identity.name)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise denied("CALLER_UNREADABLE", f"for whom {identity.name} speaks cannot be read") from None


def _read(told: Mapping[str, object], via: str) -> Identity:
    name, roles, tenants, node = told["name"], told["roles"], told["tenants"], told["node"]
    if not (isinstance(name, str) and isinstance(roles, list) and isinstance(node, str | None)):
        raise TypeError
    if not (tenants is None or isinstance(tenants, list)) or not all(isinstance(one, str) for one in tenants or ()):
        raise TypeError
    if not NAME_ON_THE_WAY.fullmatch(name):
        raise ValueError
    kept = None if tenants is None else frozenset(str(one) for one in tenants)
    return Identity(name, frozenset(Role(role) for role in roles), kept, node, via)


# What a servicer asks ---------------------------------------------------------------------------------------------


def caller() -> Identity:
    """Return who made the call that is being served."""
    return _identity.get()


def scope() -> Scope:
    """Return on what the caller may make the call that is being served."""
    return _scope.get()


def enter(identity: Identity, scope: Scope = Scope.ANY) -> None:
    """Remember who made the call. Each call is served in a context of its own, so that nothing is to be undone."""
    _identity.set(identity)
    _scope.set(scope)


def check_node(node_id: str) -> None:
    """Refuse an agent that speaks for another node than its own.

    Raises:
        Problem: PERMISSION_DENIED.
    """
    identity = caller()
    if scope() is Scope.OWN_NODE and identity.node is not None and identity.node != node_id:
        raise denied("NOT_YOUR_NODE", f"{identity.name} speaks for node {shown(identity.node)}, not {shown(node_id)}")


def check_tenant(tenant: str) -> None:
    """Refuse a caller to whom a tenant does not belong.

    Raises:
        Problem: PERMISSION_DENIED.
    """
    identity = caller()
    if scope() <= Scope.TENANT and identity.tenants is not None and tenant not in identity.tenants:
        yours = ", ".join(sorted(identity.tenants)) or "none"
        raise denied("NOT_YOUR_TENANT", f"tenant {shown(tenant)} is not one of {identity.name}'s, which are: {yours}")


def meant_tenant(named: str) -> str:
    """Say which tenant a caller means: the one that it names, else its only one, else the default one."""
    tenants = caller().tenants
    if not named and tenants is not None and TENANT_DEFAULT not in tenants and len(tenants) == 1:
        (named,) = tenants
    return named or TENANT_DEFAULT


def denied(reason: str, message: str) -> Problem:
    """The caller is known, and may not do this."""
    return Problem(grpc.StatusCode.PERMISSION_DENIED, reason, message)
