"""Commands that are imported only when they run, so that `cotenant --help` is fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from cotenant.cli.aliases import ALIASES, command_of
from cotenant.cli.flags import TAIL, hoist
from cotenant.cli.outcome import OutputClosed, usage_error
from cotenant.core.spelling import nearest

FOREIGN_COMMANDS: Mapping[str, Sequence[str]] = MappingProxyType(  # names from kubectl, Slurm and others
    {
        "cluster-info": ("status",),
        "info": ("status",),
        "ping": ("status", "health"),
        "members": ("replicas", "status"),
        "server": ("replicas", "serve"),
        "node": ("nodes",),
        "job": ("jobs", "show"),
        "scontrol": ("show", "nodes", "update"),
        "sacct": ("history", "jobs"),
        "hold": ("suspend",),
        "list": ("jobs", "nodes"),
        "get": ("show", "jobs"),
        "describe": ("show", "explain"),
        "queue": ("jobs",),
        "squeue": ("jobs",),
        "sinfo": ("nodes",),
        "srun": ("run",),
        "sbatch": ("submit",),
        "kill": ("cancel",),
        "delete": ("cancel",),
        "scancel": ("cancel",),
        "users": ("tokens", "tenants"),
        "start": ("up", "serve"),
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A command to be imported: `register(app)` in `module` adds it to a typer app."""

    name: str
    module: str
    summary: str
    panel: str


class LazyCommand(TyperCommand):
    """A placeholder in the list of commands that loads the real command when called."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.name, short_help=entry.summary)
        self.entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Load the real command and delegate to it."""
        command = load(self.entry)
        if parent is not None:
            own = {option for parameter in command.params for option in parameter.opts}
            args = hoist(args, parent.params, own)
        return command.make_context(info_name, args, parent=parent, **extra)


class TailCommand(TyperCommand):
    """A command that accepts another command line after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words after `--` unparsed."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[TAIL] = args[:at], args[at + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show the tail in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- CMD...]"]


class LazyGroup(TyperGroup):
    """A group whose commands are imported one at a time."""

    def add_entries(self, entries: Iterable[Entry]) -> None:
        """Add commands in the order of the help."""
        for entry in entries:
            self.add_command(LazyCommand(entry))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name or alias."""
        return super().get_command(ctx, command_of(cmd_name))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands and aliases, for completion."""
        return [*super().list_commands(ctx), *ALIASES]

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a closed pipe is not a failure, as it would be for typer."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise OutputClosed from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands in panels."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for command in self.commands.values():
            assert isinstance(command, LazyCommand)
            own = command.entry.name
            aliases = ", ".join(alias for alias, name in ALIASES.items() if name == own)
            named = f"{own} ({aliases})" if aliases else own
            panels.setdefault(command.entry.panel, []).append((named, command.entry.summary))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command; for an unknown name, suggest similar commands."""
        name = args[0]
        if command_of(name) in self.commands or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = FOREIGN_COMMANDS.get(name) or nearest(name, self.commands)
        hint = f"did you mean {' or '.join(near)}?" if near else "list all commands with `cotenant --help`"
        raise usage_error(f"unknown command {name!r}", hint=hint)


def load(entry: Entry) -> Any:
    """Import a command and return it."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback()(_group_callback)  # otherwise an app with one command is that command
    import_module(entry.module).register(app)
    commands: MutableMapping[str, Any] = typer.main.get_group(app).commands
    return commands[entry.name]


def _group_callback() -> None:
    """Group the commands."""
