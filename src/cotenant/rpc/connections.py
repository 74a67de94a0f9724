"""Limits connections whose peer has not authenticated, and keeps a reserve of file descriptors.

Theory of operation. gRPC accepts connections in its core, before any code of ours runs, and keeps each one for as long
as the peer likes: a connection that finished the HTTP/2 handshake and never makes a call costs a descriptor forever,
without a token. gRPC's handshake time-out closes connections that never get that far. For the others a *warden* looks
at the process's own sockets. It compares two sources:

- the interceptor reports the peer (`ipv4:host:port`) of each authenticated call;
- the kernel lists the sockets of this process that were accepted on the server's port, with their peers.

A connection whose peer was not reported is closed when it has been idle for too long, or when its address has too many
of them; the oldest first, so that a new connection always has time to authenticate. An authenticated connection is
never closed and does not count: clients behind one address do not shut each other out.

A reserve of descriptors stays free for files that the process itself opens: gRPC closes connections beyond
`connections_max` as soon as it has accepted them. Before that point is reached, descriptors are *scarce*, and
unauthenticated connections are closed while they are young, many at a time, so that there is nearly always room for a
new one.

The warden closes a connection by `shutdown` on a duplicate: gRPC sees the end of the stream and closes its own
descriptor. The duplicate replaces a descriptor that is held for this purpose, so that this works when no other is left,
and its inode is compared with the scanned one, so that a descriptor number that was reused is left alone.

Cost: a look that finds the same number of open descriptors, and no connection that may have to be closed, is one
`stat`. Otherwise it takes a microsecond per descriptor, at most once a second, and at most a hundredth of the time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from cotenant import file_descriptors, telemetry
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

LOOK_SECONDS, SCARCE_LOOK_SECONDS = 0.25, 0.02
SCARCE_SHARE_MAX = 0.1  # of the time, while descriptors are scarce
SCAN_SECONDS_MIN, SCAN_SECONDS_MAX = 1.0, 5.0
SCAN_SHARE_MAX = 0.01  # of the time
GROWTH = 32  # this many more descriptors than at the last scan force a scan
EXAMINED_MAX = 2_000  # new descriptors per scan; the next scan takes the rest
REPORT_SECONDS = 10.0  # between two log lines
RECENT_SECONDS = 40.0  # `status` is without the problem within a minute of its end
CONNECTIONS_MIN, CONNECTIONS_MAX = 16, 2**31 - 1
IPV6_PREFIX_BYTES = 8  # a host with one IPv6 address usually has a whole /64

UNAUTHENTICATED = telemetry.gauge(
    "cotenant.connections.unauthenticated", "{connection}", "Open connections that have not authenticated."
)
CLOSED = telemetry.counter(
    "cotenant.connections.closed",
    "{connection}",
    "Connections closed because they did not authenticate, by reason.",
)
USED = telemetry.gauge("cotenant.descriptors.used", "{descriptor}", "Open file descriptors of the process.")
LIMIT = telemetry.gauge("cotenant.descriptors.limit", "{descriptor}", "File descriptors that the process may open.")


@dataclass(frozen=True, slots=True)
class ConnectionRules:
    """Limits for connections that have not authenticated.

    `silent_seconds` is how long a connection may make no call at all, not even a health check. `per_address` and
    `in_all` limit their number; connections younger than `young_seconds` are spared. While descriptors are scarce, each
    has `scarce_seconds` to authenticate. Health watches without a token are limited by `watches_per_address` and
    `watches_in_all`, and last `watch_seconds`; an authenticated connection may have `watches_per_connection`. gRPC
    closes connections that have not finished their handshake within `handshake_seconds`.
    """

    silent_seconds: float = 10.0
    young_seconds: float = 1.0
    scarce_seconds: float = 0.3
    per_address: int = 64
    in_all: int = 1024
    watches_per_address: int = 256
    watches_in_all: int = 1024
    watches_per_connection: int = 16
    watch_seconds: float = 300.0
    handshake_seconds: float = 10.0


RULES = ConnectionRules()


@dataclass(frozen=True, slots=True)
class ProcessProblem:
    """A problem of a process, and its remedy."""

    reason: str
    remedy: str


@dataclass(slots=True)
class Connection:
    """An accepted connection. `active` is when it was first seen or last made an unauthenticated call."""

    descriptor: int
    inode: int
    peer: str
    since: float
    active: float
    watches: bool = False
    closed: bool = False


class Connections:
    """The connections of one server. With `mutual_tls` a finished handshake counts as authentication."""

    def __init__(
        self,
        rules: ConnectionRules = RULES,
        *,
        mutual_tls: bool = False,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[], file_descriptors.Usage] = file_descriptors.usage,
    ) -> None:
        self.rules = rules
        self._mutual_tls, self._clock, self._usage = mutual_tls, clock, usage
        self._authenticated: set[str] = set()
        self._asked: dict[str, float] = {}
        self.on_authenticated: Callable[[str], None] = lambda peer: None  # set by the health service
        self.watches: Callable[[str], bool] = lambda peer: False  # whether a peer has a health watch; also set by it
        self._sockets: dict[int, tuple[int, Connection | None]] = {}  # inode and connection, by descriptor
        self._used = 0
        self._unexamined = self._waiting = False
        self._scanned, self._scan_seconds = -SCAN_SECONDS_MAX, SCAN_SECONDS_MIN
        self._scarce = False
        self._recent: deque[tuple[float, str, str]] = deque(maxlen=10_000)  # when, why, from where one was closed
        self._unreported: Counter[tuple[str, str]] = Counter()
        self._reported = -REPORT_SECONDS
        self._null = self._spare = -1

    # Reports of the interceptor and the health service -----------------------------------------------------------

    def authenticated(self, peer: str) -> None:
        """Record that a call of this peer has authenticated. `peer` is the value of gRPC's `context.peer()`."""
        if peer not in self._authenticated:
            self._authenticated.add(peer)
            self.on_authenticated(peer)

    def is_authenticated(self, peer: str) -> bool:
        """Return whether a call of this peer has authenticated."""
        return peer in self._authenticated

    def asked(self, peer: str) -> None:
        """Record an unauthenticated call, such as a health check: the peer is not idle."""
        self._asked[peer] = self._clock()

    # Scanning ----------------------------------------------------------------------------------------------------

    async def run(self, port: int) -> None:
        """Watch the connections that are accepted on a port, until cancelled."""
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._null)
        try:
            while True:
                await asyncio.sleep(SCARCE_LOOK_SECONDS if self._scarce else LOOK_SECONDS)
                try:
                    self.look(port)
                except Exception:  # try again at the next look
                    log.exception("connection_scan_failed")
        finally:
            os.close(self._spare)
            os.close(self._null)

    def look(self, port: int) -> None:
        """Scan if something may have changed, and close connections beyond the limits."""
        now, usage = self._clock(), self._usage()
        USED.set(usage.used)
        LIMIT.set(usage.limit)
        self._report_scarcity(usage)
        since = now - self._scanned
        grown = usage.used >= self._used + GROWTH or self._unexamined
        changed = (self._waiting or usage.used != self._used) and since >= self._scan_seconds
        hurried = self._scarce and since * SCARCE_SHARE_MAX >= self._scan_seconds * SCAN_SHARE_MAX
        if not (grown or changed or hurried or since >= max(SCAN_SECONDS_MAX, self._scan_seconds)):
            return
        self._scan(port, now, usage.used)
        waiting = self._unauthenticated(now)
        self._waiting = bool(waiting)
        UNAUTHENTICATED.set(len(waiting))
        shortage = 4 * usage.reserve - usage.free if self._scarce else 0
        for connection, why in connections_to_close(waiting, self.rules, now, shortage):
            if self._close(connection):
                CLOSED.add(reason=why)
                address = address_of(connection.peer)
                self._recent.append((now, why, address))
                self._unreported[why, address] += 1
        self._report(now)

    def _report_scarcity(self, usage: file_descriptors.Usage) -> None:
        if usage.scarce and not self._scarce:
            log.warning("descriptors_scarce", used=usage.used, limit=usage.limit)
            self._scarce = True
        elif self._scarce and usage.ample:
            log.info("descriptors_recovered", used=usage.used, limit=usage.limit)
            self._scarce = False

    def _scan(self, port: int, now: float, used: int) -> None:
        """Update the table of sockets, and drop peers that are gone."""
        began = time.perf_counter()
        before, asked = set(self._authenticated), dict(self._asked)  # more may arrive during the scan
        sockets: dict[int, tuple[int, Connection | None]] = {}
        examined = 0
        for descriptor, inode in open_sockets(used):
            known = self._sockets.get(descriptor)
            if known is None or known[0] != inode:
                if examined >= EXAMINED_MAX:
                    continue
                examined += 1
                peer = accepted_peer(descriptor, port)
                known = inode, Connection(descriptor, inode, peer, now, now) if peer else None
            sockets[descriptor] = known
        self._sockets = sockets
        self._unexamined = examined >= EXAMINED_MAX
        if not self._unexamined:
            there = {connection.peer for _, connection in sockets.values() if connection}
            self._authenticated -= before - there
            for peer in asked.keys() - there:
                del self._asked[peer]
        self._used, self._scanned = used, now
        self._scan_seconds = max(SCAN_SECONDS_MIN, (time.perf_counter() - began) / SCAN_SHARE_MAX)

    def _unauthenticated(self, now: float) -> list[Connection]:
        found = []
        for _, connection in self._sockets.values():
            if connection is None or connection.closed or connection.peer in self._authenticated:
                continue
            if self._mutual_tls and now - connection.since > self.rules.handshake_seconds:
                continue  # it has shown a certificate, or gRPC would have closed it
            connection.active = max(connection.since, self._asked.get(connection.peer, 0.0))
            connection.watches = self.watches(connection.peer)
            found.append(connection)
        return found

    def _close(self, connection: Connection) -> bool:
        """Shut a connection down; return False if it is already gone."""
        connection.closed = True
        try:
            os.dup2(connection.descriptor, self._spare, inheritable=False)
            if os.fstat(self._spare).st_ino != connection.inode:
                return False
            held = socket.socket(fileno=self._spare)
            try:
                held.shutdown(socket.SHUT_RDWR)
            finally:
                held.detach()
        except OSError:
            return False
        finally:
            os.dup2(self._null, self._spare, inheritable=False)
        return True

    def _report(self, now: float) -> None:
        if self._unreported and now - self._reported >= REPORT_SECONDS:
            for (why, address), count in self._unreported.most_common(3):
                log.warning("unauthenticated_connections_closed", count=count, reason=why, address=address)
            self._unreported.clear()
            self._reported = now

    # Problems ----------------------------------------------------------------------------------------------------

    def problems(self) -> list[ProcessProblem]:
        """Return the current problems: scarce descriptors, and a flood of connections."""
        found, now = [], self._clock()
        if self._scarce:
            found.append(
                ProcessProblem(
                    f"the process is almost out of file descriptors: {self._usage()}",
                    "raise its hard limit (LimitNOFILE= of its unit, or `ulimit -Hn`) and restart it, or stop "
                    "clients that keep many connections",
                )
            )
        flood = Counter(where for when, why, where in self._recent if why != IDLE and now - when < RECENT_SECONDS)
        if flood:
            most, _ = flood.most_common(1)[0]
            found.append(
                ProcessProblem(
                    f"{flood.total()} unauthenticated connections were closed in the last {RECENT_SECONDS:.0f} s, "
                    f"most of them from {most}",
                    f"find out what connects from {most}; clients with a token or certificate are still served",
                )
            )
        return found


IDLE, TOO_MANY, SCARCE = "silent", "too_many", "descriptors_scarce"


def connections_to_close(
    unauthenticated: Sequence[Connection], rules: ConnectionRules, now: float, shortage: int = 0
) -> list[tuple[Connection, str]]:
    """Return the connections to close, and why: idle ones, then the oldest beyond a limit.

    `shortage` is how many descriptors are missing: to free them, young connections are closed too. A connection with a
    health watch is never idle, and is closed after those without one.
    """
    order = sorted(unauthenticated, key=lambda one: (one.watches, one.since, one.inode))
    closing = {one.descriptor: IDLE for one in order if not one.watches and now - one.active > rules.silent_seconds}
    left = [one for one in order if one.descriptor not in closing]
    by_address = Counter(address_of(one.peer) for one in left)
    in_all = len(left)
    for one in left:
        address = address_of(one.peer)
        crowded = by_address[address] > rules.per_address or in_all > rules.in_all
        if crowded and now - one.since >= rules.young_seconds:
            closing[one.descriptor] = TOO_MANY
            by_address[address] -= 1
            in_all -= 1
    for one in order if shortage > 0 else ():
        if len(closing) < shortage or now - one.since >= rules.scarce_seconds:
            closing.setdefault(one.descriptor, SCARCE)
    return [(one, closing[one.descriptor]) for one in order if one.descriptor in closing]


def connections_max(usage: file_descriptors.Usage) -> int:
    """Return how many connections a server may accept at once: what its process does not need itself.

    >>> connections_max(file_descriptors.Usage(40, 1000)), connections_max(file_descriptors.Usage(40, 60))
    (860, 16)
    """
    return min(max(CONNECTIONS_MIN, usage.free - usage.reserve), CONNECTIONS_MAX)


def open_sockets(used: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each socket of this process. Opens no descriptor: there may be none left.

    The kernel assigns the lowest free number, so `used` open descriptors are found after few more than `used` tries.
    """
    found, descriptor, most = 0, 0, file_descriptors.usage().limit
    while found < used and descriptor < most:
        try:
            status = os.fstat(descriptor)
        except OSError:
            descriptor += 1
            continue
        found += 1
        if stat.S_ISSOCK(status.st_mode):
            yield descriptor, status.st_ino
        descriptor += 1


def accepted_peer(descriptor: int, port: int) -> str:
    """Return the peer of a socket that was accepted on a port, in gRPC's format; "" for any other socket."""
    try:
        held = socket.socket(fileno=descriptor)
    except OSError:
        return ""
    try:
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.getsockname()[1] != port:
            return ""
        return peer_name(*held.getpeername()[:2])
    except OSError:  # a listener, or the peer is gone
        return ""
    finally:
        held.detach()


def peer_name(host: str, port: int) -> str:
    """Return a peer in the format of gRPC's `context.peer()`.

    >>> peer_name("::ffff:10.0.0.1", 5), peer_name("::1", 5)
    ('ipv4:10.0.0.1:5', 'ipv6:%5B::1%5D:5')
    """
    if ":" not in host:
        return f"ipv4:{host}:{port}"
    if host.startswith("::ffff:") and "." in host:
        return f"ipv4:{host.removeprefix('::ffff:')}:{port}"
    return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"


def address_of(peer: str) -> str:
    """Return the address that a peer counts for: for IPv6 its /64 network.

    >>> address_of("ipv4:10.0.0.1:5"), address_of("ipv6:%5B2001:db8::7%5D:5")
    ('10.0.0.1', '2001:db8::/64')
    """
    host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]").partition("%")[0]
    if ":" not in host:
        return host
    prefix = ipaddress.IPv6Address(host).packed[:IPV6_PREFIX_BYTES]
    return f"{ipaddress.IPv6Address(prefix + bytes(16 - IPV6_PREFIX_BYTES))}/{8 * IPV6_PREFIX_BYTES}"
