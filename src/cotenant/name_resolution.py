"""Whether a process can resolve the names of the parts that it calls.

A name server that fails is not noticed while connections stand; the next part that moves to another address is lost
then. So the names in use are looked up every few seconds in a thread, and those that have failed for a while are
problems of the process. A single question that was lost is none.
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
SLOW_SECONDS = 2.0  # an answer that takes longer counts as a failure: connections are given up sooner
SUSTAINED_SECONDS = 12.0  # more than two looks
ERRORS_MAX = 10
REMEDY = "check the name servers in /etc/resolv.conf of its machine, and that the name is still there"


class NameChecks:
    """Looks up hosts that `watch` has named, for as long as whoever uses them exists."""

    def __init__(
        self,
        resolve: Callable[[str], object] = lambda host: socket.getaddrinfo(host, None),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolve, self._clock = resolve, clock
        self._users: WeakKeyDictionary[object, frozenset[str]] = WeakKeyDictionary()
        self._failing: dict[str, tuple[float, str]] = {}  # by host: since when, and why
        self._asked: tuple[str, float] | None = None  # a host that is being looked up, and since when
        self._looking: threading.Thread | None = None
        self._looked = float("-inf")

    def watch(self, user: object, hosts: Iterable[str]) -> None:
        """Look up these hosts while `user` exists; addresses in numbers need no look."""
        if named := frozenset(host for host in hosts if not _is_number(host)):
            self._users[user] = named

    def drop(self, user: object) -> None:
        """Look up the hosts of `user` no longer."""
        self._users.pop(user, None)

    def hosts(self) -> list[str]:
        """The names in use, sorted."""
        return sorted({host for hosts in list(self._users.values()) for host in hosts})

    def errors(self) -> list[str]:
        """Return for each name that has not been resolved for a while why, in one sentence."""
        now, hosts = self._clock(), self.hosts()
        failing = dict(self._failing)
        if asked := self._asked:
            host, since = asked
            failing.setdefault(host, (since, f"no answer within {max(0.0, now - since):.0f} s"))
        found = [(host, why) for host, (since, why) in sorted(failing.items()) if now - since >= SUSTAINED_SECONDS]
        return [f"it cannot resolve {host}: {why}" for host, why in found if host in hosts][:ERRORS_MAX]

    async def run(self) -> None:
        """Look every few seconds until cancelled."""
        while True:
            if self._clock() - self._looked >= LOOK_SECONDS and self._looking is None and self.hosts():
                self._looked = self._clock()
                self._looking = threading.Thread(target=self.look, name="name-checks", daemon=True)
                try:
                    self._looking.start()
                except RuntimeError:  # no thread can be started; the next look may do better
                    self._looking = None
            await asyncio.sleep(LOOK_SECONDS / 5)

    def look(self) -> None:
        """Look up each name once."""
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
