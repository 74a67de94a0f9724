"""URLs of stores."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.conftest import require_etcd
from tests.contract.stores import put
from tests.support.etcd_server import EtcdServer

from cotenant.security.certificates import Authority
from cotenant.security.subjects import Subject
from cotenant.store.etcd import EtcdStore
from cotenant.store.memory import MemoryStore
from cotenant.store.open import open_raw, open_store, tls_of
from cotenant.store.port import Store, StoreInUse, StoreUnavailable
from cotenant.store.sqlite import SqliteStore


async def test_memory() -> None:
    store = await open_raw("memory:")
    assert isinstance(store, MemoryStore)
    await store.close()


async def test_a_file_absolute_or_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:state.db", f"sqlite:{tmp_path}/state.db", f"sqlite://{tmp_path}/state.db"):
        store = await open_raw(url)
        assert isinstance(store, SqliteStore)
        await put(store, "/a", url.encode())
        await store.close()
    assert sorted(os.listdir(tmp_path)) == ["state.db", "state.db-witness"]


async def test_a_file_in_use(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:{tmp_path}/state.db")
    with pytest.raises(StoreInUse, match=r"state\.db"):
        await open_store(f"sqlite:{tmp_path}/state.db")
    await store.close()


async def test_an_etcd(shared_etcd: EtcdServer) -> None:
    store: Store = await open_raw(shared_etcd.url)
    assert isinstance(store, EtcdStore)
    assert await put(store, "/opened") > 0
    await store.close()


async def test_an_etcd_that_is_not_running_yet_can_be_opened() -> None:
    store = await open_store("etcd://127.0.0.1:1,[::1]:1")
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.get("/a")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("", "expected one of memory:, sqlite:PATH, etcd://HOST:PORT,HOST:PORT"),
        ("postgres://host/db", "expected one of"),
        ("sqlite", "did you mean sqlite:PATH"),
        ("SQLITE:state.db", "did you mean sqlite:PATH"),
        ("sqlite3:state.db", "did you mean sqlite:PATH"),
        ("mem:", "did you mean memory:"),
        ("memory", "did you mean memory:"),
        ("memory:x", "did you mean memory:"),
        ("etc://host:2379", "did you mean etcd://HOST:PORT,HOST:PORT"),
        ("sqlite:", "expected sqlite:PATH"),
        ("sqlite://host/state.db", "expected sqlite:PATH"),
        ("sqlite::memory:", "memory: for no persistence"),
        ("etcd:host:2379", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://host", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://host:2379,", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://host:0", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://host:65536", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://user@host:2379", "expected etcd://HOST:PORT,HOST:PORT"),
        ("etcd://http://host:2379", "expected etcd://HOST:PORT,HOST:PORT"),
    ],
)
async def test_invalid_urls_are_rejected_with_advice(url: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice) as refusal:
        await open_store(url)
    assert repr(url) in str(refusal.value)


async def test_an_etcd_by_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_etcd()
    authority = Authority(tmp_path / "certs")
    authority.create(days=1)
    made = authority.issue(Subject.parse("service/etcd", ""), ["localhost", "127.0.0.1"], 1)
    files = {"ca": authority.cert_path, "cert": made.path, "key": made.key_path}
    for name, path in files.items():
        monkeypatch.setenv(f"COTENANT_ETCD_{name.upper()}", str(path))
    server = EtcdServer(
        tmp_path,
        arguments=(
            f"--trusted-ca-file={files['ca']}",
            f"--cert-file={files['cert']}",
            f"--key-file={files['key']}",
            "--client-cert-auth",
        ),
        scheme="https",
    )
    server.start(wait=False)
    try:
        store = await open_raw(f"etcds://{server.endpoint}")
        async with asyncio.timeout(60):
            while True:
                try:
                    await put(store, "/a", b"secret")
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.05)
        await store.close()
        plain = EtcdStore([server.endpoint], timeout_seconds=1.0)
        with pytest.raises(StoreUnavailable):
            await plain.get("/a")
        await plain.close()
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"COTENANT_ETCD_CERT": "c"}, "must both be set"),
        ({"COTENANT_ETCD_CA": "/nowhere/ca.pem"}, "cannot read /nowhere/ca.pem"),
    ],
)
def test_missing_certificates_are_reported(environment: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tls_of(environment)
