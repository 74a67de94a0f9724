"""Watching etcd: one stream to one member, and how its events become whole revisions again.

etcd promises to deliver a revision in one response, but splits a response that grows too large into fragments, all
but the last of which say so; a revision may then begin in one fragment and end in another. So a revision is complete
when an event of a later one arrives, or a response that is no fragment ends. What is incomplete when the stream breaks
is dropped: the next stream starts at the last complete revision and sends it again.

A stream starts at the last revision that was seen, rather than behind it, and skips that one. etcd may have compacted
just it, and then keeps the puts made at it but not the deletions: asking for it makes sure that nothing that matters
depends on such a revision, and that a place which has been forgotten is always noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from aetcd import rpc  # type: ignore[import-untyped]  # ships no types; only its stubs and messages are used

from cotenant.store.etcd_connections import Link
from cotenant.store.port import Change, Changes

NEEDS_LEADER = (("hasleader", "true"),)  # a member cut off from the others ends the stream, instead of falling silent


class HistoryCompacted(Exception):
    """The stream's place in history is gone."""


class StreamBroken(Exception):
    """The stream ended otherwise, and another may do better; says why."""


class LinkLeft(Exception):
    """Another connection has taken the place of the stream's."""


class Assembly:
    """Turns the events of a stream into revisions, each whole and once."""

    def __init__(self, after_revision: int) -> None:
        self._complete_to = after_revision
        self._revision = 0
        self._changes: list[Change] = []

    def add(self, events: Iterable[Any], *, is_fragment: bool) -> list[Changes]:
        """Take in a response, and give the revisions that are complete with it."""
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
    """Read one event of etcd's."""
    value = None if event.type == rpc.Event.DELETE else event.kv.value
    return Change(event.kv.key.decode(), value, event.kv.mod_revision)


async def follow(
    link: Link, key: bytes, range_end: bytes, *, after_revision: int, timeout_seconds: float
) -> AsyncGenerator[Changes, None]:
    """Yield the revisions after one from a single stream, until it breaks; it never ends by itself.

    Raises `StreamBroken` then, `HistoryCompacted` where another stream would fare no better, and `LinkLeft`.
    """
    create = rpc.WatchCreateRequest(key=key, range_end=range_end, start_revision=max(1, after_revision), fragment=True)
    assembly = Assembly(after_revision)
    over = asyncio.Event()
    call = link.watch.Watch(asked_once(rpc.WatchRequest(create_request=create), over), metadata=NEEDS_LEADER)
    link.watches.add(call)
    try:
        async with asyncio.timeout(timeout_seconds):
            response = await call.read()
        while response:  # what stands for the end of the stream is false
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
            raise LinkLeft from None
        raise
    finally:
        link.watches.discard(call)
        over.set()
        call.cancel()


async def asked_once(request: Any, over: asyncio.Event) -> AsyncGenerator[Any, None]:
    """Send one request and leave the stream open until it is over: to send no more would end it."""
    yield request
    await over.wait()
