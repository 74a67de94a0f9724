"""What a node does with a job's uploaded folder at its launch: whose it is, what stops it, whose failure it is."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from tests.unit.folders.trees import Direct, store, upload, write
from tests.unit.node_agent.jobs import shell
from tests.unit.node_agent.runtime.test_run_as import opened as opened_for_users
from tests.unit.node_agent.runtime.test_run_as import run, submitted
from tests.unit.node_agent.runtime.test_runtime_port import Opened, opened

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.folder_source import FolderSource
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.uploaded_folder import CannotFetch, ChunkSource, FetchProgress, UploadedFolders
from cotenant.services.queue.folders.folder_store import FolderRecord
from cotenant.v1 import job_pb2
from cotenant.v1.folder_service_pb2 import ReadChunksRequest, ReadChunksResponse

__all__ = ["opened", "opened_for_users"]  # fixtures


class Stuck:
    """A source that never answers."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read(self, assignment: agent_pb2.Assignment, digests: Sequence[bytes]) -> AsyncIterator[bytes]:
        self.asked.set()
        while True:
            await asyncio.sleep(0)
            yield b""


class Broken:
    """A source without the folder."""

    async def read(self, assignment: agent_pb2.Assignment, digests: Sequence[bytes]) -> AsyncIterator[bytes]:
        for _ in digests:
            yield b""
        raise CannotFetch("the uploaded folder cannot be fetched: lost")


def use(opened: Opened, state_dir: Path, source: ChunkSource) -> None:
    folders = UploadedFolders(state_dir, source, 2**20)
    opened.runtime._context = dataclasses.replace(opened.context, folders=folders)


@pytest.fixture
def uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FolderRecord, Direct]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(
        tmp_path / "project",
        {b"d": ("directory", 0o755, b""), b"d/f": ("file", 0o640, b"data"), b"l": ("link", b"d/f", b"")},
    )
    folders = store(tmp_path / "store")
    record, _ = upload(tmp_path / "project", folders)
    return record, Direct(folders, record)


async def test_a_job_starts_in_a_copy_of_its_folder(
    opened: Opened, tmp_path: Path, uploaded: tuple[FolderRecord, Direct]
) -> None:
    record, source = uploaded
    use(opened, tmp_path, source)
    spec = job_pb2.JobSpec(upload=record.id)
    assert await run(opened, shell("one", "cat l; stat -c %a d/f; echo changed > d/f", spec=spec)) == (
        "SUCCEEDED", "", "data640\n",
    )  # fmt: skip
    state, _, output = await run(opened, shell("two", "cat d/f", spec=spec))
    assert (state, output) == ("SUCCEEDED", "data")


@pytest.mark.root
async def test_everything_belongs_to_the_jobs_user(
    opened_for_users: Opened, tmp_path: Path, uploaded: tuple[FolderRecord, Direct]
) -> None:
    record, source = uploaded
    use(opened_for_users, opened_for_users.context.state_dir, source)
    script = "cat d/f && find . -not -user $(id -u) && echo x > d/g && rm l d/f && rmdir ../x 2>&1 | wc -l"
    job = submitted("as-eve", "eve", script, spec=job_pb2.JobSpec(upload=record.id))
    state, message, output = await run(opened_for_users, job)
    assert (state, message, output) == ("SUCCEEDED", "", "data1\n")


async def test_a_folder_that_cannot_be_fetched_is_neither_the_jobs_failure_nor_the_nodes(
    opened: Opened, tmp_path: Path
) -> None:
    use(opened, tmp_path, Broken())
    await opened.runtime.launch(shell("lost", "true", spec=job_pb2.JobSpec(upload="0" * 64)))
    ended = await opened.ended("lost")
    assert (ended.state, ended.launch_cause) == ("NOT_LAUNCHED", "upload")
    assert "cannot be fetched: lost" in ended.message


async def test_a_stop_ends_the_fetch(opened: Opened, tmp_path: Path) -> None:
    source = Stuck()
    use(opened, tmp_path, source)
    launching = asyncio.create_task(opened.runtime.launch(shell("slow", "true", spec=job_pb2.JobSpec(upload="0" * 64))))
    await source.asked.wait()
    opened.runtime.stop(AttemptKey("slow", 1), 5)
    await launching
    assert (await opened.ended("slow")).state == "STOPPED"


class Cut:
    """A queue whose connection is lost behind the first chunk, once for each of these statuses."""

    def __init__(self, *codes: grpc.StatusCode) -> None:
        self._codes = list(codes)
        self.asked: list[int] = []

    async def ReadChunks(self, request: ReadChunksRequest) -> AsyncIterator[Any]:
        self.asked.append(len(request.digests))
        for place, digest in enumerate(request.digests or [b"0", b"1", b"2"]):
            if place == 1 and self._codes:
                raise AioRpcError(self._codes.pop(), Metadata(), Metadata())
            yield ReadChunksResponse(data=digest)


@pytest.mark.parametrize(("digests", "asked"), [((b"0", b"1", b"2"), [3, 2]), ((), [0, 0])])
async def test_a_fetch_that_was_cut_goes_on_where_it_was(digests: tuple[bytes, ...], asked: list[int]) -> None:
    queue: Any = Cut(grpc.StatusCode.UNAVAILABLE)
    source = FolderSource("n1", lambda: queue, Random(1))
    assert [data async for data in source.read(agent_pb2.Assignment(), digests)] == [b"0", b"1", b"2"]
    assert queue.asked == asked


async def test_what_will_never_succeed_is_not_tried_again() -> None:
    queue: Any = Cut(grpc.StatusCode.FAILED_PRECONDITION)
    with pytest.raises(CannotFetch):
        [data async for data in FolderSource("n1", lambda: queue, Random(1)).read(agent_pb2.Assignment(), [b"0", b"1"])]
    late: Any = Cut(*[grpc.StatusCode.UNAVAILABLE] * 2)
    source = FolderSource("n1", lambda: late, Random(1), patience_seconds=0.0)
    with pytest.raises(CannotFetch, match="could not be fetched for 0 s"):
        [data async for data in source.read(agent_pb2.Assignment(), [b"0", b"1"])]


def test_a_fetch_that_takes_long_is_told_and_taken_back_at_the_end() -> None:
    told: list[str] = []
    with FetchProgress("a-1", first_seconds=0.0, seconds=3600.0, tell=told.append) as progress:
        progress(1_234_000_000, 3_400_000_000)
        progress(2_000_000_000, 3_400_000_000)  # too soon
    assert told == ["fetching its folder: 1.2 of 3.4 GB", ""]
    with FetchProgress("a-1", first_seconds=3600.0, tell=told.append) as progress:
        progress(1, 2)
    assert len(told) == 2
