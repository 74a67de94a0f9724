"""What `cotenant login` keeps, who gets it, and that nothing is kept of a token that the mesh refuses."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.cli.mesh.login import fingerprints
from cotenant.security.certificates import Authority


@pytest.fixture(autouse=True)
def nothing_names_a_mesh(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTENANT_ENDPOINT")
    monkeypatch.delenv("COTENANT_TOKEN")


def test_a_login_is_the_default_until_logout_and_its_token_is_for_its_mesh_only(
    shell: Shell, standin: Standin, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "token").write_text(f"{TOKEN}\n")
    made = shell("login", standin.address, "--token-file", str(home / "token"))
    assert made.out == f"logged in to {standin.address} as ada (user; tenants vision)\n"
    kept = home / "config" / "cotenant" / "login.toml"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    seen = shell("whoami", "--json").json
    assert (seen["endpoint"], seen["endpoint_source"]) == (standin.address, str(kept))
    assert seen["credential"] == f"a token, from {kept}"
    elsewhere = shell("whoami", "--endpoint", standin.address.replace("127.0.0.1", "localhost"))
    assert elsewhere.code != 0
    assert "token" in elsewhere.err
    monkeypatch.setenv("COTENANT_TOKEN", "wrong")
    assert shell("whoami").code != 0
    monkeypatch.delenv("COTENANT_TOKEN")
    assert shell("logout").out == f"logged out; {kept} removed\n"
    assert shell("logout").out == "not logged in\n"
    assert "no services are running" in shell("whoami").err


def test_a_token_that_the_mesh_refuses_is_not_kept(
    shell: Shell, standin: Standin, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("wrong\n"))
    assert shell("login", standin.address).code != 0
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert "the token is empty" in shell("login", standin.address).err
    assert "invalid address" in shell("login", "nowhere:port:", "--token-file", "-").err
    assert not (home / "config").exists()


def test_authorities_are_shown_and_compared_by_their_fingerprint(shell: Shell, standin: Standin, home: Path) -> None:
    authority = Authority(home / "certs")
    authority.create()
    [known] = fingerprints(authority.cert_path.read_text())
    ca = str(authority.cert_path)
    other = shell("login", standin.address, "--token", TOKEN, "--ca", ca, "--fingerprint", "AA:BB")
    assert f"has a certificate with the SHA-256 fingerprint {known}, not AA:BB" in other.err
    plain = shell("login", standin.address, "--token", TOKEN, "--ca", ca)  # the stand-in speaks no TLS
    assert f"trusting the CA certificate with the SHA-256 fingerprint {known}" in plain.err
    assert plain.code != 0
    (home / "no.pem").write_text("nothing")
    assert "has no certificates" in shell("login", standin.address, "--ca", str(home / "no.pem")).err
    assert not (home / "config").exists()
