"""A mesh run by an unprivileged user: its jobs cannot reach the mesh, and other users cannot submit."""

from __future__ import annotations

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
