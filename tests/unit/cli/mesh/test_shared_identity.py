"""A mesh that does not run as root, and submitters other than its operator."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Shell

from cotenant.cli.flags import Flags
from cotenant.cli.mesh import security_options
from cotenant.cli.mesh.security_options import SecuritySettings, read_security_settings
from cotenant.cli.mesh.settings import Settings
from cotenant.cli.mesh.shared_identity import restrict_submitters, secret_paths
from cotenant.cli.outcome import CommandError
from cotenant.codec.errors import Problem
from cotenant.node_agent.runtime import run_as
from cotenant.security.identity import OPERATOR, Authenticator
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TOKENS_FILE, TokenFile

METHOD = "/cotenant.v1.JobService/CreateJob"
EVE = ("tokens", "create", "--name", "eve", "--tenant", "vision")
OIDC = {"oidc": {"issuer": "https://login.example.org", "audience": "cotenant"}}


@pytest.fixture(autouse=True)
def bob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the user bob, not as root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(run_as, "user_name", lambda uid: "bob")


def security_settings(**sections: dict[str, Any]) -> SecuritySettings:
    return read_security_settings(sections, Flags(), insecure=False)


def authenticator(state_dir: Path, **sections: dict[str, Any]) -> Authenticator:
    guards = restrict_submitters(security_settings(**sections), Settings(), state_dir)
    found = security_options.make_security(guards, state_dir, "cotenant", "mesh").authenticator
    assert found
    return found


def who(by: Authenticator, secret: str) -> str:
    try:
        return by.authenticate(METHOD, [("authorization", f"Bearer {secret}")], dict).name
    except Problem as error:
        return error.reason


def token(state_dir: Path, subject: str) -> str:
    return TokenFile(state_dir / TOKENS_FILE).create(Subject.parse(subject), 0.0)[1]


def test_only_the_operator_submits(tmp_path: Path) -> None:
    secrets = {subject: token(tmp_path, subject) for subject in (
        "user/eve?tenants=a", "tenant-admin/ann?tenants=a", "operator/joe", "viewer/vic?tenants=a",
        "user/bob?tenants=a", "agent/n1", "service/queue",
    )}  # fmt: skip
    served = authenticator(tmp_path)
    assert {subject: who(served, secret) for subject, secret in secrets.items()} == {
        "user/eve?tenants=a": "SHARED_IDENTITY",
        "tenant-admin/ann?tenants=a": "SHARED_IDENTITY",
        "operator/joe": "SHARED_IDENTITY",
        "viewer/vic?tenants=a": "vic",
        "user/bob?tenants=a": "bob",
        "agent/n1": "agent/n1",
        "service/queue": "service/queue",
    }
    assert who(served, "mesh") == OPERATOR.name


def test_the_operator_may_share_the_identity_or_map_users(tmp_path: Path) -> None:
    eve = token(tmp_path, "user/eve?tenants=a")
    assert who(authenticator(tmp_path, users={"eve": "bob"}), eve) == "eve"
    assert who(authenticator(tmp_path, users={"ann": "bob"}), eve) == "SHARED_IDENTITY"
    assert restrict_submitters(security_settings(), Settings(shared_identity=True), tmp_path).only_user == ""


def test_a_root_mesh_accepts_tokens_of_all_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert restrict_submitters(security_settings(**OIDC), Settings(), tmp_path).only_user == ""


@pytest.mark.parametrize("sections", [OIDC, {"bearers": {"spiffe://corp/eve": "user/eve?tenants=a"}}])
def test_settings_that_admit_other_submitters_are_rejected_at_startup(
    tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(
        CommandError, match=r"lets other users submit jobs, but every job .* would run as its operator 'bob'"
    ) as error:
        restrict_submitters(security_settings(**sections), Settings(), tmp_path)
    assert "--shared-identity" in error.value.hint
    assert restrict_submitters(security_settings(**sections), Settings(shared_identity=True), tmp_path).only_user == ""
    assert (
        restrict_submitters(security_settings(**sections, users={"*": "bob"}), Settings(), tmp_path).only_user == "bob"
    )


def test_subjects_that_cannot_submit_need_no_shared_identity(tmp_path: Path) -> None:
    assert (
        restrict_submitters(security_settings(bearers={"gpu1.corp": "agent/gpu1"}), Settings(), tmp_path).only_user
        == "bob"
    )


def test_a_token_that_the_mesh_would_reject_is_not_created(shell: Shell, tmp_path: Path) -> None:
    own = ("--state-dir", str(tmp_path))
    restrict_submitters(security_settings(), Settings(), tmp_path)
    ended = shell(*EVE, *own)
    assert (ended.code, ended.out) == (2, "")
    assert "this mesh does not accept tokens of other users: all jobs here run as the user 'bob'" in ended.err
    assert "--shared-identity" in ended.err
    assert shell(*EVE, *own, "--shared-identity").code == 0
    assert shell("tokens", "create", *own, "--role", "viewer", "--name", "vic", "--tenant", "a").code == 0
    assert shell("tokens", "create", *own, "--role", "agent", "--name", "n1").code == 0
    restrict_submitters(security_settings(), Settings(shared_identity=True), tmp_path)
    assert shell(*EVE, *own).code == 0


def test_creating_a_token_before_the_first_run_warns(shell: Shell, tmp_path: Path) -> None:
    ended = shell(*EVE, "--state-dir", str(tmp_path))
    assert ended.code == 0
    assert "only with --shared-identity" in ended.err


def test_secret_paths_are_the_state_and_files_stored_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    guards = security_settings(tls={"ca": "/ca", "cert": "/cert", "key": "/key"}, audit={"path": "/log/audit"})
    found = secret_paths(replace(Settings(), store="sqlite:/db/mesh"), guards, tmp_path / "state")
    assert {str(path.relative_to(tmp_path)) if tmp_path in path.parents else str(path) for path in found} == {
        "state", "config/cotenant", "state/archive.sqlite", "/key", "/log/audit",
        "/db/mesh", "/db/mesh-wal", "/db/mesh-shm",
    }  # fmt: skip
