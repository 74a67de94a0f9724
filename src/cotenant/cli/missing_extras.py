"""Errors for commands that need an extra of the package: which one, and the command that installs it."""

from __future__ import annotations

from cotenant import extras
from cotenant.cli.outcome import CommandError, usage_error


def check_extras(command: str, *needed: str) -> None:
    """Check before any work that all modules of these extras are installed.

    Raises:
        CommandError: at least one is not.
    """
    if lacking := [extra for extra in needed if extras.missing([extra])]:
        modules = ", ".join(extras.missing(lacking))
        named = f"extra{'s' * (len(lacking) > 1)} {' and '.join(lacking)}"
        raise usage_error(f"`{command}` needs the {named}; missing: {modules}", hint=extras.how_to_install(*lacking))


def missing_module(error: ModuleNotFoundError) -> CommandError | None:
    """Return the error for a module that an extra brings; None for any other module."""
    extra = extras.bringing(error.name or "")
    if not extra:
        return None
    return usage_error(f"this needs {error.name}, which is not installed", hint=extras.how_to_install(extra))
