"""Whole meshes in one process on one etcd: one of them leads, and the others fail to start with an error."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.support.etcd_server import EtcdServer
from tests.unit.services.mesh import WAIT_SECONDS, again, spec, until

from cotenant.cli.mesh import up
from cotenant.cli.mesh.embedded import EmbeddedMesh, MeshConfig, start_mesh
from cotenant.codec import errors
from cotenant.leadership import leadership_set
from cotenant.leadership.election import Election
from cotenant.leadership.leadership_set import LedByAnotherProcess
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.rpc import access
from cotenant.rpc.channel import Channel, connect
from cotenant.services.placement.placement_leadership import LEADER
from cotenant.store.etcd import EtcdStore
from cotenant.store.open import open_store
from cotenant.store.port import Delete, Relisted
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1.job_service_pb2_grpc import JobServiceStub


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership_set, "PATIENCE_SECONDS", 1.5)
    monkeypatch.setattr(up, "RETRY_SECONDS", 0.1)


@asynccontextmanager
async def serving(tmp_path: Path, etcd: EtcdServer) -> AsyncIterator[Channel]:
    """A mesh that restarts as `cotenant up` does, and a channel to its first address."""
    task = asyncio.create_task(up._serve(MeshConfig(tmp_path / "a", store_url=etcd.url)))
    endpoint = tmp_path / "a" / "endpoint.json"
    await until(lambda: endpoint.exists() or task.done())
    channel = connect(json.loads(endpoint.read_text())["queue"], access.ensure_token(tmp_path / "a"))
    try:
        yield channel
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await channel.close()


def create(channel: Channel, **options: float) -> Awaitable[jobs_pb.CreateJobResponse]:
    stub: Any = JobServiceStub(channel)
    created: Awaitable[jobs_pb.CreateJobResponse] = stub.CreateJob(jobs_pb.CreateJobRequest(spec=spec()), **options)
    return created


@pytest.mark.deep
async def test_up_survives_an_outage_of_its_store(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EtcdStore.__init__.__kwdefaults__ or {}, "timeout_seconds", 2.0)
    async with serving(tmp_path, etcd) as channel:
        stub: Any = JobServiceStub(channel)
        job = (await again(lambda: create(channel))).job
        etcd.freeze()
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(channel, timeout=WAIT_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert errors.from_error(refused.value).retry_after_seconds
        assert (await stub.GetJob(jobs_pb.GetJobRequest(id=job.id))).job.id == job.id  # reads still work
        await until(lambda: time.monotonic() > began + leadership_set.TTL_SECONDS + 1.0)  # its leases have expired then
        etcd.thaw()
        assert (await again(lambda: create(channel))).job.id
        assert (await again(lambda: stub.GetJob(jobs_pb.GetJobRequest(id=job.id)))).job.id == job.id


@pytest.mark.deep
async def test_up_restarts_its_services_after_losing_leadership(
    tmp_path: Path, etcd: EtcdServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path, etcd) as channel:
        job = (await again(lambda: create(channel))).job
        store = EtcdStore([etcd.endpoint])
        await store.transact([], [Delete(LEADER)])  # as if its lease had expired
        await store.close()
        said = ""

        def is_back() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "the mesh is up again" in said

        await until(is_back)
        assert "the mesh lost its leadership and restarts: the leadership key is gone" in said
        stub: Any = JobServiceStub(channel)
        assert (await again(lambda: stub.GetJob(jobs_pb.GetJobRequest(id=job.id)))).job.id == job.id


async def start(tmp_path: Path, name: str, etcd: EtcdServer) -> EmbeddedMesh:
    return await start_mesh(MeshConfig(tmp_path / name, store_url=etcd.url))


async def test_one_mesh_leads_on_an_etcd_and_resigns(tmp_path: Path, etcd: EtcdServer) -> None:
    first = await start(tmp_path, "a", etcd)
    with pytest.raises(LedByAnotherProcess, match=f"at {first.address} already leads predictor"):
        await start(tmp_path, "b", etcd)
    losing = asyncio.create_task(first.lost())
    await asyncio.sleep(0)
    assert not losing.done()
    await first.close()
    assert "the process stops" in await losing
    second = await start(tmp_path, "b", etcd)
    await second.close()


async def test_a_mesh_does_not_start_beside_a_service_that_leads(tmp_path: Path, etcd: EtcdServer) -> None:
    store = await open_store(etcd.url)
    election = Election(store, LEADER, "10.0.0.5:7071", ttl_seconds=60.0)  # it is not renewed
    following = asyncio.create_task(election.follow())
    held = await election.campaign()
    with pytest.raises(LedByAnotherProcess, match=r"at 10\.0\.0\.5:7071 already leads placement"):
        await start(tmp_path, "a", etcd)
    await election.resign(held)
    mesh = await start(tmp_path, "a", etcd)
    await mesh.close()
    following.cancel()
    await store.close()


async def test_the_mark_of_a_process_that_owned_the_store_alone_does_not_block_a_start(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    store = await open_store(etcd.url)
    await HeldTerm(store, LEADER).renew()  # under no lease, as before meshes had elections
    mesh = await start(tmp_path, "a", etcd)
    await mesh.close()
    await store.close()


async def test_a_replaced_mesh_learns_of_it(tmp_path: Path, etcd: EtcdServer) -> None:
    mesh = await start(tmp_path, "a", etcd)
    store = await open_store(etcd.url)
    await HeldTerm(store, LEADER, "10.0.0.5:7071").renew()  # the last writer of the key leads
    async with asyncio.timeout(60):
        assert "10.0.0.5:7071 leads now" in await mesh.lost()
    await mesh.close()
    await store.close()


async def test_a_mesh_in_one_process_compacts_old_history_too(tmp_path: Path, etcd: EtcdServer) -> None:
    mesh = await start_mesh(MeshConfig(tmp_path / "a", store_url=etcd.url, history_seconds=0.0))
    store = EtcdStore([etcd.endpoint])
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while not isinstance(await anext(store.watch("", after_revision=1)), Relisted):
                pass
    finally:
        await mesh.close()
        await store.close()
