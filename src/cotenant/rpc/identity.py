"""Who calls: the seam behind which tokens are checked today, and certificates and roles can be tomorrow."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from cotenant.rpc import errors

Metadata = Sequence[tuple[str, str | bytes]]
Peer = Callable[[], Mapping[str, Iterable[bytes]]]
SCHEME = "Bearer "
HINT = "the token is in the file `token` of the server's state directory; pass it in COTENANT_TOKEN"


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller as the server knows it."""

    name: str


ANYONE = Identity("anyone")
OPERATOR = Identity("operator")

_identity: ContextVar[Identity] = ContextVar("identity", default=ANYONE)


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
    """Lets in who knows the token."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("an empty token would let everybody in")
        self._expected = token.encode()

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Compare the token in constant time, so that the answer's delay tells nothing of it."""
        for key, value in metadata:
            if key == "authorization":
                return self._judge(value if isinstance(value, str) else value.decode(errors="replace"))
        raise errors.unauthenticated("TOKEN_MISSING", f"the call carries no token; {HINT}")

    def _judge(self, authorization: str) -> Identity:
        scheme, token = authorization[: len(SCHEME)], authorization[len(SCHEME) :]
        if scheme.lower() != SCHEME.lower() or not hmac.compare_digest(token.encode(), self._expected):
            raise errors.unauthenticated("TOKEN_WRONG", f"the call's token is not this server's; {HINT}")
        return OPERATOR


def caller() -> Identity:
    """Return who made the call that is being served."""
    return _identity.get()


def enter(identity: Identity) -> None:
    """Remember who made the call. Each call is served in a context of its own, so that nothing is to be undone."""
    _identity.set(identity)
