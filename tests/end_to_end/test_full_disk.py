"""A job that fills the store's disk is stopped with a reason, and the mesh continues."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until

from cotenant.core.model.lifecycle import Phase

SIZE_MIB = 700  # more than the 512 MiB that a node short of space needs before it takes new jobs


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Mesh]:
    """A mesh whose store and job directories are on a small file system."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    mesh = Mesh(disk)
    try:
        mesh.start()
        yield mesh
        mesh.close()
    finally:
        mesh.kill()
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.deep
@pytest.mark.root
def test_filling_a_working_directory_ends_only_that_job_and_the_store_survives(small: Mesh) -> None:
    before = small.cli.submit("--cpus", "1", "--", "sleep", "300")
    small.client.wait_for(before, Phase.RUNNING)
    greedy = small.cli.submit(
        "--empty-workdir", "--cpus", "1", "--", "sh", "-c", "dd if=/dev/zero of=full bs=1M; sleep 300"
    )
    until(lambda: small.client.job(greedy).attempt.HasField("failure"), "the end of its first attempt")
    first = small.client.job(greedy)
    assert "disk reserve used: only " in first.attempt.message
    assert (first.attempt.failure.failure_class, first.failures) == ("disk_full", 0), "no limit of its own was named"
    small.cli("cancel", greedy)

    def submitted() -> str:
        with suppress(AssertionError):  # refused until the space of the cancelled job is free
            return small.cli.submit("--cpus", "1", "--", "true")
        return ""

    after = until(submitted, "admission", seconds=60.0)
    small.client.wait_for(after, Phase.SUCCEEDED, seconds=60.0)
    assert small.client.phase(before) is Phase.RUNNING
    small.kill()
    small.start()
    assert {job.id for job in small.client.jobs()} == {before, greedy, after}
