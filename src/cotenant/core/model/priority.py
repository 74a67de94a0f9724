"""Priority classes: names for common priorities, so that users agree on what is urgent."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CLASSES: Mapping[str, int] = MappingProxyType({"low": -100, "normal": 0, "high": 100, "urgent": 1000})
"""Far enough apart to leave room for integers in between. Higher runs earlier."""


def parse_priority(text: str) -> int:
    """Return the priority that a text gives: the name of a class, or an integer.

    >>> parse_priority("high"), parse_priority("-7")
    (100, -7)

    Raises:
        ValueError: the text is neither.
    """
    name = text.strip().lower()
    if name in CLASSES:
        return CLASSES[name]
    try:
        return int(name)
    except ValueError:
        raise ValueError(f"must be {', '.join(CLASSES)} or a whole number, not {text!r}") from None


def class_of(priority: int) -> str:
    """Return the class of a priority; "" if it lies between classes.

    >>> class_of(100), class_of(7)
    ('high', '')
    """
    return next((name for name, number in CLASSES.items() if number == priority), "")


def in_words(priority: int) -> str:
    """Format a priority for users.

    >>> in_words(100), in_words(7)
    ('high', '7')
    """
    return class_of(priority) or str(priority)
