"""Secrets of a tenant: how a job names them, and the limits of their names and values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from cotenant.core.model.field_limits import shown
from cotenant.core.model.limits import SECRETS_MAX

VALUE_BYTES_MAX = 64 * 1024
NAME_LENGTH_MAX = 128
PATH_LENGTH_MAX = 255
PATH_PARTS_MAX = 8

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORMS = "NAME, NAME=VARIABLE or NAME:PATH"


@dataclass(frozen=True, slots=True)
class SecretUse:
    """How a job gets a secret: as the environment variable `variable`, or as the file `path`.

    >>> str(SecretUse("HF_TOKEN", "HF_TOKEN")), str(SecretUse("DB", "PGPASSWORD")), str(SecretUse("KEY", path="ssh/id"))
    ('HF_TOKEN', 'DB=PGPASSWORD', 'KEY:ssh/id')
    """

    name: str
    variable: str = ""
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{self.name}:{self.path}"
        return self.name if self.variable == self.name else f"{self.name}={self.variable}"


def parse_use(text: str) -> SecretUse:
    """Return the use that a text describes.

    >>> parse_use("HF_TOKEN"), parse_use("KEY:/ssh/id")
    (SecretUse(name='HF_TOKEN', variable='HF_TOKEN', path=''), SecretUse(name='KEY', variable='', path='ssh/id'))

    Raises:
        ValueError: it describes none.
    """
    name, sign, rest = text, "", ""
    for place, letter in enumerate(text):
        if letter in "=:":
            name, sign, rest = text[:place], letter, text[place + 1 :]
            break
    if wrong := secret_name_error(name):
        raise ValueError(f"must be {_FORMS}; the name {wrong}")
    if not sign:
        return SecretUse(name, variable=name)
    if not rest.strip("/"):
        raise ValueError(f"must be {_FORMS}; nothing follows the {sign!r} of {shown(text)}")
    return SecretUse(name, variable=rest) if sign == "=" else SecretUse(name, path=rest.removeprefix("/"))


def secret_name_error(name: str) -> str:
    """Return why a text cannot be a secret's name; "" if it can.

    >>> secret_name_error("HF_TOKEN"), secret_name_error("2nd-key")
    ('', "must have letters, digits and underscores only, and not begin with a digit, not '2nd-key'")
    """
    if len(name) > NAME_LENGTH_MAX:
        return f"has {len(name)} characters; {NAME_LENGTH_MAX} are allowed at most"
    if not _NAME.fullmatch(name):
        return f"must have letters, digits and underscores only, and not begin with a digit, not {shown(name)}"
    return ""


def value_error(value: bytes) -> str:
    """Return why bytes cannot be a secret's value; "" if they can. The reason has nothing of the value."""
    if not value:
        return "is empty"
    if len(value) > VALUE_BYTES_MAX:
        return f"has {len(value):,} bytes; {VALUE_BYTES_MAX:,} are allowed at most"
    return ""


def use_errors(
    uses: Sequence[SecretUse], variables: Collection[str], own_variables: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the secrets of a job that sets these variables itself, by field.

    `own_variables` are the beginnings of the names of variables that no job may set.
    """
    if len(uses) > SECRETS_MAX:
        yield "secrets", f"at most {SECRETS_MAX} are allowed, not {len(uses)}"
    seen: set[str] = set()
    paths: list[str] = []
    for place, use in enumerate(uses[:SECRETS_MAX]):
        where = f"secrets[{place}]"
        if wrong := secret_name_error(use.name):
            yield f"{where}.name", wrong
        if bool(use.variable) == bool(use.path):
            yield where, "needs either a variable or a path"
        elif use.variable:
            for wrong in _variable_errors(use.variable, seen, variables, own_variables):
                yield f"{where}.variable", wrong
            seen.add(use.variable)
        else:
            for wrong in _path_errors(use.path, paths):
                yield f"{where}.path", wrong
            paths.append(use.path)


def _variable_errors(
    variable: str, seen: Collection[str], variables: Collection[str], own_variables: tuple[str, ...]
) -> Iterator[str]:
    if wrong := secret_name_error(variable):
        yield wrong
    elif variable.startswith(own_variables):
        yield "this variable is set by the node agent"
    elif variable in variables:
        yield f"{variable} is also a variable of the job's environment"
    elif variable in seen:
        yield f"{variable} is already the variable of another secret"


def _path_errors(path: str, others: Sequence[str]) -> Iterator[str]:
    parts = path.split("/")
    if len(path) > PATH_LENGTH_MAX or len(parts) > PATH_PARTS_MAX:
        yield f"may have {PATH_LENGTH_MAX} characters and {PATH_PARTS_MAX} parts at most"
    elif not path.isprintable() or any(part in ("", ".", "..") for part in parts):
        yield f"must be a path below the directory of secrets, without empty, . or .. parts, not {shown(path)}"
    for other in others:
        if path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/"):
            yield f"cannot be beside another secret's path, {shown(other)}"
