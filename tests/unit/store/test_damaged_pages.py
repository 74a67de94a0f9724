"""Files of the embedded store with damaged pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.contract.stores import put

from cotenant.store.port import StoreUnavailable
from cotenant.store.sqlite import SqliteStore


def test_a_page_with_damaged_types_is_rejected(tmp_path: Path) -> None:
    """SQLite reports a key with a damaged type as text, and returns a number nevertheless."""

    path = tmp_path / "state.db"

    async def opened(*keys: str) -> None:
        store = SqliteStore(path)
        for name in keys:
            await put(store, name)
        await store.close()

    asyncio.run(opened(key := "queue/jobs/a", "queue/jobs/b"))
    whole, text, number = path.read_bytes(), 13 + 2 * len(key), 5  # as SQLite writes types before a row's columns
    told = []
    for at in [at for at, byte in enumerate(whole) if byte == text]:
        path.write_bytes(whole[:at] + bytes([number]) + whole[at + 1 :])
        try:
            asyncio.run(opened())
        except StoreUnavailable as error:
            told.append(str(error))
    assert any("is damaged: '<' not supported" in one for one in told), told
    assert all("is damaged" in one or "cannot read" in one for one in told), told
