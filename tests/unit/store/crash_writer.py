"""Writes to an SQLite store from many tasks and prints acknowledged writes, until it is killed: `crash_writer FILE`."""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count

from cotenant.store.port import Committed, Compare, Put
from cotenant.store.sqlite import SqliteStore

WRITERS = 16


async def write(store: SqliteStore, writer: int) -> None:
    """Raise two keys together repeatedly, each time from their present values."""
    left, right = (f"/{writer}/{side}" for side in ("left", "right"))
    entry = await store.get(left)
    number, revision = (int(entry.value.split()[0]), entry.mod_revision) if entry else (0, 0)
    for number in count(number + 1):  # noqa: B020  # it goes on from there
        value = b"%d " % number + bytes(number % 7 * 1_000)
        outcome = await store.transact(
            [Compare(left, revision), Compare(right, revision)], [Put(left, value), Put(right, value)]
        )
        assert isinstance(outcome, Committed)
        revision = outcome.revision
        os.write(1, b"%d %d %d\n" % (revision, writer, number))


async def main() -> None:
    """Run the writers."""
    store = SqliteStore(sys.argv[1])
    await asyncio.gather(*(write(store, writer) for writer in range(WRITERS)))


if __name__ == "__main__":
    asyncio.run(main())
