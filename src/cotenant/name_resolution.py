"""Checks whether a process can resolve the names of the services that it calls.

A failing name server goes unnoticed while connections last; then the next service that moves to another address is
lost. So the names in use are resolved every few seconds in a thread, and names that fail for a while are problems of
the process. A single lost query is not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

LOOK_SECONDS = 5.0
SLOW_SECONDS = 2.0  # slower answers count as failures: connection attempts time out sooner
SUSTAINED_SECONDS = 12.0  # more than two checks
ERRORS_MAX = 10
REMEDY = "check the name servers in /etc/resolv.conf of its machine, and that the name still exists"


class NameChecks:
    """Resolves the hosts passed to `watch`, for as long as their users exist."""

    def __init__(
        self,
        resolve: Callable[[str], object] = lambda host: socket.getaddrinfo(host, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolve, self._clock = resolve, clock
        self._users: WeakKeyDictionary[object, frozenset[str]] = WeakKeyDictionary()
        self._failing: dict[str, tuple[float, str]] = {}  # by host: since when, and why
        self._asked: tuple[str, float] | None = None  # the host being resolved, and since when
        self._looking: threading.Thread | None = None
        self._looked = float("-inf")

    def watch(self, user: object, hosts: Iterable[str]) -> None:
        """Resolve these hosts while `user` exists; IP addresses are skipped."""
        if named := frozenset(host for host in hosts if not _is_number(host)):
            self._users[user] = named

    def drop(self, user: object) -> None:
        """Stop resolving the hosts of `user`."""
        self._users.pop(user, None)

    def hosts(self) -> list[str]:
        """Return the names in use, sorted."""
        return sorted({host for hosts in list(self._users.values()) for host in hosts})

    def errors(self) -> list[str]:
        """Return one sentence for each name that has failed for a while."""
        now, hosts = self._clock(), self.hosts()
        failing = dict(self._failing)
        if asked := self._asked:
            host, since = asked
            failing.setdefault(host, (since, f"no answer within {max(0.0, now - since):.0f} s"))
        found = [(host, why) for host, (since, why) in sorted(failing.items()) if now - since >= SUSTAINED_SECONDS]
        return [f"it cannot resolve {host}: {why}" for host, why in found if host in hosts][:ERRORS_MAX]

    async def run(self) -> None:
        """Resolve the names every few seconds until cancelled."""
        while True:
            if self._clock() - self._looked >= LOOK_SECONDS and self._looking is None and self.hosts():
                self._looked = self._clock()
                self._looking = threading.Thread(target=self.look, name="name-checks", daemon=True)
                try:
                    self._looking.start()
                except RuntimeError:  # no thread can be started; try again at the next check
                    self._looking = None
            await asyncio.sleep(LOOK_SECONDS / 5)

    def look(self) -> None:
        """Resolve each name once."""
        try:
            hosts = self.hosts()
            for host in hosts:
                begin = self._clock()
                self._asked = (host, begin)
                why = self._why_not(host)
                took = self._clock() - begin
                if not why and took >= SLOW_SECONDS:
                    why = f"the answer took {took:.0f} s"
                if why:
                    since, _ = self._failing.get(host, (begin, ""))
                    self._failing[host] = since, why
                else:
                    self._failing.pop(host, None)
                self._asked = None
            for host in set(self._failing) - set(hosts):
                self._failing.pop(host, None)
        finally:
            self._asked = self._looking = None

    def _why_not(self, host: str) -> str:
        try:
            self._resolve(host)
        except (OSError, UnicodeError) as error:
            return (error.strerror if isinstance(error, OSError) else None) or str(error)
        return ""


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


NAMES = NameChecks()  # of this process
