"""Options of policies: declared as a frozen dataclass, written as `key=value`, validated all at once.

A field's type determines how its text is read: int, float, bool, str, a `Literal` of texts, a `StrEnum`, a tuple of any
of these (written `a,b`), or any of these or None (written `none`). An optional method `check` of the dataclass yields
violations that types cannot express, such as two thresholds in the wrong order.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cotenant.core.model.validation import Violation, shown
from cotenant.core.spelling import did_you_mean

T = TypeVar("T")
Reader = Callable[[str], Any]

NOTHING = "none"
BOOLEAN_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class BadOption(ValueError):
    """Invalid options; the message names each of them, and the valid ones."""

    def __init__(self, violations: Iterable[Violation], allowed: Mapping[str, str]) -> None:
        self.violations = tuple(violations)
        self.allowed = dict(allowed)
        faults = "; ".join(f"{bad.field}: {bad.description}" for bad in self.violations)
        options = ", ".join(f"{name}={default}" for name, default in self.allowed.items())
        super().__init__(f"{faults} (options and their defaults: {options or 'none'})")


class InvalidOptionsClass(TypeError):
    """A class that declares options in a way that cannot be read."""


def parse(declared: type[T], given: Mapping[str, str]) -> T:
    """Return options from texts; options not given keep their defaults.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Options:
    ...     thresholds: tuple[float, ...] = (3250.0, 7200.0)
    ...     strict: bool = False
    >>> parse(Options, {"thresholds": "60,120"})
    Options(thresholds=(60.0, 120.0), strict=False)
    >>> parse(Options, {"treshold": "1", "strict": "perhaps"})
    Traceback (most recent call last):
    ...
    cotenant.core.policy.options.BadOption: treshold: is not an option; did you mean thresholds?; strict: must be true \
or false, not 'perhaps' (options and their defaults: thresholds=3250,7200, strict=false)

    Raises:
        BadOption: names every invalid option.
    """
    kind: type = declared  # for mypy: a type variable is not hashable
    readers, allowed = _readers(kind), defaults(kind)
    values: dict[str, Any] = {}
    faults: list[Violation] = []
    for name, text in given.items():
        if name not in readers:
            faults.append(Violation(name, f"is not an option{did_you_mean(name, readers)}"))
            continue
        try:
            values[name] = readers[name](text.strip())
        except ValueError as error:
            faults.append(Violation(name, str(error)))
    if faults:
        raise BadOption(faults, allowed)
    return _checked(declared, values, allowed)


def split_names(text: str) -> tuple[str, ...]:
    """Return the policies named in a comma-separated list.

    >>> split_names("loss-curve, history")
    ('loss-curve', 'history')
    """
    return tuple(name.strip() for name in text.split(","))


def options_by_policy(names: Sequence[str], given: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the options of each policy in a list: NAME.key belongs to that policy, a plain key to the first.

    >>> options_by_policy(["loss-curve", "history"], {"refit_share": "0", "history.samples_max": "8"})
    {'loss-curve': {'refit_share': '0'}, 'history': {'samples_max': '8'}}

    Raises:
        BadOption: names every option that belongs to none of them.
    """
    owned: dict[str, dict[str, str]] = {}
    faults: list[Violation] = []
    for path, text in given.items():
        name, dot, key = path.rpartition(".")
        if not dot:
            owned.setdefault(names[0], {})[key] = text
        elif name in names:
            owned.setdefault(name, {})[key] = text
        else:
            faults.append(Violation(path, f"is for {name!r}, which is not in use{did_you_mean(name, names)}"))
    if faults:
        raise BadOption(faults, dict.fromkeys((f"{name}.…" for name in names), "…"))
    return owned


def defaults(declared: type) -> dict[str, str]:
    """Return each option's default, written as it would be given.

    Raises:
        InvalidOptionsClass: the class is not a frozen dataclass, or an option has no default or readable type.
    """
    _readers(declared)
    return {field.name: written(_default(field)) for field in fields(declared)}


def written(value: object) -> str:
    """Return a value as text that `parse` reads back.

    >>> written((3250.0, 7200.5)), written(True), written(None)
    ('3250,7200.5', 'true', 'none')
    """
    match value:
        case None:
            return NOTHING
        case bool():
            return "true" if value else "false"
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case tuple():
            return ",".join(written(one) for one in value)
        case _:
            return str(value)


def _checked(declared: type[T], values: Mapping[str, Any], allowed: Mapping[str, str]) -> T:
    """Return the options after the class itself has checked the values together."""
    try:
        options = declared(**values)
    except ValueError as error:
        raise BadOption([Violation(", ".join(values), str(error))], allowed) from None
    check: Callable[[], Iterable[Violation]] | None = getattr(options, "check", None)
    if check and (faults := tuple(check())):
        raise BadOption(faults, allowed)
    return options


@cache
def _readers(declared: type) -> Mapping[str, Reader]:
    if not is_dataclass(declared):
        raise InvalidOptionsClass(f"{declared.__name__} is no dataclass")
    if not declared.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # every dataclass has it
        raise InvalidOptionsClass(f"{declared.__name__} is not frozen")
    try:
        hints = get_type_hints(declared)
    except NameError as error:
        raise InvalidOptionsClass(f"a type in {declared.__name__} is not known at run time: {error}") from None
    for field in fields(declared):
        if _default(field) is MISSING:
            raise InvalidOptionsClass(f"option {field.name} has no default")
    return {field.name: _reader(field.name, hints[field.name]) for field in fields(declared) if field.init}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _reader(name: str, kind: Any) -> Reader:
    """Return the reader for values of a type."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _choice({str(choice): choice for choice in parts})
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _choice({choice.value: choice for choice in kind})
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return _many(_reader(name, parts[0]))
    if origin in (Union, types.UnionType) and len(parts) == 2 and types.NoneType in parts:
        one = next(part for part in parts if part is not types.NoneType)
        return _or_nothing(_reader(name, one))
    if origin in (Union, types.UnionType) and len(parts) == 2 and get_origin(parts[1]) is Literal:
        return _or_a_word(_reader(name, parts[0]), tuple(map(str, get_args(parts[1]))))
    raise InvalidOptionsClass(f"option {name} has a type that cannot be read from text: {kind}")


def _int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, not {shown(text)}") from None


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number, not {shown(text)}") from None
    if math.isnan(value):
        raise ValueError("must be a number, not nan")
    return value


def _bool(text: str) -> bool:
    try:
        return BOOLEAN_WORDS[text.lower()]
    except KeyError:
        raise ValueError(f"must be true or false, not {shown(text)}") from None


SIMPLE: Mapping[Any, Reader] = types.MappingProxyType({int: _int, float: _float, bool: _bool, str: str})


def _choice(choices: Mapping[str, Any]) -> Reader:
    def read(text: str) -> Any:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, not {shown(text)}")
        return choices[text]

    return read


def _many(one: Reader) -> Reader:
    def read(text: str) -> tuple[Any, ...]:
        return tuple(one(part.strip()) for part in text.split(",")) if text else ()

    return read


def _or_nothing(one: Reader) -> Reader:
    def read(text: str) -> Any:
        return None if text.lower() == NOTHING else one(text)

    return read


def _or_a_word(one: Reader, words: tuple[str, ...]) -> Reader:
    def read(text: str) -> Any:
        if text in words:
            return text
        try:
            return one(text)
        except ValueError as error:
            raise ValueError(f"{error}, or {', '.join(words)}") from None

    return read
