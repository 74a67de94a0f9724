"""Whole meshes in one process on one etcd: one of them leads, and others say so and do not start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.etcd_server import EtcdServer

from cotenant.cli.embedded import EmbeddedMesh, MeshConfig
from cotenant.replicas import offices
from cotenant.replicas.election import Election
from cotenant.replicas.offices import AnotherLeads
from cotenant.replicas.tenure import Held
from cotenant.services.placement.leadership import LEADER
from cotenant.store.open import open_store


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offices, "PATIENCE_SECONDS", 1.5)


def of(tmp_path: Path, name: str, etcd: EtcdServer) -> EmbeddedMesh:
    return EmbeddedMesh(MeshConfig(tmp_path / name, store_url=etcd.url))


async def test_one_mesh_leads_on_an_etcd_and_gives_it_back(tmp_path: Path, etcd: EtcdServer) -> None:
    first, second = of(tmp_path, "a", etcd), of(tmp_path, "b", etcd)
    await first.start()
    with pytest.raises(AnotherLeads, match=f"at {first.address} leads predictor"):
        await second.start()
    losing = asyncio.create_task(first.lost())
    await asyncio.sleep(0)
    assert not losing.done()
    await first.close()
    assert "it ends" in await losing
    await second.start()
    await second.close()


async def test_a_mesh_does_not_start_beside_a_service_that_leads(tmp_path: Path, etcd: EtcdServer) -> None:
    store = await open_store(etcd.url)
    election = Election(store, LEADER, "10.0.0.5:7071")
    following = asyncio.create_task(election.follow())
    held = await election.win()
    mesh = of(tmp_path, "a", etcd)
    with pytest.raises(AnotherLeads, match=r"at 10\.0\.0\.5:7071 leads placement"):
        await mesh.start()
    await election.resign(held)
    await mesh.start()
    await mesh.close()
    following.cancel()
    await store.close()


async def test_the_mark_of_one_that_took_the_store_as_its_own_holds_nobody_back(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    store = await open_store(etcd.url)
    await Held(store, LEADER).renew()  # under no lease, as it was before meshes were elected
    mesh = of(tmp_path, "a", etcd)
    await mesh.start()
    await mesh.close()
    await store.close()


async def test_a_mesh_that_is_replaced_hears_of_it(tmp_path: Path, etcd: EtcdServer) -> None:
    mesh = of(tmp_path, "a", etcd)
    await mesh.start()
    store = await open_store(etcd.url)
    await Held(store, LEADER, "10.0.0.5:7071").renew()  # whoever writes the key leads
    async with asyncio.timeout(20):
        assert "10.0.0.5:7071 leads now" in await mesh.lost()
    await mesh.close()
    await store.close()
