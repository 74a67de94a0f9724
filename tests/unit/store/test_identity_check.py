"""Marks shown by agents: a signed mark stops writes; a forged one and a single unknown store do not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.contract.stores import put

from cotenant.leadership.fenced_store import DelegatingStore
from cotenant.store.guarded_store import GuardedStore, trust_of
from cotenant.store.open import open_store
from cotenant.store.port import StoreRegressed, StoreReplaced
from cotenant.store.witness import Mark, Mismatch, RememberedStore, sign


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[GuardedStore]:
    opened = cast("GuardedStore", await open_store(f"sqlite:{tmp_path / 's.db'}"))
    await put(opened, "/a")
    yield opened
    await opened.close()


async def test_a_mark_of_this_store_is_accepted_and_stops_nothing(store: GuardedStore) -> None:
    mark = store.trust.mark()
    assert mark
    await put(store, "/b")
    assert await store.trust.add_witness("n1", mark) is None
    assert store.trust.witnesses.marks == {"n1": mark.memory}
    await put(store, "/c")


async def test_a_signed_mark_of_a_later_state_stops_writes(store: GuardedStore) -> None:
    assert store.trust.identity
    later = sign(store.trust.identity, store.trust.revision + 100)
    verdict = await store.trust.add_witness("n1", later)
    assert verdict
    assert verdict.mismatch is Mismatch.REGRESSED
    assert "node n1" in verdict.text
    with pytest.raises(StoreRegressed):
        await put(store, "/b")


async def test_a_signed_mark_of_an_era_that_the_store_never_had_stops_writes(store: GuardedStore) -> None:
    assert store.trust.identity
    other = sign(store.trust.identity, 1, "another-era", store.trust.revision)
    assert await store.trust.add_witness("n1", other)
    with pytest.raises(StoreRegressed):
        await store.get("/a")


@pytest.mark.parametrize("signature", [b"", b"0" * 16])
async def test_a_forged_mark_stops_nothing(store: GuardedStore, signature: bytes) -> None:
    mark = store.trust.mark()
    assert mark
    claimed = Mark(replace(mark.memory, revision=1 << 61), signature)
    assert await store.trust.add_witness("n1", claimed) is None
    assert await store.trust.add_witness("n1", Mark(replace(mark.memory, revision=1 << 61), mark.signature)) is None
    await put(store, "/b")


async def test_two_nodes_of_another_store_stop_writes_only_if_no_node_knows_this_one(
    store: GuardedStore,
) -> None:
    stranger = Mark(RememberedStore("0" * 32, 1 << 40, 1 << 40))
    refused = await store.trust.add_witness("n1", stranger)
    assert refused
    assert refused.mismatch is Mismatch.REPLACED
    await put(store, "/b")
    mark = store.trust.mark()
    assert mark
    await store.trust.add_witness("n3", mark)
    assert await store.trust.add_witness("n2", stranger)
    await put(store, "/c")
    store.trust.witnesses.marks.clear()
    assert await store.trust.add_witness("n2", stranger)
    with pytest.raises(StoreReplaced):
        await put(store, "/d")


async def test_the_guarded_store_is_found_below_a_leaders_store(store: GuardedStore) -> None:
    assert trust_of(DelegatingStore(store)) is store.trust
    assert trust_of(None) is None


async def test_a_process_that_was_killed_before_it_saved_its_era_raises_no_alarm(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.db", tmp_path / "memory.json"
    for key in ("/a", "/b", "/c"):
        opened = cast("GuardedStore", await open_store(f"sqlite:{path}", memory=memory))
        saved = memory.read_bytes() if memory.exists() else b""
        await put(opened, key)
        assert await opened.get(key)
        await opened.close()
        if key == "/b":
            memory.write_bytes(saved)  # as if this process had been killed within its first second
    assert opened.trust.verdict is None
