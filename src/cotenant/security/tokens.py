"""Tokens of people, agents and services: a file with their digests that is reloaded whenever it changes.

A token is 32 random bytes, so one fast digest of it is enough: it cannot be guessed, and a stolen file reveals none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cotenant.codec import errors
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role
from cotenant.security.subjects import Subject, tenants_of, tenants_text
from cotenant.security.validity import Validity
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

TOKENS_FILE = "tokens.json"
PREFIX = "cotenant_"
TOKEN_BYTES = 32
LOOK_SECONDS = 0.5
TOKENS_MAX = 100_000
TIME_MAX = 253_402_300_799.0  # the last second of the year 9999
REPORT_SECONDS = 24 * 3600.0  # between two log lines about the same token


class BadTokens(Exception):
    """The token file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Token:
    """The stored data of a token. Times are in seconds since 1970; 0: it does not expire."""

    id: str
    subject: Subject
    digest: str
    created: float
    expires: float = 0.0

    def expired(self, now: float) -> bool:
        """Return whether it has expired."""
        return 0 < self.expires <= now

    def expires_soon(self, now: float) -> str:
        """Return when it expires, if it is due for renewal (by the rule for certificates); else ""."""
        if not self.expires or self.expired(now):
            return ""
        created, expires, moment = (datetime.fromtimestamp(one, UTC) for one in (self.created, self.expires, now))
        validity = Validity(created, expires)
        return validity.in_words(moment) if validity.is_due(moment) else ""


class TokenFile:
    """The token file: creates, revokes and looks up tokens."""

    def __init__(
        self, path: Path, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self._now, self._clock = path, now, clock
        self._stamp: tuple[int, int, int] | None = None
        self._by_digest: Mapping[str, Token] = {}
        self._looked = -LOOK_SECONDS
        self._logged: dict[str, float] = {}  # when the expiry of tokens was last logged, by ID

    def find(self, token: str) -> Identity | None:
        """Return the identity of a token; None if it is not in the file.

        Raises:
            Problem: UNAUTHENTICATED: it has expired.
        """
        if not token.startswith(PREFIX):
            return None
        self._look()
        known = self._by_digest.get(digest_of(token))
        if known is None:
            return None
        if known.expired(self._now()):
            raise errors.unauthenticated(
                "TOKEN_EXPIRED", f"the token of {known.subject} has expired; ask for a new one"
            )
        self._log_expiry(known)
        return replace(known.subject.identity, expires_seconds=known.expires)

    def tokens(self) -> list[Token]:
        """Return all tokens, the oldest first.

        Raises:
            BadTokens: the file cannot be read.
        """
        try:
            raw = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise BadTokens(f"cannot read {self.path}: {error.strerror}") from None
        try:
            told = json.loads(raw)["tokens"]
            return sorted((_token(one) for one in told), key=lambda one: (one.created, one.id))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise BadTokens(f"{self.path} is damaged: {type(error).__name__}") from None

    def create(self, subject: Subject, expires: float = 0.0) -> tuple[Token, str]:
        """Create a token; return its stored data and the token itself, which is stored nowhere.

        Raises:
            BadTokens: the file cannot be read or written, or the expiry is after the year 9999.
        """
        if not expires <= TIME_MAX:
            raise BadTokens("a token cannot expire after the year 9999; 0 means never")
        secret = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        made = Token(secrets.token_hex(4), subject, digest_of(secret), self._now(), expires)
        with self._locked():
            tokens = self.tokens()
            if len(tokens) >= TOKENS_MAX:
                raise BadTokens(f"{self.path} holds {TOKENS_MAX} tokens; revoke some")
            self._write([*tokens, made])
        return made, secret

    def revoke(self, id_or_name: str) -> list[Token]:
        """Revoke the token with this ID, or all with this name or ROLE/NAME; return the revoked tokens."""
        with self._locked():
            tokens = self.tokens()
            gone = [one for one in tokens if id_or_name in (one.id, one.subject.name, str(one.subject))]
            if gone:
                self._write([one for one in tokens if one not in gone])
        return gone

    def _log_expiry(self, token: Token) -> None:
        """Log when a token in use is due for renewal."""
        told = self._logged.get(token.id)
        if not token.expires or (told is not None and self._clock() - told < REPORT_SECONDS):
            return
        self._logged[token.id] = self._clock()
        if words := token.expires_soon(self._now()):
            remedy = "create a new one with `cotenant tokens create`, and revoke this one once it is no longer used"
            log.warning("token_expires_soon", id=token.id, subject=str(token.subject), told=words, remedy=remedy)

    def _look(self) -> None:
        """Reload the file if it has changed. A damaged file keeps the known tokens, and admits no others."""
        if self._clock() - self._looked < LOOK_SECONDS:
            return
        self._looked = self._clock()
        try:
            found = self.path.stat()
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
        except OSError:
            stamp = None
        if stamp == self._stamp and stamp is not None:
            return
        try:
            self._by_digest = {token.digest: token for token in self.tokens()}
            self._stamp = stamp
            ids = {token.id for token in self._by_digest.values()}
            self._logged = {token_id: told for token_id, told in self._logged.items() if token_id in ids}
        except BadTokens as error:
            log.error("tokens_unreadable", why=str(error))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file against changes by other processes."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadTokens(f"cannot store tokens in {self.path.parent}: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _write(self, tokens: list[Token]) -> None:
        try:
            descriptor, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            with os.fdopen(descriptor, "w") as file:
                json.dump({"tokens": [_kept(token) for token in tokens]}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except OSError as error:
            raise BadTokens(f"cannot write {self.path}: {error.strerror}") from None


def digest_of(token: str) -> str:
    """Return the digest of a token, as stored."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _kept(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "role": str(token.subject.role),
        "name": token.subject.name,
        "tenants": tenants_text(token.subject.tenants),
        "sha256": token.digest,
        "created": token.created,
        "expires": token.expires,
    }


def _token(told: Mapping[str, Any]) -> Token:
    role = Role(told["role"])
    subject = Subject(role, str(told["name"]), tenants_of(str(told["tenants"]), role))
    created, expires = float(told["created"]), float(told["expires"])
    if not (0 <= created <= TIME_MAX and 0 <= expires <= TIME_MAX):
        raise ValueError("invalid times")
    return Token(str(told["id"]), subject, str(told["sha256"]), created, expires)
