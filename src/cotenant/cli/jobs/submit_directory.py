"""The folder and the search path of the shell that submits a job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cotenant.cli.outcome import is_text
from cotenant.core.model.job import SUBMIT_VARIABLES, SubmitDirectory
from cotenant.core.model.limits import PATH_LENGTH_MAX

VALUE_LENGTH_MAX = 16_384  # of a variable: a longer PATH is left out, and the node's own is used


def current_directory(environment: Mapping[str, str]) -> SubmitDirectory | None:
    """Return the current folder with the variables that find programs; None where it was removed.

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
    return SubmitDirectory(path, found.st_ino, found.st_uid, tuple(sorted(kept.items())))
