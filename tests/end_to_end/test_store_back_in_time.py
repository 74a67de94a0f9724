"""A store that lost recent writes is detected and reported, and nothing writes to it; jobs keep running."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.scripts import Counter
from tests.end_to_end.waiting import until
from tests.support.etcd_server import EtcdServer, etcd_tool

from cotenant.core.model.lifecycle import Phase

ONE = ("--cpus", "1")
NAMED_SECONDS_MAX = 30.0

pytestmark = [
    pytest.mark.skipif(etcd_tool("etcdctl") is None, reason="etcdctl is needed to save snapshots"),
    pytest.mark.timeout(400),  # many commands, each a process of its own
]


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    (tmp_path / "mesh").mkdir()
    return Mesh(tmp_path / "mesh")


def problem_of(mesh: Mesh) -> str:
    """Return the store's problem from `status`; "" if there is none."""
    reported = json.loads(mesh.cli("status", "--json", code=1).out)
    return next((one["what"] for one in reported["problems"] if one["where"] == "store"), "")


def waiting(mesh: Mesh, job_id: str) -> str:
    """Submit a job that depends on another job."""
    return mesh.cli.submit(*ONE, "--after", job_id, "--", "true")


def is_trusted(mesh: Mesh) -> bool:
    return bool(mesh.cli.json("status")["well"])


@pytest.mark.deep
def test_an_old_snapshot_under_a_running_mesh_stops_writes_and_can_be_accepted(mesh: Mesh, etcd: EtcdServer) -> None:
    directory = mesh.directory
    mesh.flags = (*mesh.flags, "--store", etcd.url)
    mesh.start()
    try:
        before, after = Counter(directory, "before"), Counter(directory, "after")
        held = mesh.cli.submit(*ONE, *before.command)
        mesh.client.wait_for(held, Phase.RUNNING)
        cancelled = waiting(mesh, held)
        etcd.save_snapshot(directory / "old.snapshot")
        ended = mesh.cli.submit(*ONE, "--", "true")
        mesh.client.wait_for(ended, Phase.SUCCEEDED)
        later = mesh.cli.submit(*ONE, *after.command)
        mesh.client.wait_for(later, Phase.RUNNING)
        mesh.cli("cancel", cancelled)
        waits = waiting(mesh, held)

        etcd.kill()
        etcd.restore_snapshot(directory / "old.snapshot")
        etcd.start()
        problem = until(lambda: problem_of(mesh), "problem in status", seconds=NAMED_SECONDS_MAX)
        assert "has seen revision" in problem or "knows of one with revision" in problem
        refused = mesh.cli("submit", *ONE, "--", "true", code=3)
        assert "nothing is written" in refused.err
        assert "accept-regression" in refused.err
        assert {one["state"] for one in json.loads(mesh.cli("health", "--json", code=1).out)} >= {"not serving"}
        mesh.cli("store", "status", code=1)
        before.wait_for_more()
        after.wait_for_more()

        listed = json.loads(mesh.cli("store", "accept-regression", "--dry-run", "--json", "--store", etcd.url).out)
        reported = {one["job_id"]: one["what"] for one in listed["jobs"]}
        assert reported == dict.fromkeys((later, ended, cancelled, waits), "written_again")
        assert problem_of(mesh)  # nothing has changed
        mesh.cli("store", "accept-regression", "--yes", "--store", etcd.url)
        until(lambda: "up again" in mesh.log.read_text(), "restart of the mesh")

        for job_id, counter in ((held, before), (later, after)):
            assert mesh.client.wait_for(job_id, Phase.RUNNING).attempt.number == 1
            counter.wait_for_more()
            counter.finish()
            mesh.client.wait_for(job_id, Phase.SUCCEEDED)
            counter.assert_one_life()
        assert mesh.client.wait_for(ended, Phase.SUCCEEDED).attempt.number == 1
        mesh.client.wait_for(cancelled, Phase.CANCELLED)
        mesh.client.wait_for(waits, Phase.SUCCEEDED)  # what it waited for has ended
        mesh.cli("store", "status", "--store", etcd.url)
    finally:
        mesh.close()


@pytest.mark.deep
def test_a_mesh_resumes_by_itself_once_the_right_data_is_restored(mesh: Mesh, etcd: EtcdServer) -> None:
    directory = mesh.directory
    mesh.flags = (*mesh.flags, "--store", etcd.url)
    mesh.start()
    try:
        etcd.save_snapshot(directory / "old.snapshot")
        counter = Counter(directory, "runs")
        job_id = mesh.cli.submit(*ONE, *counter.command)
        mesh.client.wait_for(job_id, Phase.RUNNING)
        etcd.kill()
        etcd.keep_data(directory / "right")
        etcd.restore_snapshot(directory / "old.snapshot")
        etcd.start()
        until(lambda: problem_of(mesh), "problem in status", seconds=NAMED_SECONDS_MAX)
        etcd.kill()
        etcd.put_data_back(directory / "right")
        etcd.start()
        until(lambda: "up again" in mesh.log.read_text(), "restart of the mesh")
        assert mesh.client.wait_for(job_id, Phase.RUNNING).attempt.number == 1
        counter.wait_for_more()
        counter.finish()
        mesh.client.wait_for(job_id, Phase.SUCCEEDED)
        counter.assert_one_life()
        assert is_trusted(mesh)
    finally:
        mesh.close()


@pytest.mark.deep
@pytest.mark.parametrize("remembers", ["services", "agents"])
def test_an_old_snapshot_is_detected_after_a_restart_by_any_witness(
    mesh: Mesh, etcd: EtcdServer, remembers: str
) -> None:
    directory = mesh.directory
    mesh.flags = (*mesh.flags, "--store", etcd.url)
    mesh.start()
    try:
        etcd.save_snapshot(directory / "old.snapshot")
        counter = Counter(directory, "runs")
        job_id = mesh.cli.submit(*ONE, *counter.command)
        mesh.client.wait_for(job_id, Phase.RUNNING)
        mesh.kill()
        etcd.kill()
        etcd.restore_snapshot(directory / "old.snapshot")
        etcd.start()
        if remembers == "agents":
            shutil.rmtree(mesh.state_dir / "store-witness")
        refused = mesh.cli("up", *mesh.flags, code=1)
        assert "STORE_REGRESSED" in refused.error
        assert "accept-regression" in refused.err
        counter.wait_for_more()
        mesh.cli("store", "accept-regression", "--yes", "--store", etcd.url)
        mesh.start()
        assert mesh.client.wait_for(job_id, Phase.RUNNING).attempt.number == 1  # its node knows all of it
        counter.wait_for_more()
        counter.finish()
        mesh.client.wait_for(job_id, Phase.SUCCEEDED)
        counter.assert_one_life()
    finally:
        mesh.close()


@pytest.mark.deep
def test_a_store_file_without_its_log_is_rejected_and_running_attempts_are_adopted(mesh: Mesh) -> None:
    directory = mesh.directory
    mesh.start()
    try:
        mesh.stop()  # what is there by now is in the file itself
        mesh.start()
        counter = Counter(directory, "runs")
        job_id = mesh.cli.submit(*ONE, *counter.command)
        mesh.client.wait_for(job_id, Phase.RUNNING)
        lost = [waiting(mesh, job_id) for _ in range(3)]
        mesh.kill()
        (mesh.state_dir / "cotenant.sqlite-wal").unlink()

        refused = mesh.cli("up", code=1)
        assert "STORE_REGRESSED" in refused.error
        assert "write-ahead log" in refused.error
        assert "accept-regression" in refused.err
        mesh.cli("store", "status", code=1)
        listed = json.loads(mesh.cli("store", "accept-regression", "--dry-run", "--json").out)
        assert [(one["job_id"], one["what"]) for one in listed["jobs"]] == [(job_id, "adopted")]
        assert "--yes" in mesh.cli("store", "accept-regression", code=2).err
        mesh.cli("store", "accept-regression", "--yes")
        mesh.start()
        assert is_trusted(mesh)
        assert mesh.client.wait_for(job_id, Phase.RUNNING).attempt.number == 1
        assert not {job.id for job in mesh.client.jobs()} & set(lost)
        counter.wait_for_more()
        counter.finish()
        mesh.client.wait_for(job_id, Phase.SUCCEEDED)
        counter.assert_one_life()
    finally:
        mesh.close()


@pytest.mark.deep
def test_an_older_copy_of_the_file_is_rejected_but_a_backup_is_accepted(mesh: Mesh) -> None:
    mesh.start()
    try:
        mesh.stop()
        mesh.cli("backup", mesh.directory / "b.backup")
        shutil.copy(mesh.state_dir / "cotenant.sqlite", mesh.directory / "old.sqlite")
        mesh.start()
        mesh.cli.submit(*ONE, "--", "true")
        mesh.stop()
        shutil.copy(mesh.directory / "old.sqlite", mesh.state_dir / "cotenant.sqlite")
        assert "STORE_REGRESSED" in mesh.cli("up", code=1).error
        mesh.cli("restore", mesh.directory / "b.backup", "--replace")  # decided by the operator
        mesh.start()
        assert is_trusted(mesh)
    finally:
        mesh.close()
