from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Shell
from tests.unit.cli.standin import TOKEN, Standin

from cotenant.leadership.process_service import ProcessServicer
from cotenant.security.identity import ANYONE, Identity, set_caller
from cotenant.security.permissions import Role
from cotenant.security.subjects import Subject
from cotenant.security.tokens import TokenFile
from cotenant.v1 import process_service_pb2 as pb


def test_whoami_says_who_and_whence(shell: Shell, standin: Standin) -> None:
    told = shell("whoami", "--endpoint", standin.address, "--token", TOKEN)
    assert [line.split(maxsplit=1) for line in told.out.splitlines()][:4] == [
        ["name", "ada"],
        ["roles", "user"],
        ["tenants", "vision"],
        ["mesh", f"{standin.address}, from the command line"],
    ]
    assert "a token, from the command line" in told.out
    assert "never, or unknown" in told.out


def test_whoami_is_printed_as_json(
    shell: Shell, standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("COTENANT_ENDPOINT", standin.address)
    monkeypatch.delenv("COTENANT_TOKEN", raising=False)
    standin.replicas.caller = pb.GetCallerResponse(name="operator", roles=["operator"], all_tenants=True)
    standin.replicas.caller.expire_time.FromSeconds(1_900_000_000)
    assert shell("whoami", "--state-dir", str(tmp_path), "--endpoint", standin.address, "--json").json == {
        "name": "operator",
        "roles": ["operator"],
        "tenants": None,
        "endpoint": standin.address,
        "endpoint_source": "the command line",
        "credential": f"the mesh's own token, from {tmp_path / 'token'}",
        "expire_time": 1_900_000_000.0,
    }


async def test_the_answer_has_the_identity_of_the_call(tmp_path: Path) -> None:
    servicer: Any = object.__new__(ProcessServicer)
    set_caller(Identity("eve", frozenset({Role.USER}), frozenset({"lab"}), expires_seconds=12.5))
    answer = await servicer.GetCaller(pb.GetCallerRequest(), None)
    assert (answer.name, list(answer.roles), list(answer.tenants), answer.all_tenants) == (
        "eve",
        ["user"],
        ["lab"],
        False,
    )
    assert answer.expire_time.ToMilliseconds() == 12_500
    set_caller(ANYONE)
    answer = await servicer.GetCaller(pb.GetCallerRequest(), None)
    assert (answer.all_tenants, list(answer.tenants), answer.HasField("expire_time")) == (True, [], False)


def test_the_identity_of_a_token_has_its_expiry(tmp_path: Path) -> None:
    tokens = TokenFile(tmp_path / "tokens")
    _, secret = tokens.create(Subject(Role.USER, "eve", frozenset({"lab"})), expires=4e9)
    found = tokens.find(secret)
    assert found is not None
    assert found.expires_seconds == 4e9
