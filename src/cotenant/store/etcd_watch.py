"""Watches in etcd: one stream to one member, and the assembly of its events into complete revisions.

etcd promises to deliver a revision in one response, but splits a response that grows too large into fragments, which
are marked except for the last; a revision may then begin in one fragment and end in another. So a revision is complete
when an event of a later one arrives, or a response that is not a fragment ends. An incomplete revision is dropped when
the stream breaks: the next stream starts at the last complete revision and sends it again.

A stream starts at the last revision that was seen, not after it, and skips that one. etcd may have compacted exactly
that revision, and then keeps its puts but not its deletions: requesting it makes sure that nothing depends on such a
revision, and that a compacted position is always noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.store.etcd_connections import MemberConnection
from cotenant.store.port import Change, Changes

NEEDS_LEADER = (("hasleader", "true"),)  # a partitioned member ends the stream instead of falling silent


class HistoryCompacted(Exception):
    """The stream's position in history is compacted."""


class StreamBroken(Exception):
    """The stream ended for another reason, and a new one may work; the message says why."""


class ConnectionReplaced(Exception):
    """The stream's connection was replaced."""


class Assembly:
    """Assembles the events of a stream into complete revisions, each exactly once."""

    def __init__(self, after_revision: int) -> None:
        self._complete_to = after_revision
        self._revision = 0
        self._changes: list[Change] = []

    def add(self, events: Iterable[Any], *, is_fragment: bool) -> list[Changes]:
        """Add a response, and return the revisions that are complete with it."""
        complete = []
        for event in events:
            change = change_of(event)
            if change.mod_revision <= self._complete_to:
                continue
            if change.mod_revision != self._revision:
                complete += self._finish()
                self._revision = change.mod_revision
            self._changes.append(change)
        return complete if is_fragment else complete + self._finish()

    def _finish(self) -> list[Changes]:
        if not self._changes:
            return []
        changes = Changes(self._revision, tuple(self._changes))
        self._complete_to = self._revision
        self._changes = []
        return [changes]


def change_of(event: Any) -> Change:
    """Decode an event."""
    value = None if event.type == rpc.Event.DELETE else event.kv.value
    return Change(event.kv.key.decode(), value, event.kv.mod_revision)


async def follow(
    link: MemberConnection, key: bytes, range_end: bytes, *, after_revision: int, timeout_seconds: float
) -> AsyncGenerator[Changes, None]:
    """Yield the revisions after one from a single stream, until it breaks; it never ends by itself.

    Raises `StreamBroken` then, `HistoryCompacted` if another stream would fail too, and `ConnectionReplaced`.
    """
    create = rpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=max(1, after_revision), fragment=True)
    assembly = Assembly(after_revision)
    over = asyncio.Event()
    call = link.watch.Watch(send_once(rpc.WatchRequest(create_request=create), over), metadata=NEEDS_LEADER)
    link.watches.add(call)
    try:
        async with asyncio.timeout(timeout_seconds):
            response = await call.read()
        while response:  # the end-of-stream marker is falsy
            if response.compact_revision:
                raise HistoryCompacted
            if response.canceled:
                raise StreamBroken(response.cancel_reason or "etcd cancelled the watch")
            for changes in assembly.add(response.events, is_fragment=response.fragment):
                yield changes
            response = await call.read()
        raise StreamBroken("etcd ended the stream")
    except TimeoutError as error:
        raise StreamBroken(f"no answer within {timeout_seconds:.1f} s") from error
    except rpc.AioRpcError as error:
        raise StreamBroken(error.details() or error.code().name) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if link.left and not (task and task.cancelling()):
            raise ConnectionReplaced from None
        raise
    finally:
        link.watches.discard(call)
        over.set()
        call.cancel()


async def send_once(request: Any, over: asyncio.Event) -> AsyncGenerator[Any, None]:
    """Send one request and keep the stream open until `over`: ending the requests would end it."""
    yield request
    await over.wait()
