"""Authenticates callers by all means: the mesh's own token, tokens of a file, a provider's tokens, certificates.

A token takes precedence over the certificate of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cotenant.codec import errors
from cotenant.core.model.validation import shown
from cotenant.security.identity import (
    OPERATOR,
    BearerToken,
    Identity,
    Metadata,
    Peer,
    bearer_token,
    token_missing,
    token_wrong,
)
from cotenant.security.oidc import Oidc
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile

NAMES_OF_PEERS = ("peer_uri", "x509_subject_alternative_name", "x509_common_name")
KNOWN_MAX = 10_000
TOKEN_BYTES_MAX = 8192


class Credentials:
    """Authenticates callers by token or certificate."""

    def __init__(
        self,
        token: str = "",
        tokens: TokenFile | None = None,
        oidc: Oidc | None = None,
        bearers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`bearers` maps a name in a certificate of another authority to its subject: "gpu1.lab" to "agent/gpu1".

        Raises:
            ValueError: a value of `bearers` is not a subject.
        """
        self._own = BearerToken(token) if token else None
        self._tokens, self._oidc = tokens, oidc
        self._bearers = {name: Subject.parse(text).identity for name, text in bearers.items()}
        self._known: dict[str, Identity | None] = {}  # by URI

    def authenticate(self, method: str, metadata: Metadata, peer: Peer) -> Identity:
        """Return the caller's identity."""
        token = bearer_token(metadata)
        if token is not None:
            return self._by_token(token)
        if (identity := self._by_certificate(peer())) is not None:
            return identity
        raise token_missing()

    def _by_token(self, token: str) -> Identity:
        if not token or len(token) > TOKEN_BYTES_MAX:
            raise token_wrong()
        if self._own is not None and self._own.knows(token):
            return OPERATOR
        if self._tokens is not None and (identity := self._tokens.find(token)) is not None:
            return identity
        if self._oidc is not None and token.count(".") == 2:
            return self._oidc.check(token)
        raise token_wrong()

    def _by_certificate(self, shown_by_peer: Mapping[str, object]) -> Identity | None:
        names = [_text(name) for key in NAMES_OF_PEERS for name in _values(shown_by_peer.get(key))]
        if not names:
            return None
        for name in names:
            if (identity := self._bearers.get(name) or self._of_uri(name)) is not None:
                return identity
        raise errors.unauthenticated(
            "CERTIFICATE_OF_NOBODY",
            f"the certificate of {shown(names[-1])} names no subject; map it in [bearers] of the server's settings",
        )

    def _of_uri(self, name: str) -> Identity | None:
        if name not in self._known:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            try:
                found = Subject.of_uri(name)
            except ValueError as error:
                raise errors.unauthenticated("CERTIFICATE_OF_NOBODY", f"invalid certificate subject: {error}") from None
            self._known[name] = found.identity if found else None
        return self._known[name]


def _values(values: object) -> list[bytes]:
    return [one for one in values if isinstance(one, bytes)] if isinstance(values, list | tuple) else []


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
