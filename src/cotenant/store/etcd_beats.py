"""Keeping leases alive from a thread of their own, so that a busy event loop costs nobody its lease.

A call of grpc.aio comes to its end by way of the event loop, several turns of it: where each turn takes half a second,
as on a machine with far more to do than it can, a lease of two seconds is gone before the answer is heard. So the calls
are made from a thread, with gRPC's ordinary client, and where whoever asked for them falls silent the thread goes on by
itself for as long as it was told to: a process that is slow keeps what it has, one that has come to nothing loses it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import grpc
import structlog
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.store.etcd_members import channel_options, meaning
from cotenant.store.port import Lease, LeaseLost, StoreUnavailable

log = structlog.get_logger()

BY_ITSELF_SHARE = 0.4  # of a lease's time: after so long without a word the thread asks by itself
PATIENCE_SHARE = 0.25  # of a lease's time, for one member, so that there is time to ask the others
PAUSE_SECONDS = 0.05  # after none has answered
END_SECONDS_MAX = 2.0

_Asking = list[tuple[float, "Future[None]"]]  # who waits for an answer, and until when


@dataclass(slots=True)
class _Kept:
    """A lease that is being kept alive. Times are on the monotonic clock."""

    lease: Lease
    until: float = 0.0  # up to when the thread goes on by itself
    due: float = 0.0  # when it is asked for next
    asking: _Asking = field(default_factory=list)


class Beats:
    """The thread, begun when it is first needed. `endpoints` are the members' addresses."""

    def __init__(
        self, endpoints: Sequence[str], silence_seconds_max: float, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self._endpoints, self._credentials = list(endpoints), credentials
        self._options = channel_options(silence_seconds_max)
        self._stubs: dict[str, tuple[grpc.Channel, rpc.LeaseStub]] = {}
        self._kept: dict[int, _Kept] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, lease: Lease, *, timeout_seconds: float, for_seconds: float) -> Future[None]:
        """Start a lease's time anew, and again by itself for so long, unless `drop` comes first.

        The promise is kept once etcd has answered. It fails with `LeaseLost` where the lease is gone, with
        `StoreUnavailable` where no member answers in time.
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
        """Go on no more with a lease."""
        with self._changed:
            if kept := self._kept.get(lease.id):
                kept.until = 0.0

    def close(self) -> None:
        """End the thread, and wait for its end; who still waits is told that the store is closed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for channel, _ in list(self._stubs.values()):
            channel.close()  # ends the call that is under way
        if self._thread:
            self._thread.join(END_SECONDS_MAX)

    # In the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while found := self._next():
            kept, asking = found
            try:
                self._beat(kept.lease, min((deadline for deadline, _ in asking), default=math.inf))
                self._answered(kept, asking, None)
            except LeaseLost as error:
                self._answered(kept, asking, error)
            except Exception as error:  # whatever it is, those who wait have to know, and the next ones be asked for
                self._not_answered(kept, asking, error)
        for kept in self._kept.values():
            _tell(kept.asking, StoreUnavailable("the store was closed before etcd answered"))
        for channel, _ in self._stubs.values():
            channel.close()

    def _next(self) -> tuple[_Kept, _Asking] | None:
        """Wait for the lease that is due next, and take over who asks for it; None once this is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for lease_id in [one.lease.id for one in self._kept.values() if not one.asking and one.until < now]:
                    del self._kept[lease_id]
                first = min(self._kept.values(), key=lambda one: one.due, default=None)
                if first and first.due <= now:
                    asking, first.asking = first.asking, []
                    return first, asking
                self._changed.wait(first.due - now if first else None)
        return None

    def _answered(self, kept: _Kept, asking: _Asking, error: LeaseLost | None) -> None:
        with self._changed:
            if not kept.asking:  # else somebody has asked meanwhile, and is answered at once
                kept.due = time.monotonic() + BY_ITSELF_SHARE * kept.lease.ttl_seconds
            if error:
                kept.until = 0.0
        _tell(asking, error)

    def _not_answered(self, kept: _Kept, asking: _Asking, error: Exception) -> None:
        """Ask again soon; those whose time is over are told why."""
        due = time.monotonic() + PAUSE_SECONDS
        with self._changed:
            kept.asking += [one for one in asking if one[0] > due and not self._closed]
            kept.due = due
        failure = error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error))
        _tell([one for one in asking if one not in kept.asking], failure)

    def _beat(self, lease: Lease, deadline: float) -> None:
        """Ask one member after another."""
        failure: Exception = StoreUnavailable("no etcd member was asked")
        seconds = min(PATIENCE_SHARE * lease.ttl_seconds, (deadline - time.monotonic()) / len(self._endpoints))
        for endpoint in list(self._endpoints):
            if self._closed:
                raise StoreUnavailable("the store was closed before etcd answered")
            try:
                ttl_seconds = self._asked(endpoint, lease, max(0.001, seconds))
            except grpc.RpcError as error:
                failure = meaning(error, endpoint)
                self._endpoints.append(self._endpoints.pop(0))  # another one comes first next time
                continue
            if ttl_seconds <= 0:
                raise LeaseLost(f"lease {lease.id} has run out or was revoked")
            return
        raise failure

    def _asked(self, endpoint: str, lease: Lease, seconds: float) -> int:
        request = rpc.LeaseKeepAliveRequest(ID=lease.id)
        for reply in self._stub(endpoint).LeaseKeepAlive(iter([request]), timeout=seconds):
            return int(reply.TTL)
        raise StoreUnavailable(f"etcd at {endpoint} ended the stream without an answer")

    def _stub(self, endpoint: str) -> rpc.LeaseStub:
        if endpoint not in self._stubs:
            if self._credentials is None:
                channel = grpc.insecure_channel(endpoint, options=self._options)
            else:
                channel = grpc.secure_channel(endpoint, self._credentials, options=self._options)
            self._stubs[endpoint] = channel, rpc.LeaseStub(channel)
        return self._stubs[endpoint][1]


def _tell(asking: _Asking, error: Exception | None) -> None:
    for _, promise in asking:
        if not promise.set_running_or_notify_cancel():
            continue  # who asked has gone
        if error is None:
            promise.set_result(None)
        else:
            promise.set_exception(error)
