"""A mesh run by an unprivileged user: its jobs cannot reach the mesh, and other users cannot submit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end import remains
from tests.end_to_end.commands import COTENANT, SECONDS_MAX, Serving, environment_of
from tests.end_to_end.waiting import until
from tests.support.images import layer_of_directory, make_root, write_layout
from tests.support.unprivileged import AS_USER, USER, need_another_user

pytestmark = pytest.mark.root


class OwnMesh:
    """`cotenant up` of a user, and the commands of that user."""

    def __init__(self, home: Path) -> None:
        self.home, self.state = home, home / "state"
        self.environment = environment_of(home, COTENANT_STATE_DIR=str(self.state))
        self.serving = Serving([*AS_USER, COTENANT, "up", "--gpus", "fake:1"], self.environment, home.parent / "up.log")

    def __call__(self, *words: str, code: int = 0, **more: str) -> str:
        """Run a command and return its output."""
        ended = subprocess.run(
            [*AS_USER, COTENANT, *words],
            cwd=self.home,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == code, said
        return said


@pytest.fixture
def mesh() -> Iterator[OwnMesh]:
    need_another_user()
    place = Path(tempfile.mkdtemp(prefix="cotenant-test-"))
    place.chmod(0o755)
    home = place / "home"
    home.mkdir()
    os.chown(home, USER, USER)
    mesh = OwnMesh(home)
    try:
        mesh.serving.wait_for_output("the mesh is up")
        yield mesh
    finally:
        mesh.serving.terminate()
        remains.end(remains.processes_of(place))
        shutil.rmtree(place)


def test_a_job_neither_reads_the_token_nor_ends_the_mesh(mesh: OwnMesh) -> None:
    if "cannot be used here" in mesh.serving.said:
        pytest.skip("no user namespaces can be made here")
    secret = (mesh.state / "token").read_text().strip()
    assert "No such file" in mesh("submit", "--wait", "--", "cat", str(mesh.state / "token"), code=1)
    everything = "kill -9 -1; kill -9 $PPID; for pid in $(seq 2 100000); do kill -9 $pid; done 2>/dev/null; exit 0"
    mesh("submit", "--wait", "--", "sh", "-c", f"({everything})", code=1)  # it kills itself and fails
    assert not mesh.serving.ended()
    said = mesh("submit", "--wait", "--", "sh", "-c", "id -u; env")
    assert str(USER) in said
    assert secret not in said
    assert str(mesh.home / ".venv") not in said
    assert_a_session_is_as_isolated_as_its_job(mesh)
    assert f"every job runs as '{USER}', the agent's user: namespaces isolate" in mesh("status")
    assert f"not enforced: every job runs as '{USER}'" in mesh("nodes")


def assert_a_session_is_as_isolated_as_its_job(mesh: OwnMesh) -> None:
    job = mesh("submit", "--", "sleep", "1000").strip()
    until(lambda: "running" in mesh("jobs"), "the job")
    script = f"cat {mesh.state / 'token'} 2>&1; id -u; grep -h Name /proc/[0-9]*/status; sleep 1000 & exit 0"
    said = mesh("exec", job, "--", "sh", "-c", script)
    assert "No such file" in said
    assert str(USER) in said.splitlines()
    assert "sleep" in said
    assert "Name:\tcotenant" not in said
    mesh("cancel", job)


@pytest.mark.deep
def test_other_users_cannot_submit(mesh: OwnMesh) -> None:
    said = mesh("tokens", "create", "--name", "eve", "--tenant", "default", code=2)
    assert "this mesh does not accept tokens of other users" in said
    made = mesh("tokens", "create", "--name", "eve", "--tenant", "default", "--shared-identity").splitlines()
    (token,) = [line for line in made if line.startswith("cotenant_")]
    said = mesh("submit", "--", "true", code=1, COTENANT_TOKEN=token)
    assert f"all jobs here run as the user '{USER}', so jobs of 'eve' could read and change" in said
    assert "--shared-identity" in said
    (note,) = [line for line in mesh("tokens").splitlines() if "eve" in line]
    assert "user" in note


@pytest.mark.deep
def test_its_jobs_run_in_containers_without_root(mesh: OwnMesh) -> None:
    (node,) = json.loads(mesh("nodes", "--json"))
    if node["container_runtime"] != "rootless":
        pytest.skip("no image can be mounted without root here")
    image = make_root(mesh.home / "image")
    layout = write_layout(mesh.home / "layout", [layer_of_directory(image)], config={"Env": ["COLOR=blue"]})
    own_folder(mesh)
    seen = (
        "cat note; pwd; id -u; ls /; env; grep -E 'CapEff|NoNew' /proc/self/status; echo x > /etc/issue; echo x > made"
    )
    said = mesh("submit", "--cpus", "1", "--image", f"oci:{layout}", "--wait", "--", "sh", "-c", seen)
    assert {"mine", str(mesh.home), str(USER), "COLOR=blue", "NoNewPrivs:\t1"} <= set(said.splitlines())
    assert "CapEff:\t0000000000000000" in said
    assert not {"usr", "root"} & set(said.splitlines())
    assert (mesh.home / "made").read_text() == "x\n"
    assert (image / "etc/issue").read_text() == "made for a test\n"
    hidden = ("cat", str(mesh.state / "token"))
    assert "No such file" in mesh("submit", "--image", f"dir:{image}", "--wait", "--", *hidden, code=1)
    assert_ends_are_told(mesh, f"dir:{image}")
    assert_a_warning_a_mount_and_a_session_work(mesh, f"dir:{image}")


def own_folder(mesh: OwnMesh) -> None:
    (mesh.home / "note").write_text("mine\n")
    (mesh.home / "data").mkdir()
    (mesh.home / "data/f").write_text("content\n")
    for path in (mesh.home, *mesh.home.rglob("*")):
        if mesh.state not in (path, *path.parents):
            os.chown(path, USER, USER, follow_symlinks=False)


def assert_ends_are_told(mesh: OwnMesh, image: str) -> None:
    words = ("submit", "--cpus", "1", "--image", image, "--wait", "--")
    assert "ended with status 3" in mesh(*words, "sh", "-c", "exit 3", code=1)
    assert "was ended by signal 9" in mesh(*words, "sh", "-c", "kill -9 $$", code=1)
    assert "command not found in the image: no-such" in mesh(*words, "no-such", code=1)
    missing = mesh("submit", "--cpus", "1", "--image", "dir:/no/such", "--wait", "--", "true", code=1)
    assert "the image /no/such cannot be opened: No such file or directory" in missing


def assert_a_warning_a_mount_and_a_session_work(mesh: OwnMesh, image: str) -> None:
    script = "trap 'echo warned; exit 0' TERM; cat /data/f; echo here > /tmp/mark; echo y > /data/g; "
    script += "while :; do sleep 0.1; done"
    job = mesh(
        "submit", "--cpus", "1", "--image", image, "--mount", f"{mesh.home}/data:/data:ro", "--", "sh", "-c", script
    ).strip()
    until(lambda: "Read-only file system" in mesh("logs", job), "the job")
    assert mesh("exec", job, "--", "sh", "-c", "cat /tmp/mark; pwd; ls /").startswith(f"here\n{mesh.home}\nbin\n")
    mesh("cancel", job)
    until(lambda: "warned" in mesh("logs", job), "the end of the job")
    assert "content" in mesh("logs", job)
