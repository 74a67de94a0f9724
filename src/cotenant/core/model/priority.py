"""Priority classes: names for the priorities that most jobs need, so that people agree on what is urgent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CLASSES: Mapping[str, int] = MappingProxyType({"low": -100, "normal": 0, "high": 100, "urgent": 1000})
"""Far enough apart for whole numbers to go between them. Higher runs earlier."""


def parse_priority(text: str) -> int:
    """Read a priority: the name of a class, or a whole number.

    >>> parse_priority("high"), parse_priority("-7")
    (100, -7)

    Raises:
        ValueError: it is neither.
    """
    told = text.strip().lower()
    if told in CLASSES:
        return CLASSES[told]
    try:
        return int(told)
    except ValueError:
        raise ValueError(f"must be {', '.join(CLASSES)} or a whole number, not {text!r}") from None


def class_of(priority: int) -> str:
    """Name the class of a priority; "" where it is between classes.

    >>> class_of(100), class_of(7)
    ('high', '')
    """
    return next((name for name, number in CLASSES.items() if number == priority), "")


def in_words(priority: int) -> str:
    """Write a priority for people.

    >>> in_words(100), in_words(7)
    ('high', '7')
    """
    return class_of(priority) or str(priority)
