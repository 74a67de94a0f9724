from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cotenant.rpc import access
from cotenant.rpc.access import Access, NoAccess
from cotenant.rpc.endpoints import Endpoints

LOCAL = Endpoints.one("127.0.0.1:7070")
OTHER = Endpoints.one("127.0.0.1:8080")
FAR = Endpoints.one("gpu1.example:7070")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose home is empty."""
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def default_dir(env: dict[str, str]) -> Path:
    return access.default_state_dir(env)


def running(state_dir: Path, endpoints: Endpoints = LOCAL) -> str:
    """Make a state directory as `cotenant up` does; return its token."""
    access.publish(state_dir, endpoints)
    return access.ensure_token(state_dir)


def configure(env: dict[str, str], text: str) -> None:
    path = access.default_config(env)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state"
    token = access.ensure_token(state)
    assert len(token) >= 43  # 32 random bytes
    assert access.ensure_token(state) == token == access.read_token(state)
    assert mode(state / "token") == 0o600
    assert mode(state) == 0o700
    assert [path.name for path in state.iterdir()] == ["token"]


def test_two_tokens_differ(tmp_path: Path) -> None:
    assert access.ensure_token(tmp_path / "a") != access.ensure_token(tmp_path / "b")


def test_a_token_that_others_could_read_is_closed(tmp_path: Path) -> None:
    access.ensure_token(tmp_path)
    (tmp_path / "token").chmod(0o644)
    access.ensure_token(tmp_path)
    assert mode(tmp_path / "token") == 0o600


def test_who_begins_at_once_agrees_on_one_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for attempt in range(20):
            assert len(set(pool.map(access.ensure_token, [tmp_path / str(attempt)] * 16))) == 1


def test_a_directory_that_everybody_may_write_is_no_place_for_a_token(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(NoAccess, match="of your own"):
        access.ensure_token(tmp_path)
    assert mode(tmp_path) == 0o777


def test_an_empty_token_is_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    with pytest.raises(NoAccess, match="is empty"):
        access.read_token(tmp_path)


def test_state_cannot_be_kept_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NoAccess, match="cannot keep state"):
        access.ensure_token(tmp_path / "file")


def test_what_is_published_is_found(home: dict[str, str]) -> None:
    endpoints = Endpoints("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "")
    token = running(default_dir(home), endpoints)
    assert access.find(None, home) == Access(endpoints, token)


def test_what_is_withdrawn_is_no_longer_found(home: dict[str, str]) -> None:
    running(default_dir(home))
    access.withdraw(default_dir(home))
    access.withdraw(default_dir(home))
    with pytest.raises(NoAccess, match="cotenant up"):
        access.find(None, home)


def test_where_nothing_runs_the_user_is_told_what_to_do(home: dict[str, str]) -> None:
    with pytest.raises(NoAccess, match=r"nothing runs from .*start it with `cotenant up`, or .* COTENANT_ENDPOINT"):
        access.find(None, home)


def test_nearer_levels_win(home: dict[str, str], tmp_path: Path) -> None:
    running(default_dir(home), OTHER)
    assert access.find(None, home).endpoints == OTHER
    configure(home, 'endpoint = "127.0.0.1:3"')
    assert access.find(None, home).endpoints.queue == "127.0.0.1:3"
    env = home | {"COTENANT_ENDPOINT": "queue=127.0.0.1:2"}
    assert access.find(None, env).endpoints == Endpoints(queue="127.0.0.1:2")
    assert access.find(None, env, endpoint="127.0.0.1:1").endpoints.queue == "127.0.0.1:1"
    running(tmp_path / "flag", LOCAL)
    assert access.find(tmp_path / "flag", env).endpoints == LOCAL
    assert access.find(tmp_path / "flag", env, endpoint="127.0.0.1:1").endpoints.queue == "127.0.0.1:1"


def test_each_level_may_name_a_state_directory(home: dict[str, str], tmp_path: Path) -> None:
    first, second = running(tmp_path / "first"), running(tmp_path / "second", OTHER)
    configure(home, f'state_dir = "{tmp_path}/second"')
    assert access.find(None, home) == Access(OTHER, second)
    env = home | {"COTENANT_STATE_DIR": str(tmp_path / "first")}
    assert access.find(None, env) == Access(LOCAL, first)


def test_the_tokens_levels_are_the_same(home: dict[str, str], tmp_path: Path) -> None:
    kept = running(tmp_path)
    configure(home, 'token = "from-config"')
    assert access.find(None, home, endpoint="far.example:1").token == "from-config"
    env = home | {"COTENANT_TOKEN": "from-env"}
    assert access.find(None, env, endpoint="far.example:1").token == "from-env"
    assert access.find(tmp_path, env).token == kept
    assert access.find(tmp_path, env, token="from-flag").token == "from-flag"


def test_a_token_is_taken_without_the_line_end_that_was_copied_with_it(home: dict[str, str]) -> None:
    env = home | {"COTENANT_ENDPOINT": "127.0.0.1:1"}
    assert access.find(None, env | {"COTENANT_TOKEN": "abc\n"}).token == "abc"
    for token in ("tökén", "a\nb"):
        with pytest.raises(NoAccess, match="cannot be sent"):
            access.find(None, env | {"COTENANT_TOKEN": token})


def test_a_token_of_this_machine_is_not_shown_to_another(home: dict[str, str]) -> None:
    token = running(default_dir(home))
    assert access.find(None, home, endpoint="gpu1.example:7070") == Access(FAR, "")
    assert access.find(None, home, endpoint="127.0.0.1.evil.example:7070").token == ""
    assert access.find(None, home, endpoint="queue=127.0.0.1:1,placement=gpu1.example:2").token == ""
    for address in ("127.0.0.1:8080", "localhost:8080", "[::1]:8080"):
        assert access.find(None, home, endpoint=address).token == token


def test_a_state_directory_that_is_named_is_meant(home: dict[str, str], tmp_path: Path) -> None:
    token = running(tmp_path)
    assert access.find(tmp_path, home, endpoint="gpu1.example:7070") == Access(FAR, token)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("endpoint = ", "is no TOML"),
        ("endpoint = 7070", "endpoint must be a text, not 7070"),
        ('endpoint = "host"', "the endpoint in .*config.toml cannot be read: 'host' is no address"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(home: dict[str, str], text: str, message: str) -> None:
    configure(home, text)
    with pytest.raises(NoAccess, match=message):
        access.find(None, home)


def test_a_configuration_may_say_more_than_access_needs(home: dict[str, str]) -> None:
    configure(home, 'endpoint = "127.0.0.1:1"\n[defaults]\ntenant = "vision"')
    assert access.find(None, home).endpoints.queue == "127.0.0.1:1"


@pytest.mark.parametrize("text", ["", "[]", "7", '{"queue": 7}', '{"queue": "nonsense"}'])
def test_a_damaged_endpoint_file_is_named(home: dict[str, str], text: str) -> None:
    running(default_dir(home))
    (default_dir(home) / "endpoint.json").write_text(text)
    with pytest.raises(NoAccess, match=r"endpoint.json is damaged"):
        access.find(None, home)


def test_defaults_are_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert access.default_state_dir({}) == tmp_path / ".local" / "state" / "cotenant"
    assert access.default_config({}) == tmp_path / ".config" / "cotenant" / "config.toml"
