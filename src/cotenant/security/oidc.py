"""Tokens of an identity provider: OpenID Connect JWTs, checked against the provider's published keys.

The keys come from a file, or from a URL that is fetched in the background, without delaying calls; without either, from
the provider's own `.well-known/openid-configuration`. Known keys are used until others can be fetched. Only signatures
with public keys are accepted, so that no key of ours can be mistaken for a provider's.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cotenant.codec import errors
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role
from cotenant.security.subjects import EVERY_TENANT, Subject, tenants_of
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
USER_ROLES = (Role.VIEWER, Role.USER, Role.TENANT_ADMIN, Role.OPERATOR)
FETCH_SECONDS_MAX = 10.0
KEYS_BYTES_MAX = 1 << 20
AGAIN_SECONDS = 30.0  # between two fetches for an unknown key
WELL_KNOWN = "/.well-known/openid-configuration"
OLD_SECONDS = 600.0  # after which keys are fetched again


class BadOidc(Exception):
    """The provider's settings are invalid; the message says why."""


@dataclass(frozen=True, slots=True)
class OidcRules:
    """Which provider's tokens are accepted, and what their claims mean.

    `jwks` is a file or an https URL with the provider's keys; "" discovers them from the issuer. `name_claim` is the
    caller's name, `role_claim` one of viewer, user, tenant-admin and operator (`role_default` if it is absent, "" for
    none), `tenants_claim` a list of tenants or a comma-separated string. `leeway_seconds` is the allowed clock skew.
    """

    issuer: str
    audience: str
    jwks: str = ""
    name_claim: str = "sub"
    role_claim: str = "cotenant_role"
    role_default: str = ""
    tenants_claim: str = "cotenant_tenants"
    leeway_seconds: float = 30.0


class Oidc:
    """Validates JWTs."""

    def __init__(self, rules: OidcRules, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys, if they are in a file.

        Raises:
            BadOidc: the keys cannot be read, or the rules are incomplete.
        """
        if not (rules.issuer and rules.audience):
            raise BadOidc("[oidc] needs issuer and audience")
        if rules.role_default and rules.role_default not in USER_ROLES:
            raise BadOidc(f"[oidc] role_default: {rules.role_default!r} is not one of {', '.join(USER_ROLES)}")
        self.rules, self._clock = rules, clock
        self._keys: Mapping[str, Any] = {}
        self._stamp: object = None
        self._asked = -AGAIN_SECONDS
        self._fetching = False
        self._away = False  # the last fetch of keys failed
        self._url = rules.jwks if "://" in rules.jwks else "" if rules.jwks else rules.issuer.rstrip("/") + WELL_KNOWN
        if self._url and not _is_safe(self._url):
            raise BadOidc(f"[oidc] {'jwks' if rules.jwks else 'issuer'}: keys need a protected connection; use https")
        if self._url:
            self._ask()
        else:
            self._read_file(first=True)

    def check(self, token: str) -> Identity:
        """Return the identity of a JWT.

        Raises:
            Problem: UNAUTHENTICATED, with a distinct reason for each kind of error.
        """
        import jwt  # slow to import, and only needed with a provider

        if self._url:
            if self._clock() - self._asked > OLD_SECONDS:
                self._ask()
        else:
            self._read_file()
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, RecursionError):
            raise errors.unauthenticated("TOKEN_UNREADABLE", "the token is not a JWT") from None
        key = self._key(header.get("kid"))
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[name for name in ALGORITHMS if name == key.algorithm_name],
                audience=self.rules.audience,
                issuer=self.rules.issuer,
                leeway=self.rules.leeway_seconds,
                options={"require": ["exp", "iss", "aud", self.rules.name_claim]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise errors.unauthenticated(*_why(error)) from None
        return self._identity(claims)

    def _key(self, key_id: object) -> Any:
        if isinstance(key_id, str) and key_id in self._keys:
            return self._keys[key_id]
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if self._url and self._clock() - self._asked > AGAIN_SECONDS:
            self._ask()
        if self._away:
            raise errors.unauthenticated(
                "TOKEN_KEYS_AWAY",
                "the token was signed with an unknown key, and the provider's keys cannot be fetched",
            )
        raise errors.unauthenticated(
            "TOKEN_KEY_UNKNOWN", "the token was signed with a key that the provider has not published; try again soon"
        )

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        rules = self.rules
        role = claims.get(rules.role_claim) or rules.role_default
        if role not in USER_ROLES:
            raise errors.unauthenticated(
                "TOKEN_WITHOUT_ROLE", f"the token's claim {rules.role_claim} is not one of {', '.join(USER_ROLES)}"
            )
        told = claims.get(rules.tenants_claim) or ""
        try:
            if not isinstance(told, str | list):
                raise TypeError(f"{rules.tenants_claim} is neither a list nor a string")
            tenants = told if isinstance(told, str) else ",".join(str(one) for one in told)
            if EVERY_TENANT in tenants and tenants.strip() != EVERY_TENANT:
                raise ValueError(f"{EVERY_TENANT} cannot be combined with tenants")
            subject = Subject(Role(role), str(claims[rules.name_claim]), tenants_of(tenants, Role(role)))
            return replace(subject.identity, expires_seconds=float(claims["exp"]))
        except (ValueError, TypeError, OverflowError) as error:  # a time may have hundreds of digits
            raise errors.unauthenticated("TOKEN_CLAIMS", f"invalid claims in the token: {error}") from None

    # Keys ----------------------------------------------------------------------------------------------------

    def _read_file(self, *, first: bool = False) -> None:
        path = Path(self.rules.jwks)
        try:
            found = path.stat()
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._keys = _keys(path.read_bytes())
        except (OSError, ValueError) as error:
            if first:
                raise BadOidc(f"[oidc] jwks: cannot read {path}: {error}") from None
            log.error("oidc_keys_unreadable", path=str(path), error=str(error))

    def _ask(self) -> None:
        if not self._fetching:  # else ask again: the fetch may have got its answer already
            self._asked, self._fetching = self._clock(), True
            threading.Thread(target=self._fetch, name="oidc-keys", daemon=True).start()

    def _fetch(self) -> None:
        try:
            url = self._url if self.rules.jwks else self._discovered()
            self._keys = _keys(_read(url))
            self._away = False
        except (
            OSError,
            ValueError,
            HTTPException,
            OverflowError,
        ) as error:  # the last: a length beyond memory
            self._away = True
            log.error("oidc_key_fetch_failed", url=self._url, error=str(error) or type(error).__name__)
        finally:
            self._fetching = False

    def _discovered(self) -> str:
        """Return the URL of the issuer's keys (OpenID Connect Discovery 1.0, section 4)."""
        try:
            told = json.loads(_read(self._url))
        except RecursionError:
            raise ValueError("the issuer's configuration is nested too deeply") from None
        if not isinstance(told, dict) or told.get("issuer") != self.rules.issuer:
            raise ValueError("the issuer's configuration names another issuer")
        url = told.get("jwks_uri")
        if not isinstance(url, str) or not _is_safe(url):
            raise ValueError("the issuer's jwks_uri is not an https URL")
        return url


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to an unprotected connection."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not _is_safe(newurl):
            raise ValueError(f"{req.full_url} redirects to {newurl}, which is not an https URL")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _read(url: str) -> bytes:
    """Fetch a document by https, or from loopback; the environment's proxy is used only for https."""
    handlers: list[urllib.request.BaseHandler] = [_SafeRedirects()]
    if _local(url):
        handlers.append(urllib.request.ProxyHandler({}))
    with urllib.request.build_opener(*handlers).open(url, timeout=FETCH_SECONDS_MAX) as answer:
        read: bytes = answer.read(KEYS_BYTES_MAX)
    return read


def _keys(raw: bytes) -> Mapping[str, Any]:
    import jwt

    try:
        told = jwt.PyJWKSet.from_dict(json.loads(raw)).keys
    except (jwt.PyJWTError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a key set: {error}") from None
    kept = [key for key in told if key.key_type in ("RSA", "EC", "OKP") and key.public_key_use in (None, "sig")]
    return {key.key_id if isinstance(key.key_id, str) else "": key for key in kept}


def _is_safe(url: str) -> bool:
    return url.startswith("https://") or _local(url)


def _local(url: str) -> bool:
    """Return whether a URL never leaves this machine.

    >>> _local("http://127.0.0.1:80/keys"), _local("http://127.0.0.1:80@evil.example/keys")
    (True, False)
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "http" and "@" not in parts.netloc and parts.hostname in ("127.0.0.1", "localhost", "::1")


def _why(error: Exception) -> tuple[str, str]:
    import jwt

    words: tuple[tuple[type[Exception], str, str], ...] = (
        (jwt.ExpiredSignatureError, "TOKEN_EXPIRED", "the token has expired; sign in again"),
        (jwt.ImmatureSignatureError, "TOKEN_NOT_YET_VALID", "the token is not valid yet; check the clock"),
        (jwt.InvalidAudienceError, "TOKEN_OF_ANOTHER_AUDIENCE", "the token was not issued for this mesh"),
        (jwt.InvalidIssuerError, "TOKEN_OF_ANOTHER_ISSUER", "the token was issued by another provider"),
        (jwt.MissingRequiredClaimError, "TOKEN_CLAIMS", f"the token is incomplete: {error}"),
        (jwt.InvalidAlgorithmError, "TOKEN_ALGORITHM", "the token's signature algorithm is not accepted"),
        (jwt.InvalidSignatureError, "TOKEN_WRONG", "the token's signature is invalid"),
    )
    for kind, reason, message in words:
        if isinstance(error, kind):
            return reason, message
    return "TOKEN_UNREADABLE", "the token cannot be read"
