"""The folder and the search path of the shell that submits a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cotenant.cli.outcome import is_text
from cotenant.cli.quick_table import PATH_LENGTH_MAX, SUBMIT_VARIABLES

if TYPE_CHECKING:
    from cotenant.core.model.job import SubmitDirectory

VALUE_LENGTH_MAX = 16_384  # of a variable: a longer PATH is left out, and the node's own is used


class Directory(NamedTuple):
    """A folder, its inode and owner, and the variables that find programs there: the fields of `SubmitDirectory`."""

    path: str
    inode: int
    owner_uid: int
    environment: tuple[tuple[str, str], ...]


def current_directory(environment: Mapping[str, str]) -> SubmitDirectory | None:
    """Return the current folder with the variables that find programs; None where it was removed."""
    from cotenant.core.model.job import SubmitDirectory  # takes longer than a plain submission

    found = find_directory(environment)
    return found and SubmitDirectory(*found)


def find_directory(environment: Mapping[str, str]) -> Directory | None:
    """Return the current folder as `current_directory` does.

    The path is the shell's own (`PWD`) where that leads to the same folder: on other machines a home often has the same
    path through a link, and no other.
    """
    try:
        here = Path.cwd()
        found = here.stat()
        path = environment.get("PWD", "")
        if not (path.startswith("/") and os.path.samestat(os.stat(path), found)):
            path = str(here)
    except (OSError, ValueError):
        return None
    if not is_text(path) or len(path) > PATH_LENGTH_MAX:
        return None
    variables = {name: environment[name] for name in SUBMIT_VARIABLES if name in environment}
    kept = {name: value for name, value in variables.items() if is_text(value) and len(value) <= VALUE_LENGTH_MAX}
    return Directory(path, found.st_ino, found.st_uid, tuple(sorted(kept.items())))
