"""What a user sets once for all own submissions, in `~/.config/cotenant/config.toml`: whom to notify, and the bell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cotenant.cli.outcome import usage_error
from cotenant.deferred import tomllib
from cotenant.rpc.access import AccessError, default_config

KEYS = {"notify": "a list of texts", "notify_on": "a list of texts", "bell": "true or false"}


class UserDefaults(NamedTuple):
    """Defaults of the submitter."""

    path: Path
    notify: tuple[str, ...] = ()
    notify_on: tuple[str, ...] = ()
    bell: bool = True


def read_user_defaults(env: Mapping[str, str]) -> UserDefaults:
    """Return the defaults in the user's configuration file, which may be missing and may hold other keys too.

    Raises:
        CommandError: the file cannot be read, or names every key with a value of the wrong type.
    """
    try:
        path = default_config(env)
    except AccessError:  # there is no home
        return UserDefaults(Path())
    try:
        table = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return UserDefaults(path)
    except OSError as error:
        raise usage_error(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise usage_error(f"{path} is not valid TOML: {error}") from None
    own = {key: table[key] for key in KEYS if key in table}
    if wrong := [f"{key}: must be {KEYS[key]}" for key, value in own.items() if not _fits(key, value)]:
        raise usage_error(f"{path} has invalid settings", details=wrong)
    return UserDefaults(path, tuple(own.get("notify", ())), tuple(own.get("notify_on", ())), own.get("bell", True))


def _fits(key: str, value: Any) -> bool:
    if key == "bell":
        return isinstance(value, bool)
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
