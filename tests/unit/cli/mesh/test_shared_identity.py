"""A mesh that does not run as root, and people other than who runs it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Shell

from cotenant.cli.flags import Flags
from cotenant.cli.mesh import security_options
from cotenant.cli.mesh.security_options import Guarding, guarding_of
from cotenant.cli.mesh.settings import Settings
from cotenant.cli.mesh.shared_identity import guarded, secret_paths
from cotenant.cli.outcome import CommandError
from cotenant.codec.errors import Problem
from cotenant.node_agent.runtime import run_as
from cotenant.security.identity import OPERATOR, Authenticator
from cotenant.security.subjects import Bearer
from cotenant.security.tokens import TOKENS_FILE, TokenFile

METHOD = "/cotenant.v1.JobService/CreateJob"
EVE = ("tokens", "create", "--name", "eve", "--tenant", "vision")
OIDC = {"oidc": {"issuer": "https://login.example.org", "audience": "cotenant"}}


@pytest.fixture(autouse=True)
def bob(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs this is the user bob, and not root."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(run_as, "user_name", lambda uid: "bob")


def guarding(**sections: dict[str, Any]) -> Guarding:
    return guarding_of(sections, Flags(), insecure=False)


def authenticator(state_dir: Path, **sections: dict[str, Any]) -> Authenticator:
    guards = guarded(guarding(**sections), Settings(), state_dir)
    found = security_options.security_of(guards, state_dir, "cotenant", "mesh").authenticator
    assert found
    return found


def who(by: Authenticator, secret: str) -> str:
    try:
        return by.authenticate(METHOD, [("authorization", f"Bearer {secret}")], dict).name
    except Problem as error:
        return error.reason


def token(state_dir: Path, bearer: str) -> str:
    return TokenFile(state_dir / TOKENS_FILE).create(Bearer.parse(bearer), 0.0)[1]


def test_nobody_but_the_operator_submits(tmp_path: Path) -> None:
    secrets = {bearer: token(tmp_path, bearer) for bearer in (
        "user/eve?tenants=a", "tenant-admin/ann?tenants=a", "operator/joe", "viewer/vic?tenants=a",
        "user/bob?tenants=a", "agent/n1", "service/queue",
    )}  # fmt: skip
    served = authenticator(tmp_path)
    assert {bearer: who(served, secret) for bearer, secret in secrets.items()} == {
        "user/eve?tenants=a": "SHARED_IDENTITY",
        "tenant-admin/ann?tenants=a": "SHARED_IDENTITY",
        "operator/joe": "SHARED_IDENTITY",
        "viewer/vic?tenants=a": "vic",
        "user/bob?tenants=a": "bob",
        "agent/n1": "agent/n1",
        "service/queue": "service/queue",
    }
    assert who(served, "mesh") == OPERATOR.name


def test_the_operator_may_insist_or_name_who_shares_the_identity(tmp_path: Path) -> None:
    eve = token(tmp_path, "user/eve?tenants=a")
    assert who(authenticator(tmp_path, users={"eve": "bob"}), eve) == "eve"
    assert who(authenticator(tmp_path, users={"ann": "bob"}), eve) == "SHARED_IDENTITY"
    assert guarded(guarding(), Settings(shared_identity=True), tmp_path).only_user == ""


def test_root_runs_jobs_as_their_submitters_so_it_takes_everybodys_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert guarded(guarding(**OIDC), Settings(), tmp_path).only_user == ""


@pytest.mark.parametrize("sections", [OIDC, {"bearers": {"spiffe://corp/eve": "user/eve?tenants=a"}}])
def test_settings_that_let_others_in_are_refused_at_the_start(
    tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(
        CommandError, match=r"lets other people submit jobs, and every job .* would run as 'bob'"
    ) as error:
        guarded(guarding(**sections), Settings(), tmp_path)
    assert "--shared-identity" in error.value.hint
    assert guarded(guarding(**sections), Settings(shared_identity=True), tmp_path).only_user == ""
    assert guarded(guarding(**sections, users={"*": "bob"}), Settings(), tmp_path).only_user == "bob"


def test_bearers_who_cannot_submit_need_no_insisting(tmp_path: Path) -> None:
    assert guarded(guarding(bearers={"gpu1.corp": "agent/gpu1"}), Settings(), tmp_path).only_user == "bob"


def test_a_token_for_somebody_else_is_not_made_where_the_mesh_would_not_take_it(shell: Shell, tmp_path: Path) -> None:
    own = ("--state-dir", str(tmp_path))
    guarded(guarding(), Settings(), tmp_path)
    ended = shell(*EVE, *own)
    assert (ended.code, ended.out) == (2, "")
    assert "this mesh takes no tokens of other people: everything here runs as the user 'bob'" in ended.err
    assert "--shared-identity" in ended.err
    assert shell(*EVE, *own, "--shared-identity").code == 0
    assert shell("tokens", "create", *own, "--role", "viewer", "--name", "vic", "--tenant", "a").code == 0
    assert shell("tokens", "create", *own, "--role", "agent", "--name", "n1").code == 0
    guarded(guarding(), Settings(shared_identity=True), tmp_path)
    assert shell(*EVE, *own).code == 0


def test_before_the_mesh_has_run_the_maker_of_a_token_is_warned(shell: Shell, tmp_path: Path) -> None:
    ended = shell(*EVE, "--state-dir", str(tmp_path))
    assert ended.code == 0
    assert "only with --shared-identity" in ended.err


def test_what_is_secret_is_the_state_and_what_lies_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    guards = guarding(tls={"ca": "/ca", "cert": "/cert", "key": "/key"}, audit={"path": "/log/audit"})
    found = secret_paths(replace(Settings(), store="sqlite:/db/mesh"), guards, tmp_path / "state")
    assert {str(path.relative_to(tmp_path)) if tmp_path in path.parents else str(path) for path in found} == {
        "state", "config/cotenant", "state/archive.sqlite", "/key", "/log/audit",
        "/db/mesh", "/db/mesh-wal", "/db/mesh-shm",
    }  # fmt: skip
