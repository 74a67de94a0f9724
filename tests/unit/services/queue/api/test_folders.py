"""The queue's API for uploaded folders: who may read which chunk, and what a job needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.services.mesh import BACKFILL, Mesh, reason, running, spec

from cotenant.folders.content import CHUNK_BYTES, FILE, digest_of, pages_of
from cotenant.services.queue.folders.folder_store import FolderRules
from cotenant.v1 import folder_service_pb2 as pb
from cotenant.v1 import folder_service_pb2_grpc

CHUNK = b"print('hello')"
[PAGE] = pages_of(
    [pb.FolderEntry(path=b"train.py", kind=FILE, mode=0o644, size_bytes=len(CHUNK), chunks=[digest_of(CHUNK)])]
)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    rules = FolderRules(tmp_path / "uploads", quota_bytes=CHUNK_BYTES)
    async with running(queue_config=replace(BACKFILL, folders=rules)) as mesh:
        yield mesh


def folders(mesh: Mesh) -> Any:
    return folder_service_pb2_grpc.FolderServiceStub(mesh.channel("queue"))


async def uploaded(mesh: Mesh, tenant: str = "") -> str:
    stub = folders(mesh)
    await stub.WriteChunks(pb.WriteChunksRequest(tenant=tenant, chunks=[CHUNK, PAGE]))
    made = await stub.CommitFolder(pb.CommitFolderRequest(tenant=tenant, pages=[digest_of(PAGE)]))
    assert (made.folder.entry_count, made.folder.size_bytes) == (1, len(CHUNK))
    return str(made.folder.id)


async def read(mesh: Mesh, **fields: Any) -> list[bytes]:
    return [answer.data async for answer in folders(mesh).ReadChunks(pb.ReadChunksRequest(**fields))]


async def test_a_node_reads_the_folder_of_a_job_that_is_placed_on_it(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    job_id = await mesh.submit(upload=await uploaded(mesh))
    await mesh.reach(job_id, "RUNNING")
    assert await read(mesh, job_id=job_id, number=1, node_id="n1") == [PAGE]
    assert await read(mesh, job_id=job_id, number=1, node_id="n1", digests=[digest_of(CHUNK)]) == [CHUNK]
    for other in ({"node_id": "n2"}, {"number": 2}, {"job_id": "0none"}):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(mesh, **{"job_id": job_id, "number": 1, "node_id": "n1", **other})
        assert reason(refused.value) == "NOT_PLACED_HERE"
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await read(mesh, job_id=job_id, number=1, node_id="n1", digests=[bytes(32)])
    assert reason(lost.value) == "UPLOAD_LOST"


async def test_a_job_needs_a_folder_of_its_own_tenant(mesh: Mesh) -> None:
    await mesh.agent("n1", gpus=1)
    upload = await uploaded(mesh, "red")
    for tenant, named in (("blue", upload), ("red", "0" * 64), ("red", "../../etc")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await mesh.submit(upload=named, tenant=tenant)
        assert reason(refused.value) == "UPLOAD_UNKNOWN"
    with pytest.raises(grpc.aio.AioRpcError) as both:
        await mesh.submit(upload=upload, tenant="red", working_directory="/srv")
    assert "not both" in str(both.value.details())
    assert await mesh.submit(upload=upload, tenant="red")


async def test_what_is_missing_is_told_with_what_is_left_of_the_quota(mesh: Mesh) -> None:
    asked = pb.FindMissingChunksRequest(digests=[digest_of(CHUNK), digest_of(b"other"), digest_of(CHUNK)])
    before = await folders(mesh).FindMissingChunks(asked)
    assert (list(before.missing), before.free_bytes) == ([digest_of(CHUNK), digest_of(b"other")], CHUNK_BYTES)
    await uploaded(mesh)
    after = await folders(mesh).FindMissingChunks(asked)
    assert list(after.missing) == [digest_of(b"other")]
    assert after.free_bytes == CHUNK_BYTES - len(CHUNK) - len(PAGE)
    for chunks, why in (([b"x" * CHUNK_BYTES], "UPLOAD_QUOTA"), ([b"x" * (CHUNK_BYTES + 1)], "INVALID_ARGUMENT")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await folders(mesh).WriteChunks(pb.WriteChunksRequest(chunks=chunks))
        assert reason(refused.value) == why, refused.value.details()
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await folders(mesh).CommitFolder(pb.CommitFolderRequest(pages=[bytes(32)]))
    assert reason(missing.value) == "CHUNKS_MISSING"


async def test_what_an_unfinished_job_needs_outlives_its_retention(mesh: Mesh, tmp_path: Path) -> None:
    upload = await uploaded(mesh)
    job_id = await mesh.submit(upload=upload, hold=True)
    servicer = mesh.parts["queue"].service.folders
    assert set(servicer._used()) == {("default", upload)}
    assert job_id in mesh.parts["queue"].service.state.records


async def test_files_are_only_of_jobs_in_a_directory_of_the_mesh(mesh: Mesh) -> None:
    from cotenant.v1 import job_service_pb2 as jobs_pb

    elsewhere = await mesh.submit(working_directory="/srv")
    waiting = await mesh.submit()
    for job_id, why in ((elsewhere, "NOT_KEPT_HERE"), (waiting, "NO_FILES")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in mesh.jobs.ReadFiles(jobs_pb.ReadFilesRequest(id=job_id)):
                pass
        assert reason(refused.value) == why
    assert spec().upload == ""
