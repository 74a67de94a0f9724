"""Server-sent events: tables that a page follows, each event with the positions from which the page resumes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping

from cotenant.web.changes import Batch, Changes

QUIET_SECONDS = 10.0  # then a comment, so that a lost connection is noticed
FLUSH_SECONDS = 0.2  # changes within this time are one event
ROWS_PER_EVENT = 1_000
RETRY = "retry: 1000\n\n"
COMMENT = ": quiet\n\n"
ENDED = "event: session\ndata: {}\n\n"


def positions(text: str) -> dict[str, str]:
    """Return the positions in the id of an event; what is no position is left out.

    >>> positions("jobs=a1-7,meta=a2-9,x")
    {'jobs': 'a1-7', 'meta': 'a2-9'}
    """
    pairs = (part.partition("=") for part in text[:1000].split(","))
    return {name: position for name, equals, position in pairs if equals}


def event(name: str, data: str, event_id: str = "") -> str:
    """Return an event; the data is on one line."""
    return (f"id: {event_id}\n" if event_id else "") + f"event: {name}\ndata: {data}\n\n"


def batch_events(name: str, batch: Batch, event_id: str) -> list[str]:
    """Return a batch as events; only the last has the id, so that a page that was cut off in between begins anew."""
    parts = [batch.rows[start : start + ROWS_PER_EVENT] for start in range(0, len(batch.rows), ROWS_PER_EVENT)] or [[]]
    last = len(parts) - 1
    return [
        event(
            name,
            f'{{"whole":{"true" if batch.whole and not number else "false"},'
            f'"rows":[{",".join(rows)}],"removed":{json.dumps(batch.removed if number == last else [])},'
            f'"more":{"true" if number < last else "false"}}}',
            event_id if number == last else "",
        )
        for number, rows in enumerate(parts)
    ]


async def follow(tables: Mapping[str, Changes], seen: str, is_alive: Callable[[], bool]) -> AsyncGenerator[str]:
    """Yield each table, or what has changed since the positions in `seen`, then each change, until the session ends."""
    at = {name: position for name, position in positions(seen).items() if name in tables}
    yield RETRY
    sent = time.monotonic()
    while is_alive():
        for name, table in tables.items():
            if at.get(name) == table.position:
                continue
            batch = table.after(at.get(name, ""))
            at[name] = batch.position
            for text in batch_events(name, batch, ",".join(f"{one}={position}" for one, position in at.items())):
                yield text
            sent = time.monotonic()
        await _any_change(tables, at)
        if time.monotonic() - sent >= QUIET_SECONDS:
            sent = time.monotonic()
            yield COMMENT
        await asyncio.sleep(FLUSH_SECONDS)
    yield ENDED


async def _any_change(tables: Mapping[str, Changes], at: Mapping[str, str]) -> None:
    waiting = [asyncio.ensure_future(table.wait(at[name], QUIET_SECONDS)) for name, table in tables.items()]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waiting:
            one.cancel()
