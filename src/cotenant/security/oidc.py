"""Tokens of an identity provider: OpenID Connect's JWTs, checked against the provider's published keys.

The keys come from a file, or from a URL that is asked beside the calls, never while one waits; without either, from
where the provider's own `.well-known/openid-configuration` says. Keys that were had are used for as long as no others
can be had. Only signatures by public keys are taken, so that no key of ours can be mistaken for a provider's.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from cotenant.codec import errors
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role
from cotenant.security.subjects import EVERY_TENANT, Bearer, tenants_of

log = structlog.get_logger()

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
PEOPLE = (Role.VIEWER, Role.USER, Role.TENANT_ADMIN, Role.OPERATOR)
FETCH_SECONDS_MAX = 10.0
KEYS_BYTES_MAX = 1 << 20
AGAIN_SECONDS = 30.0  # between two looks for keys that are not known
WELL_KNOWN = "/.well-known/openid-configuration"
OLD_SECONDS = 600.0  # then the keys are asked for anew


class BadOidc(Exception):
    """The provider's settings cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class OidcRules:
    """Whose tokens are taken, and what their claims mean.

    `jwks` is a file or an https URL with the provider's keys; "" asks the issuer where they are. `name_claim` is who
    the caller is, `role_claim` one of viewer, user, tenant-admin and operator (`role_default` where it is absent, ""
    for none), `tenants_claim` a list of tenants or a text with commas. `leeway_seconds` is how far clocks may differ.
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
    """Checks JWTs."""

    def __init__(self, rules: OidcRules, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the keys, where they are in a file.

        Raises:
            BadOidc: they cannot be read, or the rules are not whole.
        """
        if not (rules.issuer and rules.audience):
            raise BadOidc("[oidc] needs issuer and audience")
        if rules.role_default and rules.role_default not in PEOPLE:
            raise BadOidc(f"[oidc] role_default: {rules.role_default!r} is none of {', '.join(PEOPLE)}")
        self.rules, self._clock = rules, clock
        self._keys: Mapping[str, Any] = {}
        self._stamp: object = None
        self._asked = -AGAIN_SECONDS
        self._fetching = False
        self._away = False  # the last time that keys were asked for, none could be had
        self._url = rules.jwks if "://" in rules.jwks else "" if rules.jwks else rules.issuer.rstrip("/") + WELL_KNOWN
        if self._url and not _safe(self._url):
            raise BadOidc(
                f"[oidc] {'jwks' if rules.jwks else 'issuer'}: keys that anybody on the way could change are not "
                "taken; use https"
            )
        if self._url:
            self._ask()
        else:
            self._read_file(first=True)

    def check(self, token: str) -> Identity:
        """Say who bears a JWT.

        Raises:
            Problem: UNAUTHENTICATED, with one word for each thing that can be wrong.
        """
        import jwt  # slow to import, and only who has a provider needs it

        if self._url:
            if self._clock() - self._asked > OLD_SECONDS:
                self._ask()
        else:
            self._read_file()
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, RecursionError):
            raise errors.unauthenticated("TOKEN_UNREADABLE", "the token is no JWT") from None
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
                "the token was signed with a key that is not known here, and the provider cannot be asked for its keys",
            )
        raise errors.unauthenticated(
            "TOKEN_KEY_UNKNOWN", "the token was signed with a key that the provider has not published; try again soon"
        )

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        rules = self.rules
        role = claims.get(rules.role_claim) or rules.role_default
        if role not in PEOPLE:
            raise errors.unauthenticated(
                "TOKEN_WITHOUT_ROLE", f"the token's claim {rules.role_claim} is none of {', '.join(PEOPLE)}"
            )
        told = claims.get(rules.tenants_claim) or ""
        try:
            if not isinstance(told, str | list):
                raise TypeError(f"{rules.tenants_claim} is neither a list nor a text")
            tenants = told if isinstance(told, str) else ",".join(str(one) for one in told)
            if EVERY_TENANT in tenants and tenants.strip() != EVERY_TENANT:
                raise ValueError(f"{EVERY_TENANT} stands alone")
            return Bearer(Role(role), str(claims[rules.name_claim]), tenants_of(tenants, Role(role))).identity
        except (ValueError, TypeError) as error:
            raise errors.unauthenticated("TOKEN_CLAIMS", f"the token's claims cannot be taken: {error}") from None

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
                raise BadOidc(f"[oidc] jwks: {path} cannot be read: {error}") from None
            log.error("oidc_keys_unreadable", path=str(path), error=str(error))

    def _ask(self) -> None:
        self._asked = self._clock()
        if not self._fetching:
            self._fetching = True
            threading.Thread(target=self._fetch, name="oidc-keys", daemon=True).start()

    def _fetch(self) -> None:
        try:
            url = self._url if self.rules.jwks else self._discovered()
            self._keys = _keys(_read(url))
            self._away = False
        except (OSError, ValueError, HTTPException, OverflowError) as error:  # the last of a length beyond all memory
            self._away = True
            log.error("oidc_keys_not_fetched", url=self._url, error=str(error) or type(error).__name__)
        finally:
            self._fetching = False

    def _discovered(self) -> str:
        """Ask the issuer where its keys are (OpenID Connect Discovery 1.0, section 4)."""
        try:
            told = json.loads(_read(self._url))
        except RecursionError:
            raise ValueError("the issuer's configuration is nested too deeply") from None
        if not isinstance(told, dict) or told.get("issuer") != self.rules.issuer:
            raise ValueError("what answers for the issuer says that it is another")
        url = told.get("jwks_uri")
        if not isinstance(url, str) or not _safe(url):
            raise ValueError("the issuer's jwks_uri is no https URL")
        return url


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows nobody to where anybody on the way could change the keys."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not _safe(newurl):
            raise ValueError(f"{req.full_url} leads to {newurl}, which is no https URL")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _read(url: str) -> bytes:
    """Read a document by https, or from loopback; a proxy of the environment's is for the former."""
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
        raise ValueError(f"no set of keys: {error}") from None
    kept = [key for key in told if key.key_type in ("RSA", "EC", "OKP") and key.public_key_use in (None, "sig")]
    return {key.key_id if isinstance(key.key_id, str) else "": key for key in kept}


def _safe(url: str) -> bool:
    return url.startswith("https://") or _local(url)


def _local(url: str) -> bool:
    """Whether a URL never leaves this machine.

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
        (jwt.ImmatureSignatureError, "TOKEN_NOT_YET_VALID", "the token is not valid yet; is the clock right?"),
        (jwt.InvalidAudienceError, "TOKEN_OF_ANOTHER_AUDIENCE", "the token was not made for this mesh"),
        (jwt.InvalidIssuerError, "TOKEN_OF_ANOTHER_ISSUER", "the token was made by another provider"),
        (jwt.MissingRequiredClaimError, "TOKEN_CLAIMS", f"the token is not whole: {error}"),
        (jwt.InvalidAlgorithmError, "TOKEN_ALGORITHM", "the token is signed in a way that is not taken"),
        (jwt.InvalidSignatureError, "TOKEN_WRONG", "the token's signature is not the provider's"),
    )
    for kind, reason, message in words:
        if isinstance(error, kind):
            return reason, message
    return "TOKEN_UNREADABLE", "the token cannot be read"
