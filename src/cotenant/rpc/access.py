"""How a client finds the services and its token, and how `cotenant up` publishes where it serves.

Connection settings come from five levels, in this order: flags, the environment, what `cotenant login` keeps
(`~/.config/cotenant/login.toml`), the configuration file (`config.toml` there), the default state directory
(`~/.local/state/cotenant`). A login counts only if it decides: its token is for its own mesh. The first level that
names an endpoint or a state directory decides; within one level an endpoint wins. The token is looked up in the same
order. A state directory holds `endpoint.json` and `token`, and only its owner can enter it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cotenant.deferred import ipaddress, json, secrets, tempfile, tomllib
from cotenant.rpc.endpoints import SERVICES, Endpoints, addresses_of, host_and_port

if TYPE_CHECKING:
    from cotenant.security.tls_files import TlsFiles

TOKEN_FILE = "token"  # noqa: S105 a file's name
ENDPOINT_FILE = "endpoint.json"
LOGIN_FILE, LOGIN_CA_FILE = "login.toml", "login-ca.pem"
TOKEN_BYTES = 32
Tls = tuple[str, str, str]  # files of CA certificates, certificate and key; "" if not given
NO_TLS: Tls = ("", "", "")


class AccessError(Exception):
    """The services' addresses or the credentials are missing or unusable; the message says what to do."""


class Access(NamedTuple):
    """The services' addresses, the token, and the TLS files of a connection; None: no TLS."""

    endpoints: Endpoints
    token: str = ""
    tls: TlsFiles | None = None


class Sources(NamedTuple):
    """Where the services' addresses and the token come from; "" for a token that there is not."""

    endpoint: str
    token: str


class _Level(NamedTuple):
    """The settings of one source; "" where it sets nothing."""

    source: str
    endpoint: str = ""
    token: str = ""
    state_dir: Path | None = None
    tls: Tls = NO_TLS
    is_login: bool = False


def find(
    state_dir: Path | None,
    env: Mapping[str, str],
    *,
    endpoint: str = "",
    token: str = "",
    tls: Tls = NO_TLS,
    config: Path | None = None,
) -> Access:
    """Return the connection settings. `state_dir`, `endpoint`, `token` and `tls` are the values of flags.

    Raises:
        AccessError: no settings were found, or they cannot be read.
    """
    return find_with_sources(state_dir, env, endpoint=endpoint, token=token, tls=tls, config=config)[0]


def find_with_sources(
    state_dir: Path | None,
    env: Mapping[str, str],
    *,
    endpoint: str = "",
    token: str = "",
    tls: Tls = NO_TLS,
    config: Path | None = None,
) -> tuple[Access, Sources]:
    """Return the connection settings as `find` does, and where they come from.

    Raises:
        AccessError: no settings were found, or they cannot be read.
    """
    flags = _Level("the command line", endpoint, token, state_dir, tls)
    levels = [
        flags,
        _environment(env),
        _configuration(login_file(env))._replace(is_login=True),
        _configuration(config or default_config(env)),
        _Level("the default state directory", state_dir=default_state_dir(env)),
    ]
    deciding = next(level for level in levels if level.endpoint or level.state_dir)
    levels = [level for level in levels if level is deciding or not level.is_login]
    endpoints = _endpoints(deciding)
    found, source = _token(levels, deciding, endpoints)
    if not found.isascii() or any(not letter.isprintable() for letter in found):
        raise AccessError("the token contains invalid characters; copy it again from the server's state directory")
    whence = deciding.source if deciding.endpoint else f"{deciding.state_dir} ({deciding.source})"
    return Access(endpoints, found, _tls(levels)), Sources(whence, source)


def default_state_dir(env: Mapping[str, str]) -> Path:
    """Return `$XDG_STATE_HOME/cotenant`, or `~/.local/state/cotenant`, for root too."""
    return Path(env.get("XDG_STATE_HOME") or _home() / ".local" / "state") / "cotenant"


def default_config(env: Mapping[str, str]) -> Path:
    """Return `$XDG_CONFIG_HOME/cotenant/config.toml`, or `~/.config/cotenant/config.toml`."""
    return Path(env.get("XDG_CONFIG_HOME") or _home() / ".config") / "cotenant" / "config.toml"


def login_file(env: Mapping[str, str]) -> Path:
    """Return the file in which `cotenant login` keeps the mesh and the token: beside the configuration file."""
    return default_config(env).with_name(LOGIN_FILE)


def save_login(env: Mapping[str, str], endpoint: str, token: str, authorities: str) -> Path:
    """Keep a mesh, its token and its CA certificates in PEM, readable by the user only; return the file.

    Raises:
        AccessError: they cannot be kept.
    """
    path = login_file(env)
    ensure_private(path.parent)
    try:
        ca = path.with_name(LOGIN_CA_FILE)
        lines = [f"endpoint = {json.dumps(endpoint)}", f"token = {json.dumps(token)}"]
        if authorities:
            replace_file(ca, authorities)
            lines += ["[tls]", f"ca = {json.dumps(str(ca), ensure_ascii=False)}"]
        replace_file(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise AccessError(f"cannot keep the login in {path}: {error.strerror}") from None
    return path


def remove_login(env: Mapping[str, str]) -> bool:
    """Remove what `save_login` keeps; return whether there was anything. Raises `AccessError`."""
    path = login_file(env)
    try:
        found = path.exists()
        for one in (path, path.with_name(LOGIN_CA_FILE)):
            one.unlink(missing_ok=True)
    except OSError as error:
        raise AccessError(f"cannot remove {path}: {error.strerror}") from None
    return found


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise AccessError("HOME is not set; set it, or XDG_STATE_HOME and XDG_CONFIG_HOME") from None


def ensure_token(state_dir: Path) -> str:
    """Return the state directory's token; create the directory and the token if they are missing.

    Two processes that create it at the same time get the same token.

    Raises:
        AccessError: the directory or the file cannot be created, or is not private.
    """
    ensure_private(state_dir)
    path = state_dir / TOKEN_FILE
    try:
        if not path.exists():
            _create(path, secrets.token_urlsafe(TOKEN_BYTES))
        path.chmod(0o600)
    except OSError as error:
        raise AccessError(f"cannot keep the token in {path}: {error.strerror}") from None
    return read_token(state_dir)


def read_token(state_dir: Path) -> str:
    """Return the state directory's token, "" if there is none.

    Raises:
        AccessError: the file is empty or cannot be read.
    """
    path = state_dir / TOKEN_FILE
    try:
        token = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError:
        raise AccessError(f"{path} is not a token file; remove it and start the server again") from None
    except OSError as error:
        raise AccessError(f"cannot read the token in {path}: {error.strerror}") from None
    if not token:
        raise AccessError(f"{path} is empty; remove it and start the server again")
    return token


def publish(state_dir: Path, endpoints: Endpoints) -> None:
    """Write the services' addresses into the state directory, where clients find them."""
    ensure_private(state_dir)
    replace_file(state_dir / ENDPOINT_FILE, json.dumps(endpoints._asdict(), indent=2) + "\n")


def withdraw(state_dir: Path) -> None:
    """Remove what `publish` wrote."""
    (state_dir / ENDPOINT_FILE).unlink(missing_ok=True)


def _environment(env: Mapping[str, str]) -> _Level:
    directory = env.get("COTENANT_STATE_DIR")
    return _Level(
        "the environment",
        env.get("COTENANT_ENDPOINT", ""),
        env.get("COTENANT_TOKEN", ""),
        Path(directory) if directory else None,
        (env.get("COTENANT_TLS_CA", ""), env.get("COTENANT_TLS_CERT", ""), env.get("COTENANT_TLS_KEY", "")),
    )


def _configuration(path: Path) -> _Level:
    """Return the settings of a configuration file, which may hold other keys too."""
    try:
        with path.open("rb") as file:
            said = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return _Level(str(path))
    except OSError as error:
        raise AccessError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, an endless number, or nested too deeply
        raise AccessError(f"{path} is not valid TOML: {error}") from None
    for key in ("endpoint", "token", "state_dir"):
        if not isinstance(said.get(key, ""), str):
            raise AccessError(f"{path}: {key} must be a string, not {said[key]!r}")
    section = said.get("tls", {})
    if not isinstance(section, dict) or not all(isinstance(section.get(key, ""), str) for key in ("ca", "cert", "key")):
        raise AccessError(f"{path}: [tls] takes the strings ca, cert and key")
    tls = section.get("ca", ""), section.get("cert", ""), section.get("key", "")
    directory = said.get("state_dir")
    kept_in = expand_home(directory, str(path)) if directory else None
    return _Level(str(path), said.get("endpoint", ""), said.get("token", ""), kept_in, tls)


def expand_home(path: str, source: str) -> Path:
    """Return a path with a leading `~` or `~user` expanded.

    Raises:
        AccessError: there is no such user; `source` says where the path comes from.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise AccessError(f"{source} names {path!r}, but this machine has no such user") from None


def _tls(levels: list[_Level]) -> TlsFiles | None:
    """Return the TLS files of the first level that names any."""
    for level in levels:
        if any(level.tls):
            ca, cert, key = (expand_home(path, level.source) if path else None for path in level.tls)
            if ca is None:
                raise AccessError(f"{level.source} names a certificate but no CA certificates; pass --tls-ca")
            from cotenant.security.tls_files import TlsFiles

            return TlsFiles(ca, cert, key)
    return None


def _endpoints(level: _Level) -> Endpoints:
    if level.endpoint:
        try:
            return Endpoints.parse(level.endpoint)
        except ValueError as error:
            raise AccessError(f"invalid endpoint in {level.source}: {error}") from None
    assert level.state_dir is not None
    return _published(level.state_dir)


def _published(state_dir: Path) -> Endpoints:
    path = state_dir / ENDPOINT_FILE
    try:
        said = json.loads(path.read_text())
        written = {name: said[name] for name in SERVICES if said.get(name)}
        for endpoint in written.values():
            for address in addresses_of(endpoint):
                host_and_port(address)
        return Endpoints(**written)
    except (FileNotFoundError, NotADirectoryError):
        raise AccessError(
            f"no services are running from {state_dir} ({ENDPOINT_FILE} is missing); "
            "start them with `cotenant up`, or name a server in COTENANT_ENDPOINT"
        ) from None
    except OSError as error:
        raise AccessError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise AccessError(f"{path} is damaged; start `cotenant up` again to rewrite it") from None


def _token(levels: list[_Level], deciding: _Level, endpoints: Endpoints) -> tuple[str, str]:
    """Return the first token that a level names or stores, and where it comes from.

    The default directory's token belongs to this machine's own services and is never sent to others.
    """
    for level in levels:
        if level.token.strip():
            return level.token.strip(), level.source
        implied = level is levels[-1] and level is not deciding
        if level.state_dir and (not implied or _all_local(endpoints)) and (found := read_token(level.state_dir)):
            return found, str(level.state_dir / TOKEN_FILE)
    return "", ""


def _all_local(endpoints: Endpoints) -> bool:
    addresses = (address for endpoint in endpoints._asdict().values() for address in addresses_of(endpoint))
    return all(is_local(host_and_port(address)[0]) for address in addresses)


def is_local(host: str) -> bool:
    """Return whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ensure_private(directory: Path) -> None:
    """Create a directory that only its owner can enter. An existing one is kept unless everybody may write it.

    Raises:
        AccessError: the directory cannot be created, or is writable by everybody.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable_by_all = directory.stat().st_mode & stat.S_IWOTH
    except OSError as error:
        raise AccessError(f"cannot keep state in {directory}: {error.strerror}") from None
    if writable_by_all:
        raise AccessError(f"{directory} is writable by everybody; choose a private state directory")


def _create(path: Path, text: str) -> None:
    """Create a file atomically; keep one that another process created in the meantime."""
    temporary = _write_temporary(path, text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # the other process's token is as good as ours
    finally:
        temporary.unlink()


def replace_file(path: Path, text: str) -> None:
    """Write a file with mode 0600, replacing an existing one; a link is replaced, not followed."""
    _write_temporary(path, text).replace(path)


def _write_temporary(path: Path, text: str) -> Path:
    """Write a temporary file with mode 0600 beside `path`, synced to disk."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
