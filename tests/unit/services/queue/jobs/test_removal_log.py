"""The removal log: bounded, with the revision of what it has dropped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.etcd_server import EtcdServer

from cotenant.services.queue.jobs.array_recovery import CHUNK_MAX
from cotenant.services.queue.jobs.grouped_store import GroupedStore
from cotenant.services.queue.jobs.job_store import JobStore
from cotenant.services.queue.jobs.queue_state import State
from cotenant.services.queue.jobs.removal_log import DROPPED_AT_ONCE_MAX, REMOVALS, RemovalLog
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.memory import MemoryStore
from cotenant.store.open import open_store
from cotenant.store.port import Committed, Compare, Entry

KEPT_MAX = 20


async def removed(store: MemoryStore, log: RemovalLog, names: list[str]) -> int:
    batch, operations = log.begin([(name, "lab") for name in names])
    result = await store.transact([], operations)
    assert isinstance(result, Committed)
    log.add(replace(batch, revision=result.revision))
    return result.revision


@given(st.lists(st.integers(1, 2 * KEPT_MAX), max_size=30))
async def test_a_bounded_number_is_kept_and_the_rest_is_below_the_floor(sizes: list[int]) -> None:
    store, log, told = MemoryStore(), RemovalLog(KEPT_MAX), list[tuple[int, str]]()
    for place, size in enumerate(sizes):
        names = [f"{place}-{number}" for number in range(size)]
        revision = await removed(store, log, names)
        told += [(revision, name) for name in names]
        again = RemovalLog(KEPT_MAX)
        entries = (await store.list(REMOVALS)).entries
        again.load(entries)
        for read in (log, again):
            kept = [name for name, _ in read.since(0)]
            assert kept == [name for revision, name in told if revision > read.floor]
            assert read.floor == log.floor
            assert len(kept) <= max(KEPT_MAX, size) or len(entries) > DROPPED_AT_ONCE_MAX
            assert list(read.since(revision)) == []
        assert len(entries) == len({revision for revision, _ in told if revision > log.floor})


@pytest.mark.parametrize(("key", "floor"), [("x", 0), ("1", -1), ("1", 7)])
def test_a_damaged_batch_is_named(key: str, floor: int) -> None:
    value = records_pb2.StoredRemovals(schema_version=1, floor=floor).SerializeToString()
    with pytest.raises(schema.BadRecord, match=f"queue/removals/{key}"):
        RemovalLog().load([Entry(f"{REMOVALS}{key}", value, 1, 7)])


async def test_a_whole_batch_fits_into_a_transaction_of_etcd(tmp_path: Path) -> None:
    """With as many deletes and as many dropped batches as there can be."""
    server = EtcdServer(tmp_path)
    server.start()
    try:
        store = await open_store(server.url)
        queue = JobStore(GroupedStore(store), State())
        queue.removals = RemovalLog(CHUNK_MAX)
        await queue.load()
        for number in range(2 * DROPPED_AT_ONCE_MAX):
            await queue.delete([], [(f"few-{number}-{one}", "lab") for one in range(6)])
        await queue.delete([Compare("queue/arrays/x", 0)], [(f"job-{one}", "lab") for one in range(CHUNK_MAX)])
        entries = (await store.list(REMOVALS)).entries
        assert len(entries) == DROPPED_AT_ONCE_MAX + 1
        assert queue.removals.floor == queue.revisions.newest - len(entries)
        await store.close()
    finally:
        server.kill()
