"""A mesh that cannot start reports why in one sentence, quickly, and does not disturb running jobs."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.commands import TRACEBACK, Cli, Outcome, environment_of
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.scripts import shell
from tests.end_to_end.waiting import until

START_SECONDS_MAX = 30.0
DISK = "size=1m,mode=700"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Cli:
    """The command line with an unused state directory."""
    return Cli(environment_of(tmp_path, COTENANT_STATE_DIR=str(tmp_path / "state")))


def refused_to_start(cli: Cli, *arguments: str | Path, code: int) -> Outcome:
    """Try to start, and check that this fails quickly with one error."""
    return cli(*arguments, code=code, seconds=START_SECONDS_MAX)


def test_an_unknown_policy_suggests_the_nearest(elsewhere: Cli) -> None:
    reported = refused_to_start(elsewhere, "up", "--queue", "fifoo", code=2).error
    assert "'fifoo'; did you mean fifo?" in reported


def test_an_unknown_service_suggests_the_nearest(elsewhere: Cli) -> None:
    reported = refused_to_start(elsewhere, "serve", "placemnt", code=2).error
    assert "did you mean placement" in reported


@pytest.mark.deep
@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("gpus = [", "is not TOML"),
        ("listn = 'x'", "listn: unknown setting; did you mean listen?"),
        ("nodes = 'two'", "nodes: must be a whole number, not 'two'"),
        ("checkpoint_seconds = -1", "checkpoint_seconds: must be 0 or more, not -1"),
        ("queue = 'fifo'\n[options.queue]\nmode = 'sideways'", "sideways"),
    ],
    ids=["not TOML", "unknown", "wrong type", "negative", "an option"],
)
def test_an_invalid_configuration_is_rejected(elsewhere: Cli, tmp_path: Path, text: str, reported: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert reported in refused_to_start(elsewhere, "up", "--config", path, code=2).err


def test_a_missing_configuration_is_rejected(elsewhere: Cli, tmp_path: Path) -> None:
    reported = refused_to_start(elsewhere, "up", "--config", tmp_path / "none.toml", code=2).error
    assert "none.toml: No such file" in reported


@pytest.mark.deep
def test_invalid_gpus_are_rejected(elsewhere: Cli) -> None:
    assert "'auto' or 'fake:N'" in refused_to_start(elsewhere, "up", "--gpus", "fake:lots", code=2).error
    assert "'auto' or 'fake:N'" in refused_to_start(elsewhere, "serve", "agent", "--gpus", "fake:lots", code=2).error


@pytest.mark.deep
def test_a_store_in_use_is_reported_and_its_owner_continues(mesh: Mesh) -> None:
    reported = refused_to_start(mesh.cli, "up", code=1).error
    assert f"{mesh.state_dir / 'cotenant.sqlite'} is open in another process" in reported
    assert mesh.cli("submit", "--cpus", "1", "--wait", *shell("echo still here")).out == "still here\n"


@pytest.mark.deep
def test_a_port_in_use_is_reported(mesh: Mesh, elsewhere: Cli) -> None:
    for arguments in (("up",), ("serve", "queue")):
        reported = refused_to_start(elsewhere, *arguments, "--listen", mesh.address, code=1).error
        assert reported == f"error: cannot listen on {mesh.address}: address already in use"
    assert mesh.cli("jobs").code == 0


@pytest.mark.deep
def test_an_unusable_state_directory_is_reported(elsewhere: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments in (("up",), ("serve", "queue"), ("serve", "agent")):
        reported = refused_to_start(elsewhere, "--state-dir", tmp_path / "file" / "below", *arguments, code=1).error
        assert reported == f"error: cannot keep state in {tmp_path}/file/below: Not a directory"


@pytest.mark.deep
def test_a_world_writable_state_directory_is_rejected(elsewhere: Cli, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "is writable by everybody" in refused_to_start(elsewhere, "--state-dir", shared, "up", code=1).error


@pytest.mark.deep
def test_a_damaged_store_is_reported(elsewhere: Cli, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    (state_dir / "cotenant.sqlite").write_bytes(b"no database" * 1000)
    assert "cotenant.sqlite" in refused_to_start(elsewhere, "up", code=3).error


@pytest.mark.deep
def test_an_unreachable_etcd_exits_with_3(elsewhere: Cli) -> None:
    for arguments in (("up",), ("serve", "queue")):
        reported = refused_to_start(elsewhere, *arguments, "--store", "etcd://127.0.0.1:1", code=3).error
        assert "127.0.0.1:1" in reported


def test_startup_waiting_for_its_store_can_be_interrupted(elsewhere: Cli, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store = f"etcd://127.0.0.1:{mute.getsockname()[1]}"
        starting = elsewhere.start("up", "--gpus", "fake:1", "--store", store, log=tmp_path / "up.log")
        mute.settimeout(START_SECONDS_MAX)
        mute.accept()[0].close()
        assert starting.terminate() == 0
    assert TRACEBACK not in starting.said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A state directory whose nodes have a tiny disk of their own."""
    if os.getuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    nodes = tmp_path / "state" / "nodes"
    nodes.mkdir(parents=True)
    nodes.parent.chmod(0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", nodes], check=False)
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield tmp_path
    subprocess.run(["umount", nodes], check=True)


def test_a_node_with_a_full_disk_takes_no_work_and_reports_it(small_disk: Path) -> None:
    mesh = Mesh(small_disk)
    mesh.start()
    try:
        job_id = mesh.cli("submit", "--cpus", "1", "--", "true").out.split()[0]
        until(lambda: [p["check"] for node in mesh.cli.json("nodes") for p in node["problems"]] == ["disk"], "problem")
        until(lambda: mesh.cli.json("explain", job_id)["job"]["reason"], "reason to wait")
        reported = mesh.cli("nodes")
        assert "MiB are free on the disk" in reported.out + reported.err
    finally:
        mesh.close()
