"""Sessions of the dashboard: a cookie for an API token, for a limited time; and the tokens of its forms."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

LIFE_SECONDS = 12 * 3600.0
IDLE_SECONDS = 2 * 3600.0
SESSIONS_MAX = 1000
TOKEN_BYTES = 32


@dataclass(slots=True)
class Session:
    """A logged-in browser."""

    api_token: str = field(repr=False)
    csrf: str = field(repr=False)
    began: float
    used: float

    def is_alive(self, now: float) -> bool:
        """Return whether it has not expired."""
        return now - self.began < LIFE_SECONDS and now - self.used < IDLE_SECONDS


class Sessions:
    """The sessions, by the hash of their cookie. They are kept in memory: a restart ends them all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_hash: dict[bytes, Session] = {}

    def create(self, api_token: str) -> str:
        """Begin a session and return its cookie."""
        now = self._clock()
        self._by_hash = {name: one for name, one in self._by_hash.items() if one.is_alive(now)}
        while len(self._by_hash) >= SESSIONS_MAX:
            del self._by_hash[min(self._by_hash, key=lambda name: self._by_hash[name].used)]
        cookie = new_token()
        self._by_hash[_hash(cookie)] = Session(api_token, new_token(), now, now)
        return cookie

    def find(self, cookie: str) -> Session | None:
        """Return the session of a cookie, which is in use now; None if it has expired or never was."""
        session = self._by_hash.get(_hash(cookie)) if cookie else None
        if session is None:
            return None
        now = self._clock()
        if not session.is_alive(now):
            self.end(cookie)
            return None
        session.used = now
        return session

    def end(self, cookie: str) -> None:
        """End a session."""
        self._by_hash.pop(_hash(cookie), None)

    def end_all_of(self, api_token: str) -> None:
        """End all sessions of an API token, which the API no longer accepts."""
        self._by_hash = {name: one for name, one in self._by_hash.items() if not same(one.api_token, api_token)}


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def same(one: str, other: str) -> bool:
    """Return whether two secrets are equal, in a time that does not tell where they differ; an empty one never is."""
    return bool(one) and hmac.compare_digest(one.encode(), other.encode())


def _hash(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode(errors="surrogateescape")).digest()
