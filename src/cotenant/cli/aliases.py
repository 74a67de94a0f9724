"""Short names of commands, as other tools have them. Imports nothing: quick commands read it too."""

from __future__ import annotations

from types import MappingProxyType

ALIASES = MappingProxyType({"ls": "jobs", "ps": "jobs", "rm": "cancel", "requeue": "rerun"})


def command_of(name: str) -> str:
    """Return the command that a word names.

    >>> command_of("ls"), command_of("jobs")
    ('jobs', 'jobs')
    """
    return ALIASES.get(name, name)
