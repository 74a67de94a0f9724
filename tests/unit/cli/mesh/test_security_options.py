"""`cotenant tokens`, `certs` and `audit`, and the security settings of `serve` and `up`."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Shell

from cotenant.cli.flags import Flags
from cotenant.cli.mesh import serve
from cotenant.cli.mesh.security_options import check_listen, read_security_settings
from cotenant.cli.mesh.settings import read_settings
from cotenant.cli.outcome import CommandError
from cotenant.security import certificates
from cotenant.security.certificates import Authority
from cotenant.security.subjects import Subject


def test_tokens_are_created_listed_and_revoked(shell: Shell) -> None:
    made = shell("tokens", "create", "--name", "eve", "--tenant", "vision", "--tenant", "speech", "--expires", "90d")
    assert made.code == 0
    assert made.out.startswith("cotenant_")
    assert "shown only once" in made.err
    (listed,) = shell("tokens", "list", "--json").json
    assert (listed["role"], listed["name"], listed["tenants"]) == ("user", "eve", ["speech", "vision"])
    assert made.out.strip() not in shell("tokens").out
    assert "eve" in shell("tokens").out
    assert shell("tokens", "revoke", "eve").code == 0
    assert shell("tokens", "list", "--json").json == []
    assert shell("tokens", "revoke", "eve").code == 2


def test_an_expiring_token_is_marked(shell: Shell, tmp_path: Path) -> None:
    own = ("--state-dir", str(tmp_path))
    shell(*own, "tokens", "create", "--role", "operator", "--name", "ann", "--expires", "90d")
    assert "runs out" not in shell("tokens", "list", *own).out
    before = json.loads((path := tmp_path / "tokens.json").read_text())
    before["tokens"][0]["created"] -= 80 * 86_400
    before["tokens"][0]["expires"] -= 80 * 86_400
    path.write_text(json.dumps(before))
    assert "expires in 9 days" in shell("tokens", "list", *own).out


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (("--name", "eve"), "a user needs tenants"),
        (("--name", "eve", "--role", "god"), "is not ROLE/NAME"),
        (("--name", "operator", "--tenant", "a"), "is reserved for the mesh's own token"),
        (("--name", "eve", "--tenant", "A"), "is not a valid tenant name"),
        (("--name", "eve", "--tenant", "a", "--expires", "soon"), "soon"),
        (("--name", "eve", "--tenant", "a", "--expires", "9000000d"), "at most 100 years"),
    ],
)
def test_an_invalid_token_is_one_clear_error(shell: Shell, arguments: tuple[str, ...], reported: str) -> None:
    ended = shell("tokens", "create", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert reported in ended.err


def test_state_dir_may_precede_or_follow_the_command(shell: Shell, tmp_path: Path) -> None:
    one = str(tmp_path / "elsewhere")
    shell("--state-dir", one, "tokens", "create", "--role", "agent", "--name", "gpu1")
    assert shell("tokens", "list", "--json").json == []
    assert [token["name"] for token in shell("tokens", "list", "--json", "--state-dir", one).json] == ["gpu1"]


def test_certificates_are_issued_listed_and_renewed(shell: Shell, tmp_path: Path) -> None:
    lab = str(tmp_path / "lab")
    assert "`cotenant certs init`" in shell("certs", "issue", "agent/gpu1", "--dir", lab).err
    assert shell("certs", "init", "--dir", lab).code == 0
    assert shell("certs", "issue", "service/queue", "--name", "head.lab", "--dir", lab).code == 0
    assert shell("certs", "issue", "user/eve", "--tenants", "vision", "--days", "30", "--dir", lab).code == 0
    shown = {one["bearer"]: one for one in shell("certs", "show", "--dir", lab, "--json").json}
    assert shown["cotenant://service/queue"]["names"] == ["head.lab", "mesh.cotenant", "localhost", "127.0.0.1"]
    assert "user/eve?tenants=vision" in shell("certs", "show", "--dir", lab).out
    before = (tmp_path / "lab" / "service-queue.pem").read_bytes()
    assert shell("certs", "rotate", "service/queue", "--dir", lab).code == 0
    assert (tmp_path / "lab" / "service-queue.pem").read_bytes() != before
    assert shell("certs", "rotate", "--ca", "--dir", lab).code == 0
    assert (tmp_path / "lab" / "ca.pem").read_text().count("BEGIN") == 2
    assert shell("certs", "rotate", "--forget-old", "--dir", lab).code == 0
    assert (tmp_path / "lab" / "ca.pem").read_text().count("BEGIN") == 1
    assert shell("certs", "rotate", "agent/none", "--dir", lab).code == 2
    assert shell("certs", "init", "--dir", lab).code == 1


def test_only_due_certificates_are_reported_and_renewed(shell: Shell, tmp_path: Path) -> None:
    lab = Authority(tmp_path / "lab")
    lab.create()
    young, old = (lab.issue(Subject.parse(f"agent/{name}"), days=365) for name in ("young", "old"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "BACKDATED", timedelta(days=340))
        lab.issue(Subject.parse("agent/old"), days=20)
    shown = shell("certs", "show", "--dir", str(lab.directory))
    assert [line.split()[-1] for line in shown.out.splitlines()[1:]] == ["valid", "due", "valid"]
    assert "1 certificate due: run `cotenant certs rotate --due`" in shown.err
    kept, replaced = before(lab, "young"), before(lab, "old")
    assert "agent-old.pem, valid until" in shell("certs", "rotate", "--due", "--dir", str(lab.directory)).err
    assert (young.path.read_bytes() == kept, old.path.read_bytes() == replaced) == (True, False)
    assert "no certificate is due" in shell("certs", "rotate", "--due", "--dir", str(lab.directory)).err


def before(lab: Authority, name: str) -> bytes:
    return (lab.directory / f"agent-{name}.pem").read_bytes()


def test_an_unknown_subject_renews_nothing(shell: Shell, tmp_path: Path) -> None:
    lab = Authority(tmp_path / "lab")
    lab.create()
    lab.issue(Subject.parse("agent/a"))
    kept = before(lab, "a")
    ended = shell("certs", "rotate", "--ca", "agent/a", "agent/b", "--dir", str(lab.directory))
    assert (ended.code, "no certificate for agent/b" in ended.err) == (2, True)
    assert (before(lab, "a"), lab.cert_path.read_text().count("BEGIN")) == (kept, 1)


DENIED = {"answer": "PERMISSION_DENIED", "reason": "ROLE_MAY_NOT"}


def test_the_audit_log_is_filtered(shell: Shell, tmp_path: Path) -> None:
    state = tmp_path / "state" / "cotenant"
    assert "audit.jsonl not found" in shell("audit").err
    state.mkdir(parents=True)
    lines = [
        {"time": "2026-01-01T10:00:00+00:00", "who": "eve", "what": "CreateJob", "on": {"id": "0a"}, "answer": "OK"},
        {"time": "2026-01-01T11:00:00+00:00", "who": "ann", "what": "DrainNode", "on": {"id": "n1"}, **DENIED},
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)) + '\n{"cut'
    (state / "audit.jsonl").write_text(text)
    assert shell("audit", "--json").json == lines
    assert shell("audit", "--who", "eve", "--json").json == lines[:1]
    assert shell("audit", "--on", "n1", "--json").json == lines[1:]
    assert shell("audit", "--refused", "--json").json == lines[1:]
    assert shell("audit", "--since", "1h", "--json").json == []
    assert "ROLE_MAY_NOT" in shell("audit").out


def test_all_mistakes_in_the_sections_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('tls = 1\n[limits]\nstreams = -1\ncalls = 2\n[users]\neve = 7\n[audit]\nreads = "yes"\n')
    with pytest.raises(CommandError) as wrong:
        read_settings(path)
    assert [detail.partition(":")[0] for detail in wrong.value.details] == [
        "tls", "limits.streams", "limits.calls", "audit.reads", "users.eve",
    ]  # fmt: skip


def test_flags_override_the_environment_which_overrides_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"tls": {"ca": "file", "cert": "file", "key": "file", "clients": False}}
    assert read_security_settings(said, Flags(), insecure=False).tls.ca == "file"
    monkeypatch.setenv("COTENANT_TLS_CA", "env")
    assert read_security_settings(said, Flags(), insecure=False).tls.ca == "env"
    reported = read_security_settings(said, Flags(tls_ca="flag"), insecure=False)
    assert (reported.tls.ca, reported.tls.cert, reported.tls.clients, reported.mutual) == ("flag", "", False, False)


def test_serving_other_machines_needs_tls_or_insecure() -> None:
    plain, open_to_all = (
        read_security_settings(None, Flags(), insecure=False),
        read_security_settings(None, Flags(), insecure=True),
    )
    tls = read_security_settings({"tls": {"ca": "x"}}, Flags(), insecure=False)
    for listen in ("0.0.0.0:7070", "[::]:7070", "10.0.0.5:0", "head:7070", "127.evil.example:1"):
        with pytest.raises(CommandError, match="is reachable from other machines"):
            check_listen(listen, plain)
        check_listen(listen, open_to_all)
        check_listen(listen, tls)
    for listen in ("127.0.0.1:0", "127.0.0.2:7070", "localhost:0", "[::1]:0"):
        check_listen(listen, plain)


@pytest.mark.parametrize("service", ["queue", "placement", "predictor", "contention"])
def test_serve_rejects_a_public_address_without_tls(shell: Shell, service: str) -> None:
    ended = shell("serve", service, "--listen", "0.0.0.0:0")
    assert ended.code == 2
    assert "--insecure" in ended.err


def test_client_certificates_are_validated_first(shell: Shell, tmp_path: Path) -> None:
    ended = shell("jobs", "--endpoint", "127.0.0.1:1", "--tls-ca", str(tmp_path / "none.pem"))
    assert ended.code == 2
    assert "TLS_FILE_UNREADABLE" in ended.err
    alone = shell("jobs", "--endpoint", "127.0.0.1:1", "--tls-cert", "x")
    assert "--tls-ca" in alone.err


@pytest.mark.parametrize("service", ["queue", "placement", "predictor", "contention"])
def test_the_state_directory_is_created_for_a_store_file(tmp_path: Path, service: str) -> None:
    """With certificates no token is created there."""
    state_dir = tmp_path / "new" / "state"
    assert serve._store_url("sqlite", state_dir, service) == f"sqlite:{state_dir}/{service}.sqlite"
    assert state_dir.stat().st_mode & 0o777 == 0o700
    serve._store_url("etcd://a:1", tmp_path / "other", service)
    serve._store_url("sqlite", tmp_path / "other", "agent")  # whose directory others may have to pass through
    assert not (tmp_path / "other").exists()
