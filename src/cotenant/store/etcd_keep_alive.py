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
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import structlog
from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.security.tls_files import Watched
from cotenant.store.etcd_connections import channel_options, credentials_of
from cotenant.store.etcd_members import meaning
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


@dataclass(slots=True)
class _Line:
    """A connection to a member, made with files that had changed so often. It is kept for good once it was answered."""

    generation: int
    channel: grpc.Channel
    lease: rpc.LeaseStub
    answered: bool = False


class Beats:
    """The thread, begun when it is first needed. `endpoints` are the members' addresses.

    Where the files of `tls` have changed a member is asked over a new connection, and where it does not answer there
    over the one before, which is closed once it does.
    """

    def __init__(self, endpoints: Sequence[str], silence_seconds_max: float, tls: Watched | None) -> None:
        self._endpoints, self._tls = list(endpoints), tls
        self._options = channel_options(silence_seconds_max)
        self._lines: dict[str, list[_Line]] = {endpoint: [] for endpoint in endpoints}  # the newest first
        self._kept: dict[int, _Kept] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._unneeded: set[str] = set()  # endpoints

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
            lines = [line for several in self._lines.values() for line in several]
        for line in lines:
            line.channel.close()  # ends the call that is under way
        if self._thread:
            self._thread.join(END_SECONDS_MAX)

    def let_go(self, endpoint: str) -> None:
        """Let go of a connection that was made with files of before, if no lease is kept alive over it now."""
        with self._changed:
            self._unneeded.add(endpoint)
            self._changed.notify()

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
        for lines in self._lines.values():
            for line in lines:
                line.channel.close()

    def _next(self) -> tuple[_Kept, _Asking] | None:
        """Wait for the lease that is due next, and take over who asks for it; None once this is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for lease_id in [one.lease.id for one in self._kept.values() if not one.asking and one.until < now]:
                    del self._kept[lease_id]
                self._let_go()
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
        """Ask a member over its newest connection, and over another one where that is not answered."""
        lines = self._lines_to(endpoint)
        for line in lines[:-1]:
            with suppress(grpc.RpcError):  # that the files are refused is told by whoever moves the other connections
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
        """Give the connections to ask over: the newest, and before it has been answered the one that was."""
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

    def _let_go(self) -> None:
        for endpoint in () if self._kept else self._unneeded:
            for line in self._lines[endpoint]:
                line.channel.close()
            self._lines[endpoint] = []
        self._unneeded.clear()


def _tell(asking: _Asking, error: Exception | None) -> None:
    for _, promise in asking:
        if not promise.set_running_or_notify_cancel():
            continue  # who asked has gone
        if error is None:
            promise.set_result(None)
        else:
            promise.set_exception(error)
