"""What accepting an older store restores when records or node files are large or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verification.fuzz.records import good

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.cli.mesh.store_losses import found_on_nodes, plan
from cotenant.storage.v1 import records_pb2
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put
from cotenant.store.regression_acceptance import accept
from cotenant.store.schema import NewerSchema
from cotenant.store.spec_parts import SpecStore
from cotenant.v1 import job_pb2

KEY = "queue/jobs/x"


def large_job() -> records_pb2.StoredJob:
    stored = records_pb2.StoredJob.FromString(good("job"))
    stored.job.spec.command[:] = ["sh", "-c", "x" * 20_000]
    return stored


def assigned(state_dir: Path, **changes: int) -> None:
    attempt = records_pb2.StoredAttempt.FromString(good("attempt"))
    reported = agent_pb2.Assignment(
        job_id="x", number=2, allocation=attempt.attempt.allocations[0], spec=attempt.spec, world_size=1
    )
    for name, value in changes.items():
        setattr(reported.allocation.tasks[0], name, value)
    directory = state_dir / "nodes" / "n" / "attempts" / "x-2"
    directory.mkdir(parents=True)
    (directory / "assignment").write_bytes(reported.SerializeToString())


async def test_a_job_with_a_large_spec_keeps_its_command_when_written_back(tmp_path: Path) -> None:
    raw, stored = MemoryStore(), large_job()
    await SpecStore(raw).transact([], [Put(KEY, stored.SerializeToString())])
    stored.job.phase = job_pb2.JOB_PHASE_SUCCEEDED
    planned = plan((await raw.list("")).entries, found_on_nodes(tmp_path), {"x": stored.job})
    await accept(raw, [], planned.changes)
    entry = await SpecStore(raw).get(KEY)
    assert entry
    assert list(records_pb2.StoredJob.FromString(entry.value).job.spec.command) == list(stored.job.spec.command)


@pytest.mark.parametrize("damaged", [b"\xff\xff", b"", b"\x08\x01\x12\x03\x0a\x01x"])
async def test_a_damaged_record_counts_as_missing_and_is_written_back(tmp_path: Path, damaged: bytes) -> None:
    raw = MemoryStore()
    await raw.transact([], [Put(KEY, damaged), Put("placement/attempts/x", damaged)])
    assigned(tmp_path)
    planned = plan((await raw.list("")).entries, found_on_nodes(tmp_path))
    assert [(one.job_id, one.what) for one in planned.losses] == [("x", "adopted")]
    await accept(raw, [], planned.changes)
    for key, kind in ((KEY, records_pb2.StoredJob), ("placement/attempts/x", records_pb2.StoredAttempt)):
        entry = await raw.get(key)
        assert entry
        kind.FromString(entry.value)


async def test_a_damaged_record_without_another_source_does_not_block_acceptance() -> None:
    raw = MemoryStore()
    await raw.transact([], [Put("placement/attempts/x", b"\xff\xff")])
    await accept(raw, [])
    entry = await raw.get("placement/attempts/x")
    assert entry
    assert entry.value == b"\xff\xff"


def test_an_assignment_that_no_service_could_load_is_not_adopted(tmp_path: Path) -> None:
    assigned(tmp_path, memory_bytes=2**63 - 1)
    assert not found_on_nodes(tmp_path).parts


def test_a_kept_directory_with_an_odd_number_is_skipped(tmp_path: Path) -> None:
    for name in ("x-\u00b2", "x-7"):
        (tmp_path / "nodes" / "n" / "kept" / name).mkdir(parents=True)
    assert found_on_nodes(tmp_path).over == {("x", 7)}


async def test_a_record_of_a_newer_version_is_not_written_over() -> None:
    raw, stored = MemoryStore(), large_job()
    stored.schema_version = 9
    await raw.transact([], [Put(KEY, stored.SerializeToString())])
    entries = (await raw.list("")).entries
    with pytest.raises(NewerSchema, match="queue/jobs/x has schema 9"):
        plan(entries, found_on_nodes(Path("/none")))
