"""Ended jobs are archived before they are deleted, or not deleted."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.services.mesh import running, spec

from cotenant.cli import main
from cotenant.services.queue.api.server import QueueConfig
from cotenant.services.queue.jobs.archive import Archive
from cotenant.store.open import open_store
from cotenant.store.port import Put
from cotenant.v1 import job_pb2


def kept(path: Path) -> list[tuple[str, str, float]]:
    with sqlite3.connect(path) as connection:
        return connection.execute("SELECT id, phase, gpu_seconds FROM jobs ORDER BY id").fetchall()


async def test_deleted_jobs_are_in_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "archive.sqlite"
    config = QueueConfig(ended_kept_max=1, ended_kept_seconds=math.inf, archive=path)
    async with running(queue_config=config) as mesh:
        await mesh.agent("n1", run_seconds=0.0)
        ids = []
        for _ in range(3):
            ids.append(await mesh.submit(environment={"SECRET": "s3cr3t"}))
            await mesh.reach(ids[-1], "SUCCEEDED")
        retention = mesh.parts["queue"].service.retention
        await retention.sweep(time.time())
        assert [row[:2] for row in kept(path)] == [(job_id, "succeeded") for job_id in ids[:2]]
        assert await mesh.records_left("queue/jobs/") == [f"queue/jobs/{ids[2]}"]
        assert b"s3cr3t" not in path.read_bytes()
        assert path.stat().st_mode & 0o777 == 0o600
        await retention.sweep(time.time() + 1)
        assert len(kept(path)) == 2
    assert main.run(["history", "--archive", str(path), "--phase", "succeeded"]) == 0
    out = capsys.readouterr().out
    assert all(job_id in out for job_id in ids[:2])
    assert main.run(["history", "--archive", str(path), "--id", ids[1], "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == [ids[1]]
    assert main.run(["history", "--archive", str(path), "--since", "2999-01-01"]) == 0
    assert "no such jobs" in capsys.readouterr().err


async def test_the_earliest_ended_job_is_deleted_first() -> None:
    async with running(queue_config=QueueConfig(ended_kept_max=1)) as mesh:
        agent = await mesh.agent("n1")
        early, late = [await mesh.submit() for _ in range(2)]
        for job_id in (late, early):
            await mesh.reach(job_id, "RUNNING")
            agent.finish((job_id, 1))
            await mesh.reach(job_id, "SUCCEEDED")
        await mesh.parts["queue"].service.retention.sweep(time.time())
        assert await mesh.records_left("queue/jobs/") == [f"queue/jobs/{early}"]


async def test_an_old_ended_job_is_deleted_even_if_there_are_few() -> None:
    async with running(queue_config=QueueConfig(ended_kept_seconds=60.0)) as mesh:
        await mesh.agent("n1", run_seconds=0.0)
        await mesh.submit()
        await mesh.all_ended()
        retention = mesh.parts["queue"].service.retention
        await retention.sweep(time.time() + 30)
        assert len(await mesh.records_left("queue/jobs/")) == 1
        await retention.sweep(time.time() + 90)
        assert await mesh.records_left("queue/jobs/") == []


async def test_a_file_with_other_columns_is_not_written(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.sqlite")
    await archive.add([])
    with closing(sqlite3.connect(archive.path)) as connection:
        connection.execute("ALTER TABLE jobs RENAME COLUMN job TO jot")
    with pytest.raises(OSError, match="no column named job"):
        await archive.add([job_pb2.Job(id="a", phase=job_pb2.JOB_PHASE_SUCCEEDED, spec=spec(kind=1))])


async def test_jobs_that_cannot_be_read_back_do_not_count_as_written(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive.sqlite")
    await archive.id()
    with sqlite3.connect(archive.path) as connection:
        connection.execute("CREATE TRIGGER lose AFTER INSERT ON jobs BEGIN DELETE FROM jobs WHERE id = new.id; END")
    job = job_pb2.Job(id="j1", spec=spec(kind=job_pb2.JOB_KIND_TRAINING), phase=job_pb2.JOB_PHASE_SUCCEEDED)
    with pytest.raises(OSError, match="j1 cannot be read back"):
        await archive.add([job])


async def test_jobs_that_cannot_be_archived_are_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "archive.sqlite"
    path.write_text("this is no database, and longer than a header of SQLite would be: " * 20)
    async with running(queue_config=QueueConfig(ended_kept_max=0, archive=path)) as mesh:
        await mesh.agent("n1", run_seconds=0.0)
        await mesh.submit()
        await mesh.all_ended()
        with pytest.raises(OSError, match="cannot write"):
            await mesh.parts["queue"].service.retention.sweep(time.time())
        assert len(await mesh.records_left("queue/jobs/")) == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--phase", "running"], "must be one of cancelled, failed, succeeded"),
        (["--since", "yesterday"], "must be a date"),
        ([], "not found"),
    ],
)
def test_history_rejects_bad_options_and_missing_archives(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["history", "--archive", str(tmp_path / "none"), *words]) in (1, 2)
    assert told in capsys.readouterr().err


def test_an_archive_file_is_not_taken_for_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        store = await open_store(f"sqlite:{tmp_path / 'cotenant.sqlite'}")
        await store.transact([], [Put("queue/tenants/a", b"")])
        await store.close()
        job = job_pb2.Job(phase=job_pb2.JOB_PHASE_SUCCEEDED, spec=job_pb2.JobSpec(kind=job_pb2.JOB_KIND_CPU))
        await Archive(tmp_path / "archive.sqlite").add([job])

    asyncio.run(fill())
    here = ["--state-dir", str(tmp_path)]
    assert main.run([*here, "backup", str(tmp_path / "b.backup")]) == 0
    assert main.run([*here, "migrate", "--to", f"sqlite:{tmp_path / 'new.db'}"]) == 0
    assert "copied 1 keys from sqlite:" in capsys.readouterr().err
    (tmp_path / "cotenant.sqlite").write_bytes(b"damaged")  # which is reported, not ignored
    assert main.run([*here, "backup", str(tmp_path / "c.backup")]) != 0
    assert "cotenant.sqlite" in capsys.readouterr().err
