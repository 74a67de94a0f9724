"""How a client finds the services and the token, and how `cotenant up` lets itself be found.

What to reach is looked for at four levels, the nearest first: flags, the environment, the configuration file
(`~/.config/cotenant/config.toml`), the default state directory (`~/.local/state/cotenant`). The first level that
names an endpoint or a state directory decides; at one level an endpoint wins. The token is looked for in the same
order. A state directory holds `endpoint.json` and `token`, and can be entered by its owner alone.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cotenant.rpc.endpoints import SERVICES, Endpoints, addresses_of, host_and_port
from cotenant.security.tls_files import TlsFiles

TOKEN_FILE = "token"  # noqa: S105 a file's name
ENDPOINT_FILE = "endpoint.json"
TOKEN_BYTES = 32
Tls = tuple[str, str, str]  # the files of authorities, certificate and key; "" where one is not given
NO_TLS: Tls = ("", "", "")


class NoAccess(Exception):
    """It is not known where the services are, or how to be let in; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where the services are, the token that they ask for, and the certificates of a connection; None: no TLS."""

    endpoints: Endpoints
    token: str = ""
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class _Level:
    """What one source says; "" where it says nothing."""

    source: str
    endpoint: str = ""
    token: str = ""
    state_dir: Path | None = None
    tls: Tls = NO_TLS


def find(
    state_dir: Path | None,
    env: Mapping[str, str],
    *,
    endpoint: str = "",
    token: str = "",
    tls: Tls = NO_TLS,
    config: Path | None = None,
) -> Access:
    """Find out what to reach. `state_dir`, `endpoint`, `token` and `tls` are what flags say.

    Raises:
        NoAccess: nothing was found, or what was found cannot be read.
    """
    flags = _Level("the command line", endpoint, token, state_dir, tls)
    levels = [
        flags,
        _environment(env),
        _configuration(config or default_config(env)),
        _Level("the default state directory", state_dir=default_state_dir(env)),
    ]
    deciding = next(level for level in levels if level.endpoint or level.state_dir)
    endpoints = _endpoints(deciding)
    found = _token(levels, deciding, endpoints)
    if not found.isascii() or any(not letter.isprintable() for letter in found):
        raise NoAccess("the token has characters that cannot be sent; copy it again from the server's state directory")
    return Access(endpoints, found, _tls(levels))


def default_state_dir(env: Mapping[str, str]) -> Path:
    """Return `$XDG_STATE_HOME/cotenant`, or `~/.local/state/cotenant`, for root as for everybody."""
    return Path(env.get("XDG_STATE_HOME") or _home() / ".local" / "state") / "cotenant"


def default_config(env: Mapping[str, str]) -> Path:
    """Return `$XDG_CONFIG_HOME/cotenant/config.toml`, or `~/.config/cotenant/config.toml`."""
    return Path(env.get("XDG_CONFIG_HOME") or _home() / ".config") / "cotenant" / "config.toml"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise NoAccess("HOME names no directory; set it, or XDG_STATE_HOME and XDG_CONFIG_HOME") from None


def ensure_token(state_dir: Path) -> str:
    """Return the state directory's token; make the directory, and the token, where there is none.

    Two processes that make it at once get the same one.

    Raises:
        NoAccess: the directory or the file cannot be made, or is not ours alone.
    """
    ensure_private(state_dir)
    path = state_dir / TOKEN_FILE
    try:
        if not path.exists():
            _create(path, secrets.token_urlsafe(TOKEN_BYTES))
        path.chmod(0o600)
    except OSError as error:
        raise NoAccess(f"cannot keep the token in {path}: {error.strerror}") from None
    return read_token(state_dir)


def read_token(state_dir: Path) -> str:
    """Return the state directory's token, "" where there is none.

    Raises:
        NoAccess: the file is there but not for us, or empty.
    """
    path = state_dir / TOKEN_FILE
    try:
        token = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError:
        raise NoAccess(f"{path} holds no token; remove it and start the server again") from None
    except OSError as error:
        raise NoAccess(f"cannot read the token in {path}: {error.strerror}") from None
    if not token:
        raise NoAccess(f"{path} is empty; remove it and start the server again")
    return token


def publish(state_dir: Path, endpoints: Endpoints) -> None:
    """Write where the services are, for those who look into the state directory."""
    ensure_private(state_dir)
    replace_file(state_dir / ENDPOINT_FILE, json.dumps(asdict(endpoints), indent=2) + "\n")


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
    """Read `endpoint`, `token` and `state_dir` of a configuration file, which may hold more than these."""
    try:
        with path.open("rb") as file:
            said = tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return _Level(str(path))
    except OSError as error:
        raise NoAccess(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number without end, or nested too deeply
        raise NoAccess(f"{path} is no TOML: {error}") from None
    for key in ("endpoint", "token", "state_dir"):
        if not isinstance(said.get(key, ""), str):
            raise NoAccess(f"{path}: {key} must be a text, not {said[key]!r}")
    section = said.get("tls", {})
    if not isinstance(section, dict) or not all(isinstance(section.get(key, ""), str) for key in ("ca", "cert", "key")):
        raise NoAccess(f"{path}: [tls] takes the texts ca, cert and key")
    tls = section.get("ca", ""), section.get("cert", ""), section.get("key", "")
    directory = said.get("state_dir")
    kept_in = at_home(directory, str(path)) if directory else None
    return _Level(str(path), said.get("endpoint", ""), said.get("token", ""), kept_in, tls)


def at_home(path: str, source: str) -> Path:
    """Read a path that may begin with somebody's home.

    Raises:
        NoAccess: nobody here is called so; `source` names the path.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise NoAccess(f"{source} names {path!r}, and nobody here is called so") from None


def _tls(levels: list[_Level]) -> TlsFiles | None:
    """Take the certificates of the first level that names any."""
    for level in levels:
        if any(level.tls):
            ca, cert, key = (at_home(path, level.source) if path else None for path in level.tls)
            if ca is None:
                raise NoAccess(f"{level.source} names a certificate, but no authorities to believe: --tls-ca does")
            return TlsFiles(ca, cert, key)
    return None


def _endpoints(level: _Level) -> Endpoints:
    if level.endpoint:
        try:
            return Endpoints.parse(level.endpoint)
        except ValueError as error:
            raise NoAccess(f"the endpoint in {level.source} cannot be read: {error}") from None
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
        raise NoAccess(
            f"nothing runs from {state_dir} ({ENDPOINT_FILE} is not there); "
            "start it with `cotenant up`, or name a server in COTENANT_ENDPOINT"
        ) from None
    except OSError as error:
        raise NoAccess(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise NoAccess(f"{path} is damaged; start `cotenant up` again to write it anew") from None


def _token(levels: list[_Level], deciding: _Level, endpoints: Endpoints) -> str:
    """Take the first token that a level names or keeps.

    The default directory's token belongs to this machine's own services and is shown to no others.
    """
    for level in levels:
        if level.token.strip():
            return level.token.strip()
        implied = level is levels[-1] and level is not deciding
        if level.state_dir and (not implied or _all_local(endpoints)) and (found := read_token(level.state_dir)):
            return found
    return ""


def _all_local(endpoints: Endpoints) -> bool:
    addresses = (address for endpoint in asdict(endpoints).values() for address in addresses_of(endpoint))
    return all(is_local(host_and_port(address)[0]) for address in addresses)


def is_local(host: str) -> bool:
    """Tell whether an address is this machine's own, by which nobody else reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def ensure_private(directory: Path) -> None:
    """Make a directory that its owner alone can enter. One that is there is left as it is, if not all may write it.

    Raises:
        NoAccess: it cannot be made, or everybody may write into it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        writable_by_all = directory.stat().st_mode & stat.S_IWOTH
    except OSError as error:
        raise NoAccess(f"cannot keep state in {directory}: {error.strerror}") from None
    if writable_by_all:
        raise NoAccess(f"everybody may write into {directory}; choose a state directory of your own")


def _create(path: Path, text: str) -> None:
    """Write a file that is either whole or not there; leave one that another process made meanwhile."""
    temporary = _written_aside(path, text)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # the other process's token is as good as ours
    finally:
        temporary.unlink()


def replace_file(path: Path, text: str) -> None:
    """Write a file, for its owner alone, in the place of one that may be there; a link is replaced, not followed."""
    _written_aside(path, text).replace(path)


def _written_aside(path: Path, text: str) -> Path:
    """Write a file, for its owner alone, beside `path` and on disk."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # made with mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
