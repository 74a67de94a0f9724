"""Token files: identities, expiry, and damaged files."""

from __future__ import annotations

import stat
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from cotenant.codec.errors import Problem
from cotenant.security.credentials import Credentials
from cotenant.security.identity import OPERATOR, Identity
from cotenant.security.permissions import Role
from cotenant.security.subjects import Subject
from cotenant.security.tokens import BadTokens, TokenFile

EVE = Subject.parse("user/eve?tenants=lab")


def by(credentials: Credentials, token: str, scheme: str = "Bearer") -> Identity:
    return credentials.authenticate("/x/y", (("authorization", f"{scheme} {token}"),), dict)


def reason_of(credentials: Credentials, token: str, scheme: str = "Bearer") -> str:
    with pytest.raises(Problem) as refused:
        by(credentials, token, scheme)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert token not in refused.value.message or len(token) < 3
    return refused.value.reason


def test_a_token_is_stored_as_a_digest_and_recognized(tmp_path: Path) -> None:
    path = tmp_path / "state" / "tokens.json"
    made, secret = TokenFile(path).create(EVE)
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert by(Credentials("mesh", TokenFile(path)), secret) == EVE.identity
    assert by(Credentials("mesh", TokenFile(path)), "mesh") == OPERATOR
    assert TokenFile(path).tokens() == [made]


def test_changes_of_the_file_take_effect_at_once(tmp_path: Path) -> None:
    path, now = tmp_path / "tokens.json", [0.0]
    served = Credentials("", TokenFile(path, clock=lambda: now[0]))
    assert reason_of(served, "cotenant_none") == "TOKEN_WRONG"
    _, secret = TokenFile(path).create(EVE)
    now[0] += 1
    assert by(served, secret).name == "eve"
    assert [one.subject for one in TokenFile(path).revoke("eve")] == [EVE]
    now[0] += 1
    assert reason_of(served, secret) == "TOKEN_WRONG"


def test_a_token_expires(tmp_path: Path) -> None:
    now = [1000.0]
    file = TokenFile(tmp_path / "tokens.json", now=lambda: now[0])
    _, secret = file.create(EVE, expires=1010.0)
    credentials = Credentials("", file)
    assert by(credentials, secret).name == "eve"
    now[0] = 1010.0
    assert reason_of(credentials, secret) == "TOKEN_EXPIRED"


def test_the_expiry_of_a_used_token_is_logged_once_a_day(tmp_path: Path) -> None:
    day, now, clock = 86_400.0, [0.0], [0.0]
    file = TokenFile(tmp_path / "tokens.json", now=lambda: now[0], clock=lambda: clock[0])
    endless, (_, secret) = file.create(Subject.parse("user/ann?tenants=lab"))[1], file.create(EVE, expires=365 * day)

    def told_on(days: float) -> list[str]:
        now[0] = clock[0] = days * day
        with capture_logs() as logs:
            for one in (endless, secret, secret):
                file.find(one)
        return [f"{entry['event']} {entry['subject']} {entry['told']}" for entry in logs]

    assert told_on(1) == told_on(334) == []
    assert told_on(336) == ["token_expires_soon user/eve expires in 29 days"]
    assert told_on(336.5) == []
    assert told_on(337.1) == ["token_expires_soon user/eve expires in 27 days"]


@pytest.mark.parametrize("expires", [1e12, float("inf"), float("nan")])
def test_a_token_with_an_invalid_expiry_is_refused(tmp_path: Path, expires: float) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    with pytest.raises(BadTokens, match="after the year 9999"):
        file.create(EVE, expires)
    assert file.tokens() == []


@pytest.mark.parametrize("times", ['"created": 1, "expires": 1e300', '"created": NaN, "expires": 0'])
def test_a_file_with_invalid_times_is_damaged(tmp_path: Path, times: str) -> None:
    (tmp_path / "tokens.json").write_text(
        f'{{"tokens": [{{"id": "a", "role": "user", "name": "eve", "tenants": "lab", "sha256": "b", {times}}}]}}'
    )
    with pytest.raises(BadTokens, match="damaged"):
        TokenFile(tmp_path / "tokens.json").tokens()


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"tokens": 7}', '{"tokens": [{"role": "god"}]}', "[" * 50])
def test_a_damaged_file_is_logged_and_admits_no_new_caller(tmp_path: Path, damage: str) -> None:
    path, now = tmp_path / "tokens.json", [0.0]
    _, secret = TokenFile(path).create(EVE)
    served = Credentials("", TokenFile(path, clock=lambda: now[0]))
    assert by(served, secret).name == "eve"
    path.write_text(damage)
    now[0] += 1
    assert by(served, secret).name == "eve"  # known tokens stay valid until the file changes
    assert reason_of(served, "cotenant_guess") == "TOKEN_WRONG"
    with pytest.raises(BadTokens, match="damaged"):
        TokenFile(path).tokens()


@pytest.mark.parametrize("token", ["", "x" * 9000, "cotenant_", "a.b.c", "\x00", "ü" * 50, "Bearer x"])
def test_malformed_tokens_are_unknown(tmp_path: Path, token: str) -> None:
    assert reason_of(Credentials("mesh", TokenFile(tmp_path / "none.json")), token) == "TOKEN_WRONG"


def test_tokens_created_concurrently_are_all_stored(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(lambda n: TokenFile(tmp_path / "t.json").create(Subject(Role.OPERATOR, f"o{n}", None)), range(24))
        )
    assert len(TokenFile(tmp_path / "t.json").tokens()) == 24
