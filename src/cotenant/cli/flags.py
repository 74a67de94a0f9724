"""Global options: how to reach the mesh. Every command accepts them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import typer

GLOBAL_OPTIONS: Mapping[str, str] = {
    "--state-dir": "state_dir",
    "--endpoint": "endpoint",
    "--token": "token",
    "--tls-ca": "tls_ca",
    "--tls-cert": "tls_cert",
    "--tls-key": "tls_key",
}

TAIL = "cotenant.tail"  # key in a context's meta: the words after `--`


class Flags(NamedTuple):
    """The global options; "" if not given."""

    state_dir: str = ""
    endpoint: str = ""
    token: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    @classmethod
    def of(cls, context: typer.Context) -> Flags:
        """Return the global options of a command's context; works during shell completion, too."""
        given = context.find_root().params
        return cls(**{name: given.get(name) or "" for name in GLOBAL_OPTIONS.values()})


def hoist(arguments: list[str], into: MutableMapping[str, Any], own: Collection[str]) -> list[str]:
    """Move global options from a command's arguments, up to `--`, into `into`, unless the command has its own.

    So `cotenant jobs --endpoint X` means `cotenant --endpoint X jobs`.

    >>> given = {}
    >>> hoist(["--all", "--endpoint", "a:1", "--", "--token", "t"], given, own=()), given
    (['--all', '--', '--token', 't'], {'endpoint': 'a:1'})
    """
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, assigned, value = argument.partition("=")
        if argument == "--":
            return [*rest, argument, *waiting]
        if name not in GLOBAL_OPTIONS or name in own or not (assigned or waiting):
            rest.append(argument)
        else:
            into[GLOBAL_OPTIONS[name]] = value if assigned else waiting.pop(0)
    return rest
