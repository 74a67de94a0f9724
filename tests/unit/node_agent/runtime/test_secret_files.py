"""Where a node keeps the secrets of attempts, and how they look to a job."""

from __future__ import annotations

import marshal
import os
import stat
from pathlib import Path

import pytest

from cotenant.node_agent.runtime import secret_files
from cotenant.node_agent.runtime.secret_files import NO_SECRETS, SecretFiles, open_secret_files
from cotenant.v1.job_pb2 import JobSpec, SecretUse

SPEC = JobSpec(
    secrets=[SecretUse(name="A", variable="TOKEN"), SecretUse(name="B", path="ssh/id"), SecretUse(name="A", path="a")]
)
VALUES = {"A": b"first", "B": b"\0second"}


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_variables_and_files_are_readable_by_their_owner_only_and_go_with_the_attempt(tmp_path: Path) -> None:
    files = SecretFiles(tmp_path / "secrets")
    written = files.write("job-1", SPEC, VALUES, None)
    assert written.environment
    assert written.files
    assert marshal.loads(Path(written.environment).read_bytes()) == {"TOKEN": "first"}
    assert Path(written.files, "ssh", "id").read_bytes() == b"\0second"
    assert [mode(written.environment), mode(written.files), mode(Path(written.files, "a"))] == [0o600, 0o700, 0o400]
    assert files.write("job-1", SPEC, VALUES | {"A": b"again"}, None) == written
    assert Path(written.files, "a").read_bytes() == b"again"
    files.remove("job-1")
    assert os.listdir(tmp_path / "secrets") == []
    assert files.write("job-1", JobSpec(), {}, None) is NO_SECRETS


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_files_belong_to_the_user_of_the_job_and_variables_to_the_agent(tmp_path: Path) -> None:
    written = SecretFiles(tmp_path / "secrets").write("job-1", SPEC, VALUES, (4711, 4712))
    assert written.environment
    assert written.files
    owned = [written.files, f"{written.files}/ssh", f"{written.files}/ssh/id"]
    assert [(os.stat(path).st_uid, os.stat(path).st_gid) for path in owned] == [(4711, 4712)] * 3
    assert os.stat(written.environment).st_uid == 0


def test_a_value_with_a_nul_byte_cannot_be_a_variable(tmp_path: Path) -> None:
    spec = JobSpec(secrets=[SecretUse(name="B", variable="B")])
    with pytest.raises(ValueError, match="the secret B has a NUL byte") as refused:
        SecretFiles(tmp_path / "secrets").write("job-1", spec, VALUES, None)
    assert "second" not in str(refused.value)


def test_secrets_stay_in_their_place_in_memory_whatever_the_record_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, record = tmp_path / "memory", tmp_path / "secrets.path"
    memory.mkdir()
    monkeypatch.setattr(secret_files, "memory_mounts", lambda: [str(memory)])
    found = open_secret_files(tmp_path)
    assert found.root.parent == memory
    assert mode(found.root) == 0o711
    assert open_secret_files(tmp_path).root == found.root
    for damaged in ("/etc", f"relative/{found.root.name}", "", "\0"):
        record.write_text(damaged)
        assert open_secret_files(tmp_path).root.parent == memory
    assert str(found.root) in open_secret_files(tmp_path).places()
    monkeypatch.setattr(secret_files, "memory_mounts", list)
    record.unlink()
    assert open_secret_files(tmp_path).root == tmp_path / "secrets"


def test_a_node_that_ends_leaves_nothing_but_secrets_that_are_in_use(tmp_path: Path) -> None:
    files = SecretFiles(tmp_path / "secrets")
    files.write("job-1", SPEC, VALUES, None)
    files.close()
    assert os.listdir(tmp_path / "secrets") == ["job-1"]
    files.remove("job-1")
    files.close()
    assert os.listdir(tmp_path) == []


def test_places_in_memory_are_found() -> None:
    assert all(os.path.ismount(path) for path in secret_files.memory_mounts())


def test_secrets_are_never_among_control_groups() -> None:
    """Where version 1 is mounted, `/sys/fs/cgroup` is a tmpfs that root may write."""
    assert not [path for path in secret_files.memory_mounts() if path.startswith(("/sys/", "/proc/"))]
