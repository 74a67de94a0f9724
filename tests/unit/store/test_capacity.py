"""The capacity of stores, and what they can still write on a full disk."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.contract.stores import put
from tests.support.etcd_server import EtcdServer

from cotenant.store import capacity as module
from cotenant.store.ballast import Ballast
from cotenant.store.capacity import MIB, disk_capacity, etcd_capacity
from cotenant.store.compaction import Compactor
from cotenant.store.etcd import EtcdStore
from cotenant.store.etcd_quota import read_quota
from cotenant.store.guarded_store import GuardedStore
from cotenant.store.memory import MemoryStore
from cotenant.store.open import open_store
from cotenant.store.port import Put, Store, StoreFull
from cotenant.store.recovery_commands import recovery_of
from cotenant.store.spec_parts import SpecStore
from cotenant.store.sqlite import SqliteStore


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Use up all free space."""
    filler = disk / "filler"
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return filler


async def write_until_refused(store: Store, size: int) -> None:
    """Write one key repeatedly; a store may notice its size a moment later."""
    for _ in range(5_000):
        await put(store, "filler", b"x" * size)


@pytest.mark.root
async def test_job_ends_are_written_on_a_full_disk_and_no_acknowledged_write_is_lost(small_disk: Path) -> None:
    path = small_disk / "state.db"
    store = SqliteStore(path, reserve_bytes=4 * MIB)
    await store.hold_ballast()
    assert not (await store.capacity()).why_stopped()
    filler = fill(small_disk)
    assert (await store.capacity()).why_stopped().startswith("only 0.0 MiB are free on the file system of ")
    for number in range(10):  # the ballast is released for them
        await put(store, f"ends/{number}", b"x" * 1_000)
    fill(small_disk)
    with pytest.raises(StoreFull, match="disk is full"):
        await write_until_refused(store, 10_000)
    revision = (await store.list("")).revision
    assert "the store is full: cannot write" in (await store.capacity()).why_stopped()
    filler.unlink()
    assert await put(store, "after") == revision + 1
    assert not (await store.capacity()).why_stopped()
    await store.hold_ballast()
    assert Ballast(path).held
    await store.close()
    again = SqliteStore(path)
    assert (await again.list("")).revision == revision + 1
    await again.close()


async def test_etcd_reports_its_size_its_quota_and_recovery_commands(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path, arguments=[f"--quota-backend-bytes={4 * MIB}"])
    server.start()
    store = await open_store(server.url)
    assert isinstance(store, GuardedStore)
    try:
        assert await read_quota(server.endpoint) == 4 * MIB
        told = await store.capacity()
        assert told
        assert (told.limit_bytes, told.admits_below_bytes, told.full) == (4 * MIB, int(3.2 * MIB), "")
        with pytest.raises(StoreFull):
            await write_until_refused(store, 60_000)
        told = await store.capacity()
        assert told
        helps = recovery_of(told)
        assert helps
        assert helps.commands == (
            f"etcdctl --endpoints=http://{server.endpoint} compact {told.revision} || true",
            f"etcdctl --endpoints=http://{server.endpoint} defrag",
            f"etcdctl --endpoints=http://{server.endpoint} alarm disarm",
        )
    finally:
        await store.close()
        server.kill()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n# HELP",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n# HELP",
        b"HTTP/1.1 200 OK\r\n\r\netcd_server_quota_backend_bytes +Inf\n",
        b"SSH-2.0-other\r\n",
        b"",
    ],
    ids=["cut chunk", "cut page", "no number", "other protocol", "nothing"],
)
async def test_a_member_that_answers_nonsense_has_an_unknown_quota(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        assert await read_quota("{}:{}".format(*server.sockets[0].getsockname())) == 0


async def test_an_unreadable_quota_is_the_operators_or_etcds_default(etcd: EtcdServer) -> None:
    assert await read_quota("127.0.0.1:1") == 0
    store = EtcdStore([etcd.endpoint], quota_bytes=8 * MIB)
    assert (await store.capacity()).limit_bytes == 8 * MIB
    await store.close()


async def test_a_fragmented_file_near_its_quota_is_defragmented_and_history_is_compacted_early(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path, arguments=[f"--quota-backend-bytes={8 * MIB}"])
    server.start()
    store = SpecStore(EtcdStore([server.endpoint]))
    seconds = 0.0
    upkeep = Compactor(store, now=lambda: seconds)
    try:
        async with asyncio.timeout(30.0):
            while not ((told := await store.capacity()) and told.pressed):
                await put(store, "filler", b"x" * 20_000)
            assert await upkeep.run_once(pressed=True) == 0
            seconds = 6.0
            assert await upkeep.run_once(pressed=True) > 0
            while (told := await store.capacity()) and told.pressed:  # a store compacts lazily
                await upkeep.run_once(pressed=True)
        assert await store.get("filler")
    finally:
        await store.close()
        server.kill()


async def test_dropping_small_history_beside_large_values_does_not_fill_an_etcd(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path, arguments=[f"--quota-backend-bytes={16 * MIB}"])
    server.start()
    store = EtcdStore([server.endpoint])
    seconds = 0.0
    upkeep = Compactor(store, now=lambda: seconds)
    try:
        for number in range(80):
            await store.transact([], [Put(f"small/{number}", b""), Put(f"large/{number}", bytes(120_000))])
        for number in range(80):
            await put(store, f"small/{number}")
        await upkeep.run_once(pressed=True)
        seconds = 6.0
        assert await upkeep.run_once(pressed=True) > 0
        async with asyncio.timeout(30.0):
            while (told := await store.capacity()) and told.in_use_bytes > 9.5 * MIB:  # etcd drops it later
                await put(store, "small/0")
        told = await store.capacity()
        assert told.size_bytes < told.admits_below_bytes
    finally:
        await store.close()
        server.kill()


async def test_unreferenced_spec_parts_are_collected_by_the_compactor() -> None:
    inner = MemoryStore()
    await put(inner, "specs/data/00", b"x")
    await Compactor(SpecStore(inner)).run_once()
    assert not (await inner.list("specs/")).entries


def test_a_reserve_is_never_more_than_a_tenth_of_the_file_system() -> None:
    assert disk_capacity(0, 50 * MIB, 100 * MIB, 128 * MIB, "/x").why_stopped() == ""
    assert disk_capacity(0, 9 * MIB, 100 * MIB, 128 * MIB, "/x").why_stopped()


def test_usage_and_fragmentation_have_different_remedies() -> None:
    fragmented, used = etcd_capacity(9 * MIB, 2 * MIB, 10 * MIB), etcd_capacity(9 * MIB, 9 * MIB, 10 * MIB)
    first, second = recovery_of(fragmented), recovery_of(used)
    assert first
    assert second
    assert "7.0 MiB of it fragmented" in first.problem
    assert "defragments members automatically" in first.remedy
    assert "--quota-backend-bytes" in second.remedy
    assert recovery_of(etcd_capacity(2 * MIB, 2 * MIB, 10 * MIB)) is None
    assert module.ADMIT_SHARE_MAX == 0.8


async def test_a_store_opened_by_its_url_knows_its_reserve(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:{tmp_path / 'state.db'}", limits=module.StoreLimits(reserve_bytes=0))
    assert isinstance(store, GuardedStore)
    assert isinstance(store.inner, SpecStore)
    told = await store.capacity()
    assert told
    assert told.admits_below_bytes == told.limit_bytes
    await store.transact([], [Put("a", b"1")])
    await store.close()
