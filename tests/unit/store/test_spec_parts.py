"""Large parts of specs are stored once, separately from the records that change, invisibly to readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.stores import put, take

from cotenant.storage.v1 import records_pb2
from cotenant.store import spec_parts
from cotenant.store.backup_file import read_file, read_store, restore_entries, write_file
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Changes, Committed, Compare, Conflict, Delete, Put
from cotenant.store.revision_offset import BASE, OffsetStore
from cotenant.store.schema import BadRecord, NewerSchema, read
from cotenant.store.spec_parts import DATA, SpecStore
from cotenant.v1 import job_pb2

LARGE = "x" * 60_000


def job(job_id: str, script: str = LARGE, reason: str = "") -> bytes:
    stored = records_pb2.StoredJob(schema_version=1)
    stored.job.id, stored.job.phase_reason = job_id, reason
    spec = stored.job.spec
    spec.name, spec.environment["SCRIPT"] = "train", script
    spec.command.extend(["python", "-c", script])
    spec.roles.add(name="worker", command=["sh", "-c", script])
    spec.roles.add(name="ps")
    return stored.SerializeToString()


def attempt(job_id: str, script: str = LARGE) -> bytes:
    spec = records_pb2.StoredJob.FromString(job(job_id, script)).job.spec
    return records_pb2.StoredAttempt(schema_version=1, spec=spec).SerializeToString()


async def kept(store: MemoryStore, prefix: str = "") -> dict[str, int]:
    return {entry.key: len(entry.value) for entry in (await store.list(prefix)).entries}


async def same(store: SpecStore, key: str, value: bytes) -> bool:
    entry = await store.get(key)
    return entry is not None and kind(key).FromString(entry.value) == kind(key).FromString(value)


def kind(key: str) -> type[records_pb2.StoredJob] | type[records_pb2.StoredAttempt]:
    return records_pb2.StoredJob if key.startswith("queue/") else records_pb2.StoredAttempt


async def test_a_record_that_is_written_again_is_small_and_reads_whole() -> None:
    inner = MemoryStore()
    store = SpecStore(inner)
    revision = await put(store, "queue/jobs/a", job("a"))
    (data,) = await kept(inner, DATA)
    before = await inner.get(data)
    changed = job("a", reason="requeued")
    done = await store.transact([Compare("queue/jobs/a", revision)], [Put("queue/jobs/a", changed)])
    assert isinstance(done, Committed)
    assert (await kept(inner))["queue/jobs/a"] < 300
    assert await inner.get(data) == before, "the parts were written a second time"
    assert not await kept(inner, spec_parts.USED)
    assert await same(store, "queue/jobs/a", changed)
    assert await same(SpecStore(inner), "queue/jobs/a", changed)
    (entry,) = (await SpecStore(inner).list("queue/jobs/")).entries
    assert read(records_pb2.StoredJob, entry).job.spec.command[2] == LARGE


async def test_tasks_of_an_array_attempts_and_resubmissions_share_their_parts() -> None:
    inner = MemoryStore()
    store = SpecStore(inner)
    await store.transact([], [Put(f"queue/jobs/{number}", job(str(number))) for number in range(50)])
    await put(SpecStore(inner), "placement/attempts/1", attempt("1"))
    await put(store, "queue/jobs/again", job("again"))
    assert sum((await kept(inner)).values()) < 4 * 60_000
    assert len(await kept(inner, DATA)) == 1
    assert await same(store, "placement/attempts/1", attempt("1"))


async def test_small_records_and_those_of_older_versions_stay_as_they_are() -> None:
    inner = MemoryStore()
    store = SpecStore(inner)
    await put(store, "queue/jobs/small", job("small", "x"))
    await put(inner, "queue/jobs/old", job("old"))  # whole, as older versions wrote it
    assert not await kept(inner, "specs/")
    entries = (await store.list("queue/jobs/")).entries
    assert [entry.value for entry in entries] == [job("old"), job("small", "x")]


async def test_a_version_without_spec_parts_rejects_a_divided_record() -> None:
    inner = MemoryStore()
    await put(SpecStore(inner), "queue/jobs/a", job("a"))
    entry = await inner.get("queue/jobs/a")
    assert entry
    with pytest.raises(NewerSchema):
        read(records_pb2.StoredJob, entry)


async def test_a_watch_yields_whole_records() -> None:
    inner = MemoryStore()
    store = SpecStore(inner)
    revision = await put(store, "other", b"1")
    await put(store, "queue/jobs/a", job("a"))
    await store.transact([], [Delete("queue/jobs/a")])
    first, second = await take(SpecStore(inner).watch("queue/jobs/", after_revision=revision), 2)
    assert isinstance(first, Changes)
    assert isinstance(second, Changes)
    assert records_pb2.StoredJob.FromString(first.changes[0].value or b"") == records_pb2.StoredJob.FromString(job("a"))
    assert second.changes[0].value is None


async def test_lost_parts_are_reported_with_the_key_of_the_record() -> None:
    inner = MemoryStore()
    await put(SpecStore(inner), "queue/jobs/a", job("a"))
    (data,) = await kept(inner, DATA)
    await inner.transact([], [Delete(data)])
    with pytest.raises(BadRecord, match="queue/jobs/a refers to missing parts of its spec"):
        await SpecStore(inner).get("queue/jobs/a")


@pytest.mark.parametrize("damage", [lambda value: value[:-1], lambda value: value.replace(b"python", b"pythom")])
async def test_damaged_parts_are_reported_and_no_job_gets_another_command(damage: Callable[[bytes], bytes]) -> None:
    inner = MemoryStore()
    revision = await put(SpecStore(inner), "queue/jobs/a", job("a"))
    (parts,) = (await inner.list(DATA)).entries
    await inner.transact([], [Put(parts.key, damage(parts.value))])
    store = SpecStore(inner)
    with pytest.raises(BadRecord, match=f"queue/jobs/a refers to damaged parts of its spec .{parts.key}"):
        await store.get("queue/jobs/a")
    with pytest.raises(BadRecord, match="queue/jobs/a"):
        await store.list("queue/jobs/")
    with pytest.raises(BadRecord, match="queue/jobs/a"):
        await take(store.watch("queue/jobs/", after_revision=revision - 1), 1)


async def test_an_undecodable_record_is_stored_unchanged() -> None:
    inner = MemoryStore()
    damaged = b"\xff" * 20_000
    await put(SpecStore(inner), "queue/jobs/a", damaged)
    entry = await inner.get("queue/jobs/a")
    assert entry
    assert entry.value == damaged


async def test_a_backup_has_the_parts_and_a_restored_store_reads_whole_records(tmp_path: Path) -> None:
    inner = MemoryStore()
    await put(SpecStore(inner), "queue/jobs/a", job("a"))
    write_file(await read_store(OffsetStore(inner)), tmp_path / "backup")
    fresh = MemoryStore()
    await restore_entries(OffsetStore(fresh), read_file(tmp_path / "backup"))
    assert await fresh.get(BASE)
    store = SpecStore(fresh)
    assert await same(store, "queue/jobs/a", job("a"))
    assert await store.collect_parts() == 0


async def test_collected_parts_are_written_again_by_a_writer_that_cached_them() -> None:
    inner = MemoryStore()
    mine, other = SpecStore(inner), SpecStore(inner)
    await put(mine, "queue/jobs/a", job("a"))
    await mine.transact([], [Delete("queue/jobs/a")])
    assert await other.collect_parts() == 1
    assert not await kept(inner, "specs/")
    await put(mine, "queue/jobs/b", job("b"))  # it has cached parts that are gone
    assert await same(other, "queue/jobs/b", job("b"))
    with_condition = await mine.transact([Compare("queue/jobs/b", 1)], [Put("queue/jobs/b", job("b"))])
    assert isinstance(with_condition, Conflict)


STEP = st.tuples(
    st.sampled_from(["put", "put", "delete", "collect"]), st.integers(0, 1), st.sampled_from("abc"), st.integers(0, 2)
)


@settings(deadline=None)
@given(st.lists(st.lists(STEP, min_size=1, max_size=4), max_size=12))
def test_concurrent_writes_and_collections_keep_every_record_intact(
    rounds: Sequence[Sequence[tuple[str, int, str, int]]],
) -> None:
    async def story() -> None:
        inner = MemoryStore()
        stores = SpecStore(inner), SpecStore(inner)
        for steps in rounds:
            await asyncio.gather(*(act(stores[who], what, name, size) for what, who, name, size in steps))
            for entry in (await SpecStore(inner).list("queue/jobs/")).entries:
                stored = records_pb2.StoredJob.FromString(entry.value)
                assert stored == records_pb2.StoredJob.FromString(job(stored.job.id, stored.job.spec.command[2]))
        for store in stores:
            for entry in (await store.list("queue/jobs/")).entries:
                await store.transact([], [Delete(entry.key)])
        await stores[0].collect_parts()
        assert not await kept(inner, "specs/")

    async def act(store: SpecStore, what: str, name: str, size: int) -> None:
        key = f"queue/jobs/{name}"
        if what == "collect":
            await store.collect_parts()
            return
        entry = await store.get(key)
        compare = Compare(key, entry.mod_revision if entry else 0)
        operation = Delete(key) if what == "delete" else Put(key, job(name, str(size) * 9_000))
        await store.transact([compare], [operation])

    asyncio.run(story())


def test_bytes_that_resemble_a_divided_record_are_left_alone() -> None:
    stored = records_pb2.StoredJob(schema_version=1)
    stored.job.id = "a"
    value = stored.SerializeToString()
    assert spec_parts.digest_in("queue/jobs/a", value) == ""
    assert (
        spec_parts.digest_in("queue/jobs/a", b"\xff" * 20 + spec_parts.MARKS[records_pb2.StoredJob] + b"0" * 16) == ""
    )
    assert spec_parts.digest_in("elsewhere/a", value + spec_parts.MARKS[records_pb2.StoredJob] + b"0" * 16) == ""
    assert job_pb2.Job.FromString(stored.job.SerializeToString()).id == "a"


async def test_parts_that_another_process_has_written_are_not_written_again() -> None:
    """As by placement, which starts a job that the queue has stored."""
    inner = MemoryStore()
    queue, placement = SpecStore(inner), SpecStore(inner)
    await queue.transact([], [Put("queue/jobs/a", job("a", LARGE))])
    (before,) = (await inner.list(spec_parts.DATA)).entries
    await placement.transact([], [Put("queue/jobs/b", job("b", LARGE))])
    assert (await inner.list(spec_parts.DATA)).entries == (before,)
