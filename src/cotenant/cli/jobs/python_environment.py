"""The Python environment of the shell that submits a job, and the variables that make it the job's.

`auto` takes the activated virtual environment, else the activated conda environment, else a `.venv` that uv made in the
current folder. As in uv, it comes before conda's `base`, which many shells activate by themselves. A `.venv` of another
user counts only in that user's own folder: anyone may put one into a folder that all may write.

Plain submissions import this module: it needs next to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from cotenant.cli.outcome import is_text
from cotenant.cli.quick_table import PATH_LENGTH_MAX

VENV, CONDA, UV = "venv", "conda", "uv"
CONDA_BASE = "base"
PATH_DEFAULT = "/usr/local/bin:/usr/bin:/bin"
_OWN_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV")
_CONFIG_BYTES_MAX = 65_536


class FoundEnvironment(NamedTuple):
    """An environment: how it was found, its folder and its interpreter."""

    source: str
    path: str
    interpreter: str


class NoEnvironment(Exception):
    """The shell has no such environment; the text says what to do."""


def find_environment(shell: Mapping[str, str], folder: str) -> FoundEnvironment | None:
    """Return the environment of a shell in a folder; None if it has none."""
    in_base = shell.get("CONDA_DEFAULT_ENV") == CONDA_BASE
    for find in (_venv, _uv, _conda) if in_base else (_venv, _conda, _uv):
        try:
            return find(shell, folder)
        except NoEnvironment:
            continue
    return None


def named_environment(source: str, shell: Mapping[str, str], folder: str) -> FoundEnvironment:
    """Return the environment of this source.

    Raises:
        NoEnvironment: there is none that can be used.
    """
    return {VENV: _venv, CONDA: _conda, UV: _uv}[source](shell, folder)


def _venv(shell: Mapping[str, str], folder: str) -> FoundEnvironment:
    return _activated(VENV, "VIRTUAL_ENV", shell, "no virtual environment is active: activate one")


def _conda(shell: Mapping[str, str], folder: str) -> FoundEnvironment:
    return _activated(CONDA, "CONDA_PREFIX", shell, "no conda environment is active: run `conda activate NAME`")


def _activated(source: str, variable: str, shell: Mapping[str, str], none: str) -> FoundEnvironment:
    path = shell.get(variable, "")
    if not path:
        raise NoEnvironment(f"{none} first ({variable} is not set)")
    if not path.startswith("/") or not is_text(path) or len(path) > PATH_LENGTH_MAX - len("/bin/python"):
        raise NoEnvironment(f"{variable} is not an absolute path of at most {PATH_LENGTH_MAX} characters")
    return _with_interpreter(source, path.rstrip("/") or "/", f"{variable} names {path}, which")


def _uv(shell: Mapping[str, str], folder: str) -> FoundEnvironment:
    path = os.path.join(folder, ".venv")
    try:
        with open(os.path.join(path, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
            keys = [line.partition("=")[0].strip() for line in file.read(_CONFIG_BYTES_MAX).splitlines()]
            owner = os.fstat(file.fileno()).st_uid
        trusted = owner in (os.getuid(), os.stat(folder).st_uid)
    except (OSError, ValueError):
        keys, trusted = [], False
    if not folder or "uv" not in keys:
        raise NoEnvironment("the current folder has no .venv that uv made: run `uv sync` or `uv venv` there")
    if not trusted:
        raise NoEnvironment(f"{path} belongs neither to you nor to the owner of its folder")
    return _with_interpreter(UV, path, path)


def _with_interpreter(source: str, path: str, name: str) -> FoundEnvironment:
    interpreter = os.path.join(path, "bin", "python")
    if not (os.path.isfile(interpreter) and os.access(interpreter, os.X_OK)):
        raise NoEnvironment(f"{name} has no interpreter that you can run: {interpreter}")
    return FoundEnvironment(source, path, interpreter)


def variables_with(found: FoundEnvironment, variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that find programs, with the environment's own: its programs come first.

    >>> variables_with(FoundEnvironment("venv", "/e", "/e/bin/python"), {"PATH": "/bin:/e/bin", "CONDA_PREFIX": "/c"})
    {'PATH': '/e/bin:/bin', 'CONDA_PREFIX': '/c', 'VIRTUAL_ENV': '/e'}
    """
    programs = os.path.dirname(found.interpreter)
    others = [place for place in variables.get("PATH", PATH_DEFAULT).split(":") if place != programs]
    given = {**variables, "PATH": ":".join([programs, *others])}
    if found.source == CONDA:
        given.pop("VIRTUAL_ENV", None)
        name = given.get("CONDA_DEFAULT_ENV") or os.path.basename(found.path)
        return given | {"CONDA_PREFIX": found.path, "CONDA_DEFAULT_ENV": name}
    return given | {"VIRTUAL_ENV": found.path}


def variables_without(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables that find programs, without those of Python environments.

    >>> variables_without({"PATH": "/e/bin:/bin", "VIRTUAL_ENV": "/e"})
    {'PATH': '/bin'}
    """
    prefixes = [variables[name].rstrip("/") for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if variables.get(name)]
    kept = {name: value for name, value in variables.items() if name not in _OWN_VARIABLES}
    if "PATH" in kept:
        places = kept["PATH"].split(":")
        outside = [one for one in places if not any(f"{one}/".startswith(f"{prefix}/") for prefix in prefixes)]
        kept["PATH"] = ":".join(outside) or PATH_DEFAULT
    return kept
