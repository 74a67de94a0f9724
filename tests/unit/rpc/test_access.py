from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cotenant.rpc import access
from cotenant.rpc.access import Access, AccessError
from cotenant.rpc.endpoints import Endpoints

LOCAL = Endpoints.one("127.0.0.1:7070")
OTHER = Endpoints.one("127.0.0.1:8080")
FAR = Endpoints.one("gpu1.example:7070")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """Return an environment with an empty home."""
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def default_dir(env: dict[str, str]) -> Path:
    return access.default_state_dir(env)


def running(state_dir: Path, endpoints: Endpoints = LOCAL) -> str:
    """Create a state directory as `cotenant up` does; return its token."""
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


def test_processes_that_start_together_agree_on_one_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for attempt in range(20):
            assert len(set(pool.map(access.ensure_token, [tmp_path / str(attempt)] * 16))) == 1


def test_a_world_writable_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(AccessError, match="a private state directory"):
        access.ensure_token(tmp_path)
    assert mode(tmp_path) == 0o777


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    with pytest.raises(AccessError, match="is empty"):
        access.read_token(tmp_path)


def test_a_state_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AccessError, match="cannot keep state"):
        access.ensure_token(tmp_path / "file")


def test_published_endpoints_are_found(home: dict[str, str]) -> None:
    endpoints = Endpoints("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "")
    token = running(default_dir(home), endpoints)
    assert access.find(None, home) == Access(endpoints, token)


def test_withdrawn_endpoints_are_not_found(home: dict[str, str]) -> None:
    running(default_dir(home))
    access.withdraw(default_dir(home))
    access.withdraw(default_dir(home))
    with pytest.raises(AccessError, match="cotenant up"):
        access.find(None, home)


def test_the_error_without_services_says_what_to_do(home: dict[str, str]) -> None:
    with pytest.raises(
        AccessError, match=r"no services are running from .*start them with `cotenant up`, or .* COTENANT_ENDPOINT"
    ):
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


def test_tokens_are_looked_up_at_the_same_levels(home: dict[str, str], tmp_path: Path) -> None:
    kept = running(tmp_path)
    configure(home, 'token = "from-config"')
    assert access.find(None, home, endpoint="far.example:1").token == "from-config"
    env = home | {"COTENANT_TOKEN": "from-env"}
    assert access.find(None, env, endpoint="far.example:1").token == "from-env"
    assert access.find(tmp_path, env).token == kept
    assert access.find(tmp_path, env, token="from-flag").token == "from-flag"


def test_a_token_is_stripped_of_line_ends(home: dict[str, str]) -> None:
    env = home | {"COTENANT_ENDPOINT": "127.0.0.1:1"}
    assert access.find(None, env | {"COTENANT_TOKEN": "abc\n"}).token == "abc"
    for token in ("tökén", "a\nb"):
        with pytest.raises(AccessError, match="invalid characters"):
            access.find(None, env | {"COTENANT_TOKEN": token})


def test_the_local_token_is_not_sent_to_another_machine(home: dict[str, str]) -> None:
    token = running(default_dir(home))
    assert access.find(None, home, endpoint="gpu1.example:7070") == Access(FAR, "")
    assert access.find(None, home, endpoint="127.0.0.1.evil.example:7070").token == ""
    assert access.find(None, home, endpoint="queue=127.0.0.1:1,placement=gpu1.example:2").token == ""
    for address in ("127.0.0.1:8080", "localhost:8080", "[::1]:8080"):
        assert access.find(None, home, endpoint=address).token == token


def test_a_named_state_directory_decides(home: dict[str, str], tmp_path: Path) -> None:
    token = running(tmp_path)
    assert access.find(tmp_path, home, endpoint="gpu1.example:7070") == Access(FAR, token)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("endpoint = ", "is not valid TOML"),
        ("endpoint = 7070", "endpoint must be a string, not 7070"),
        ('endpoint = "host"', "invalid endpoint in .*config.toml: invalid address 'host'"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(home: dict[str, str], text: str, message: str) -> None:
    configure(home, text)
    with pytest.raises(AccessError, match=message):
        access.find(None, home)


def test_a_configuration_may_have_other_keys(home: dict[str, str]) -> None:
    configure(home, 'endpoint = "127.0.0.1:1"\n[defaults]\ntenant = "vision"')
    assert access.find(None, home).endpoints.queue == "127.0.0.1:1"


@pytest.mark.parametrize("text", ["", "[]", "7", '{"queue": 7}', '{"queue": "nonsense"}'])
def test_a_damaged_endpoint_file_is_named(home: dict[str, str], text: str) -> None:
    running(default_dir(home))
    (default_dir(home) / "endpoint.json").write_text(text)
    with pytest.raises(AccessError, match=r"endpoint.json is damaged"):
        access.find(None, home)


def test_defaults_are_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert access.default_state_dir({}) == tmp_path / ".local" / "state" / "cotenant"
    assert access.default_config({}) == tmp_path / ".config" / "cotenant" / "config.toml"
