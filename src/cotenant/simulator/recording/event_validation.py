"""Validation of a recording's lines, so that a damaged or foreign file is reported in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from cotenant.core.model.resources import OPTIONAL
from cotenant.simulator.recording.events import Event, Kind, Place

INTEGER_BITS = 63
NUMBER_MAX = 1e300
KINDS = frozenset(kind.value for kind in Kind)
NEEDED = {Kind.STARTED.value: ("job_id", "run"), Kind.PLANNED.value: ("waiting",), Kind.WAITING.value: ("code",)}
ALWAYS = ("at_seconds", "kind")


class BadRecording(Exception):
    """A recording that cannot be written, read or replayed; the message is one sentence that names the file."""


def invalid_reason(event: Mapping[str, object]) -> str:
    """Return why an event is invalid; "" if it is valid. Unknown fields are ignored.

    >>> invalid_reason({"at_seconds": 0.5, "kind": "node_down", "node": 3})
    ''
    >>> invalid_reason({"at_seconds": 0.5, "kind": "node_down", "node": "three"})
    'field node is invalid'
    """
    needed = (*ALWAYS, *NEEDED.get(str(event.get("kind")), ()), *(("run",) if "nodes" in event else ()))
    for name in needed:
        if name not in event:
            return f"field {name} is missing"
    for name, value in event.items():
        if name in FIELDS and not FIELDS[name](value):
            return f"field {name} is invalid"
    return ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= INTEGER_BITS


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and -NUMBER_MAX <= value <= NUMBER_MAX


def _is_place(value: object) -> bool:
    return isinstance(value, dict) and all(
        right(value[name]) if name in value else name in OPTIONAL for name, right in PLACE.items()
    )


def _of_each(right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(right, value))


RIGHT: Mapping[str, Callable[[object], bool]] = {
    "str": _is_text,
    "Kind": lambda value: isinstance(value, str) and value in KINDS,
    "float": _is_number,
    "int": _is_integer,
    "bool": lambda value: isinstance(value, bool),
    "tuple[str, ...]": _of_each(_is_text),
    "tuple[Place, ...]": _of_each(_is_place),
    "Mapping[str, float]": lambda value: (
        isinstance(value, dict) and all(_is_text(key) and _is_number(told) for key, told in value.items())
    ),
}
PLACE = {each.name: RIGHT[str(each.type)] for each in fields(Place)}
FIELDS = {each.name: RIGHT[str(each.type).removesuffix(" | None")] for each in fields(Event)}
