"""Keeps leases alive from a dedicated thread, so that a busy event loop does not lose its leases.

A grpc.aio call needs several iterations of the event loop: if each iteration takes half a second, as on an overloaded
machine, a lease of two seconds expires before the answer is read. So the calls are made from a thread with gRPC's
ordinary client, and if the caller does not come back the thread repeats them for as long as the caller allowed: a slow
process keeps its leases, a stuck process loses them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.security.tls_files import WatchedTlsFiles
from cotenant.store.etcd_connections import channel_options, credentials_of
from cotenant.store.etcd_members import store_error
from cotenant.store.port import Lease, LeaseLost, StoreUnavailable
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

RENEWAL_SHARE = 0.4  # of a lease's time: after which the thread renews by itself
PATIENCE_SHARE = 0.25  # of a lease's time, per member, so that others can be tried
PAUSE_SECONDS = 0.05  # after no member has answered
END_SECONDS_MAX = 2.0

_Asking = list[tuple[float, "Future[None]"]]  # deadlines and futures of the waiting callers


@dataclass(slots=True)
class _Kept:
    """A lease that is kept alive. Times are on the monotonic clock."""

    lease: Lease
    until: float = 0.0  # until when the thread renews by itself
    due: float = 0.0  # the next renewal
    asking: _Asking = field(default_factory=list)


@dataclass(slots=True)
class _Line:
    """A connection to a member, with the generation of its files. Once answered it is kept."""

    generation: int
    channel: grpc.Channel
    lease: rpc.LeaseStub
    answered: bool = False


class EtcdKeepAlive:
    """The keep-alive thread, started at the first use. `endpoints` are the members' addresses.

    When the files of `tls` change, a member is called over a new connection; if it does not answer there, over the
    previous one, which is closed once the new one works.
    """

    def __init__(self, endpoints: Sequence[str], silence_seconds_max: float, tls: WatchedTlsFiles | None) -> None:
        self._endpoints, self._tls = list(endpoints), tls
        self._options = channel_options(silence_seconds_max)
        self._lines: dict[str, list[_Line]] = {endpoint: [] for endpoint in endpoints}  # the newest first
        self._kept: dict[int, _Kept] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._unneeded: set[str] = set()  # endpoints

    def ask(self, lease: Lease, *, timeout_seconds: float, for_seconds: float) -> Future[None]:
        """Renew a lease now, and repeat it for `for_seconds` unless `drop` is called first.

        The future completes when etcd has answered. It fails with `LeaseLost` if the lease is gone, and with
        `StoreUnavailable` if no member answers in time.
        """
        now, promise = time.monotonic(), Future[None]()
        with self._changed:
            if self._closed:
                promise.set_exception(StoreUnavailable("the store is closed"))
                return promise
            kept = self._kept.setdefault(lease.id, _Kept(lease))
            kept.until, kept.due = now + for_seconds, now
            kept.asking.append((now + timeout_seconds, promise))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd-beats", daemon=True)
                self._thread.start()
            self._changed.notify()
        return promise

    def drop(self, lease: Lease) -> None:
        """Stop renewing a lease."""
        with self._changed:
            if kept := self._kept.get(lease.id):
                kept.until = 0.0

    def close(self) -> None:
        """Stop the thread and wait for it; waiting callers get an error that the store is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            lines = [line for several in self._lines.values() for line in several]
        for line in lines:
            line.channel.close()  # ends the call in progress
        if self._thread:
            self._thread.join(END_SECONDS_MAX)

    def release_old(self, endpoint: str) -> None:
        """Close a connection with earlier files, if no lease is kept alive over it now."""
        with self._changed:
            self._unneeded.add(endpoint)
            self._changed.notify()

    # On the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while found := self._next():
            kept, asking = found
            try:
                self._renew(kept.lease, min((deadline for deadline, _ in asking), default=math.inf))
                self._answered(kept, asking, None)
            except LeaseLost as error:
                self._answered(kept, asking, error)
            except Exception as error:  # any error must reach the callers, and the thread must go on
                self._not_answered(kept, asking, error)
        for kept in self._kept.values():
            _complete(kept.asking, StoreUnavailable("the store was closed before etcd answered"))
        for lines in self._lines.values():
            for line in lines:
                line.channel.close()

    def _next(self) -> tuple[_Kept, _Asking] | None:
        """Wait for the lease that is due next, and return it with its callers; None once this is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for lease_id in [one.lease.id for one in self._kept.values() if not one.asking and one.until < now]:
                    del self._kept[lease_id]
                self._close_unneeded()
                first = min(self._kept.values(), key=lambda one: one.due, default=None)
                if first and first.due <= now:
                    asking, first.asking = first.asking, []
                    return first, asking
                self._changed.wait(first.due - now if first else None)
        return None

    def _answered(self, kept: _Kept, asking: _Asking, error: LeaseLost | None) -> None:
        with self._changed:
            if not kept.asking:  # else another caller came in between and is served at once
                kept.due = time.monotonic() + RENEWAL_SHARE * kept.lease.ttl_seconds
            if error:
                kept.until = 0.0
        _complete(asking, error)

    def _not_answered(self, kept: _Kept, asking: _Asking, error: Exception) -> None:
        """Retry soon; callers whose deadline has passed get the error."""
        due = time.monotonic() + PAUSE_SECONDS
        with self._changed:
            kept.asking += [one for one in asking if one[0] > due and not self._closed]
            kept.due = due
        failure = error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error))
        _complete([one for one in asking if one not in kept.asking], failure)

    def _renew(self, lease: Lease, deadline: float) -> None:
        """Call the members in turn."""
        failure: Exception = StoreUnavailable("no etcd member was called")
        seconds = min(PATIENCE_SHARE * lease.ttl_seconds, (deadline - time.monotonic()) / len(self._endpoints))
        for endpoint in list(self._endpoints):
            if self._closed:
                raise StoreUnavailable("the store was closed before etcd answered")
            try:
                ttl_seconds = self._asked(endpoint, lease, max(0.001, seconds))
            except grpc.RpcError as error:
                failure = store_error(error, endpoint)
                self._endpoints.append(self._endpoints.pop(0))  # try another member first next time
                continue
            if ttl_seconds <= 0:
                raise LeaseLost(f"lease {lease.id} has expired or was revoked")
            return
        raise failure

    def _asked(self, endpoint: str, lease: Lease, seconds: float) -> int:
        """Call a member over its newest connection, and over another one if that fails."""
        lines = self._lines_to(endpoint)
        for line in lines[:-1]:
            with suppress(grpc.RpcError):  # the certificate rotation logs rejected files
                return self._answer(endpoint, line, lease, seconds / len(lines))
        return self._answer(endpoint, lines[-1], lease, seconds / len(lines))

    def _answer(self, endpoint: str, line: _Line, lease: Lease, seconds: float) -> int:
        request = rpc.LeaseKeepAliveRequest(ID=lease.id)
        for reply in line.lease.LeaseKeepAlive(iter([request]), timeout=seconds):
            if not line.answered:
                self._keep_only(endpoint, line)
            return int(reply.TTL)
        raise StoreUnavailable(f"etcd at {endpoint} ended the stream without an answer")

    def _lines_to(self, endpoint: str) -> list[_Line]:
        """Return the connections to try: the newest, and before it has answered the previous one."""
        generation = self._tls.look() if self._tls else 0
        with self._changed:
            lines = self._lines[endpoint]
            if not lines or lines[0].generation != generation:
                self._lines[endpoint] = lines = [self._line(endpoint, generation), *self._answered_last(lines)]
            return lines

    def _answered_last(self, lines: Sequence[_Line]) -> Sequence[_Line]:
        for line in lines[:-1]:
            line.channel.close()
        return lines[-1:]

    def _line(self, endpoint: str, generation: int) -> _Line:
        if self._tls is None:
            channel = grpc.insecure_channel(endpoint, options=self._options)
        else:
            channel = grpc.secure_channel(endpoint, credentials_of(self._tls.material), options=self._options)
        return _Line(generation, channel, rpc.LeaseStub(channel))

    def _keep_only(self, endpoint: str, line: _Line) -> None:
        line.answered = True
        with self._changed:
            others, self._lines[endpoint] = [one for one in self._lines[endpoint] if one is not line], [line]
        for other in others:
            other.channel.close()

    def _close_unneeded(self) -> None:
        for endpoint in () if self._kept else self._unneeded:
            for line in self._lines[endpoint]:
                line.channel.close()
            self._lines[endpoint] = []
        self._unneeded.clear()


def _complete(asking: _Asking, error: Exception | None) -> None:
    for _, promise in asking:
        if not promise.set_running_or_notify_cancel():
            continue  # the caller is gone
        if error is None:
            promise.set_result(None)
        else:
            promise.set_exception(error)
