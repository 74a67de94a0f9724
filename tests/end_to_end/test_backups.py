"""Running jobs are not affected while their store is migrated, lost and restored."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.scripts import Counter
from tests.support.etcd_server import EtcdServer

from cotenant.core.model.lifecycle import Phase
from cotenant.store.backup_file import Contents, read_file, write_file

ONE = ("--gpus", "1", "--cpus", "1")


@pytest.mark.deep
def test_a_mesh_moves_from_a_file_to_etcd_and_back_to_a_backup(tmp_path: Path, etcd: EtcdServer) -> None:
    (tmp_path / "mesh").mkdir()
    mesh = Mesh(tmp_path / "mesh")
    mesh.start()
    try:
        counter, other = Counter(tmp_path, "held"), Counter(tmp_path, "other")
        held = mesh.cli.submit(*ONE, *counter.command)
        mesh.client.wait_for(held, Phase.RUNNING)
        assert "is open in another process" in mesh.cli("backup", tmp_path / "no.backup", code=1).err
        mesh.stop()

        moved = mesh.cli("migrate", "--to", etcd.url, "--json")
        assert json.loads(moved.out)["keys"] > 3
        assert "holds" in mesh.cli("migrate", "--to", etcd.url, code=1).err  # not twice
        mesh.flags = (*mesh.flags, "--store", etcd.url)
        mesh.start()
        counter.wait_for_more()
        job = mesh.client.wait_for(held, Phase.RUNNING)
        assert job.attempt.number == 1

        later = mesh.cli.submit(*ONE, *other.command)  # epochs go on: the agent obeys
        assert mesh.client.wait_for(later, Phase.RUNNING).attempt.epoch > job.attempt.epoch + 1_000_000

        backup = tmp_path / "b.backup"
        mesh.cli("backup", backup, "--store", etcd.url)  # while all runs
        mesh.stop()
        mesh.cli("restore", backup, "--store", etcd.url, "--replace")
        mesh.start()
        counter.wait_for_more()
        for job_id, one in ((held, counter), (later, other)):
            assert mesh.client.wait_for(job_id, Phase.RUNNING).attempt.number == 1
            one.finish()
            mesh.client.wait_for(job_id, Phase.SUCCEEDED)
            one.assert_one_life()
    finally:
        mesh.close()


@pytest.mark.parametrize("point", ["restore.filling", "restore.filled"])
def test_a_partially_filled_store_is_reported_after_a_power_loss(tmp_path: Path, point: str) -> None:
    (tmp_path / "mesh").mkdir()
    cli = Mesh(tmp_path / "mesh").cli
    backup, store = tmp_path / "b.backup", f"sqlite:{tmp_path / 'filled.sqlite'}"
    write_file(Contents(7, (("queue/tenants/a", b""), ("queue/tenants/b", b""))), backup)
    cli("restore", backup, "--store", store, code=-signal.SIGKILL, COTENANT_FAIL_POINTS=f"{point}=kill")
    assert "in progress or was interrupted" in cli("backup", tmp_path / "no.backup", "--store", store, code=3).error
    cli("restore", backup, "--store", store, "--replace")
    cli("backup", tmp_path / "again.backup", "--store", store)
    assert read_file(tmp_path / "again.backup").entries == read_file(backup).entries


def test_invalid_restores_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "mesh").mkdir()
    cli = Mesh(tmp_path / "mesh").cli
    (tmp_path / "x").write_text("nothing")
    assert "is not a backup" in cli("restore", tmp_path / "x", code=2).error
    assert "No such file" in cli("restore", tmp_path / "y", code=2).error
    assert "no store in" in cli("backup", code=2).error
    assert "invalid store URL" in cli("backup", "--store", "nonsense", code=2).error
