"""Tokens of people, agents and services: a file that keeps their digests, and is read again whenever it changes.

A token is 32 bytes of chance, so that one quick digest of it is enough: there is nothing to guess, and a file that is
stolen gives no token away.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from cotenant.codec import errors
from cotenant.security.identity import Identity
from cotenant.security.permissions import Role
from cotenant.security.subjects import Bearer, tenants_in_words, tenants_of
from cotenant.security.validity import Validity

log = structlog.get_logger()

TOKENS_FILE = "tokens.json"
PREFIX = "cotenant_"
TOKEN_BYTES = 32
LOOK_SECONDS = 0.5
TOKENS_MAX = 100_000
TIME_MAX = 253_402_300_799.0  # the last second of the year 9999
TELL_SECONDS = 24 * 3600.0  # between two lines of the log about the same token


class BadTokens(Exception):
    """The file cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token. Times are in seconds since 1970; 0: it does not expire."""

    id: str
    bearer: Bearer
    digest: str
    created: float
    expires: float = 0.0

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return 0 < self.expires <= now

    def runs_out(self, now: float) -> str:
        """Say when it expires, where it is time for a new one, as with certificates; else ""."""
        if not self.expires or self.expired(now):
            return ""
        created, expires, moment = (datetime.fromtimestamp(one, UTC) for one in (self.created, self.expires, now))
        validity = Validity(created, expires)
        return validity.in_words(moment) if validity.is_due(moment) else ""


class TokenFile:
    """The file, for whoever makes tokens and for whoever checks them."""

    def __init__(
        self, path: Path, now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self._now, self._clock = path, now, clock
        self._stamp: tuple[int, int, int] | None = None
        self._by_digest: Mapping[str, Token] = {}
        self._looked = -LOOK_SECONDS
        self._told: dict[str, float] = {}  # when it was said of tokens that they run out, by id

    def find(self, token: str) -> Identity | None:
        """Say whose token this is; None where it is none of the file's.

        Raises:
            Problem: UNAUTHENTICATED, where it has expired.
        """
        if not token.startswith(PREFIX):
            return None
        self._look()
        known = self._by_digest.get(digest_of(token))
        if known is None:
            return None
        if known.expired(self._now()):
            raise errors.unauthenticated("TOKEN_EXPIRED", f"the token of {known.bearer} has expired; ask for a new one")
        self._tell(known)
        return known.bearer.identity

    def tokens(self) -> list[Token]:
        """All tokens, the oldest first.

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

    def create(self, bearer: Bearer, expires: float = 0.0) -> tuple[Token, str]:
        """Make a token, and return what is kept of it and the token itself, which is nowhere else.

        Raises:
            BadTokens: the file cannot be read or written, or the year is beyond all calendars.
        """
        if not expires <= TIME_MAX:
            raise BadTokens("a token cannot expire after the year 9999; with 0 it never does")
        secret = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        made = Token(secrets.token_hex(4), bearer, digest_of(secret), self._now(), expires)
        with self._locked():
            tokens = self.tokens()
            if len(tokens) >= TOKENS_MAX:
                raise BadTokens(f"{self.path} holds {TOKENS_MAX} tokens; revoke some")
            self._write([*tokens, made])
        return made, secret

    def revoke(self, id_or_name: str) -> list[Token]:
        """Forget the token of this id, or all of this name or ROLE/NAME; returns which these were."""
        with self._locked():
            tokens = self.tokens()
            gone = [one for one in tokens if id_or_name in (one.id, one.bearer.name, str(one.bearer))]
            if gone:
                self._write([one for one in tokens if one not in gone])
        return gone

    def _tell(self, token: Token) -> None:
        """Say of a token that is used when it is time for a new one."""
        told = self._told.get(token.id)
        if not token.expires or (told is not None and self._clock() - told < TELL_SECONDS):
            return
        self._told[token.id] = self._clock()
        if words := token.runs_out(self._now()):
            remedy = "make a new one by `cotenant tokens create`, and revoke this one once nobody uses it"
            log.warning("token_runs_out", id=token.id, bearer=str(token.bearer), told=words, remedy=remedy)

    def _look(self) -> None:
        """Read the file again where it has changed. One that is damaged lets nobody in whom it did not before."""
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
            self._told = {token_id: told for token_id, told in self._told.items() if token_id in ids}
        except BadTokens as error:
            log.error("tokens_unreadable", why=str(error))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let nobody else change the file meanwhile."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadTokens(f"cannot keep tokens in {self.path.parent}: {error.strerror}") from None
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
    """What is kept of a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _kept(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "role": str(token.bearer.role),
        "name": token.bearer.name,
        "tenants": tenants_in_words(token.bearer.tenants),
        "sha256": token.digest,
        "created": token.created,
        "expires": token.expires,
    }


def _token(told: Mapping[str, Any]) -> Token:
    role = Role(told["role"])
    bearer = Bearer(role, str(told["name"]), tenants_of(str(told["tenants"]), role))
    created, expires = float(told["created"]), float(told["expires"])
    if not (0 <= created <= TIME_MAX and 0 <= expires <= TIME_MAX):
        raise ValueError("its times are none")
    return Token(str(told["id"]), bearer, str(told["sha256"]), created, expires)
