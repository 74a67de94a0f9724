r"""Dataclasses from plain JSON values: every field is checked, and all errors are reported at once.

>>> @dataclass(frozen=True)
... class Node:
...     gpus: int
...     rack: str = ""
>>> wrong: list[str] = []
>>> read(Node, {"gpus": "8", "rak": "r1"}, "nodes[0]", wrong)
>>> print(*wrong, sep="\n")
nodes[0].rak: unknown field; did you mean rack?
nodes[0].gpus: must be a whole number, not '8'
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import lru_cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from cotenant.core.model.validation import shown
from cotenant.core.spelling import did_you_mean

INTEGER_MAX = 2**63 - 1  # the largest integer of the arrays that it is stored in

_WORDS: Mapping[type, str] = MappingProxyType(
    {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}
)


class _Wrong(Exception):
    """An invalid value: where, and why."""


@dataclass(slots=True)
class _Place:
    path: str
    wrong: list[str]

    def at(self, path: str) -> _Place:
        return _Place(path, self.wrong)

    def refuse(self, why: str) -> _Wrong:
        self.wrong.append(f"{self.path}: {why}")
        return _Wrong()


def read(kind: Any, value: Any, path: str, wrong: list[str]) -> Any:
    """Return a `kind` from a plain value: a dataclass, scalar, enum, tuple, mapping by strings, or an optional.

    Errors are added to `wrong`, each with its path; the result is None if there are any.
    """
    try:
        return _read(kind, value, _Place(path, wrong))
    except _Wrong:
        return None


def _read(kind: Any, value: Any, place: _Place) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return _read(next(one for one in arguments if one is not NoneType), value, place)
    if origin is tuple:
        return _tuple(arguments, value, place)
    if origin is not None:  # a mapping
        return _mapping(arguments[1], value, place)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _word(kind, value, place)
    if kind in _WORDS:
        return _scalar(kind, value, place)
    return _object(kind, value, place)


def _scalar(kind: type, value: Any, place: _Place) -> Any:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if number and isinstance(value, int) and abs(value) > INTEGER_MAX:
        raise place.refuse(f"must be a number of at most 64 bits, not {shown(str(value))}")
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind is not float and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise place.refuse(f"must be {_WORDS[kind]}, not {shown(str(value))}")


def _word(kind: type[Enum], value: Any, place: _Place) -> Any:
    try:
        return kind(value)
    except ValueError:
        words = ", ".join(str(one.value) for one in kind)
        raise place.refuse(f"must be one of {words}, not {shown(str(value))}") from None


def _tuple(arguments: tuple[Any, ...], value: Any, place: _Place) -> tuple[Any, ...]:
    open_ended = arguments[-1] is Ellipsis
    if not isinstance(value, list) or not (open_ended or len(value) == len(arguments)):
        raise place.refuse(f"must be a list{'' if open_ended else f' of {len(arguments)}'}, not {shown(str(value))}")
    kinds = [arguments[0]] * len(value) if open_ended else list(arguments)
    return tuple(_all((kinds[at], one, place.at(f"{place.path}[{at}]")) for at, one in enumerate(value)))


def _mapping(kind: Any, value: Any, place: _Place) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise place.refuse(f"must be an object, not {shown(str(value))}")
    values = _all((kind, one, place.at(f"{place.path}.{key}")) for key, one in value.items())
    return dict(zip(value, values, strict=True))


def _object(kind: type, value: Any, place: _Place) -> Any:
    if not isinstance(value, dict):
        raise place.refuse(f"must be an object, not {shown(str(value))}")
    known = {field.name: (field, hint) for field, hint in _fields(kind)}
    inside = {name: place.at(f"{place.path}.{name}" if place.path else name) for name in (*value, *known)}
    strangers = [name for name in value if name not in known]
    for name in strangers:
        inside[name].refuse(f"unknown field{did_you_mean(name, known)}")
    missing = [name for name, (field, _) in known.items() if name not in value and _needed(field)]
    for name in missing:
        inside[name].refuse("is missing")
    names = [name for name in known if name in value]
    values = _all((known[name][1], value[name], inside[name]) for name in names)
    if strangers or missing:
        raise _Wrong
    return kind(**dict(zip(names, values, strict=True)))


def _all(questions: Any) -> list[Any]:
    """Read all values, so that all errors are found, and fail only then."""
    values, failed = [], False
    for kind, value, place in questions:
        try:
            values.append(_read(kind, value, place))
        except _Wrong:
            failed = True
    if failed:
        raise _Wrong
    return values


def _needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


@lru_cache(maxsize=64)
def _fields(kind: type) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind)
    return tuple((field, hints[field.name]) for field in fields(kind))
