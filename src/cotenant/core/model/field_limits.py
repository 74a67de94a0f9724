"""Limits on single values: what a value must be, and why a value is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cotenant.core.model.limits import NAME_LENGTH_MAX, PATH_LENGTH_MAX

_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Limit:
    """What a value must be; `reason` returns why a value is refused, "" if it is not."""

    text: str  # as the documentation says it
    reason: Callable[[Any], str]
    least: int | None = None  # of whole numbers without exceptions
    most: int | None = None


def between(least: float, most: float, unit: str = "", *, or_zero: bool = False) -> Limit:
    """Return a range with both ends.

    >>> between(16, 4_194_304, or_zero=True).reason(5)
    'must be 0, or from 16 to 4194304, not 5'
    """

    def allows(value: float) -> bool:
        return least <= value <= most or (or_zero and value == 0)

    text = f"be {'0, or ' if or_zero else ''}from {_number(least)} to {_number(most)}{unit}"
    whole = isinstance(least, int) and isinstance(most, int) and not or_zero
    limit = _limit(text, allows)
    return replace(limit, least=int(least), most=int(most)) if whole else limit


def at_least(least: float, unit: str = "") -> Limit:
    """Return a range of finite numbers without a maximum.

    >>> at_least(10.0, " seconds").reason(9.5)
    'must be at least 10 seconds, not 9.5'
    """
    return _limit(f"be at least {_number(least)}{unit}", lambda value: least <= value < math.inf)


def positive(unit: str = "") -> Limit:
    """Return the range of finite numbers above zero.

    >>> positive(" seconds").reason(0.0)
    'must be positive, not 0 seconds'
    """
    return _limit("be positive", lambda value: 0 < value < math.inf, unit)


def _limit(text: str, allows: Callable[[float], bool], unit: str = "") -> Limit:
    return Limit(text, lambda value: "" if allows(value) else f"must {text}, not {_number(value)}{unit}")


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def name_error(text: str) -> str:
    """Return why a name is invalid; "" if it is valid. Names never become paths, and must not look like paths.

    >>> name_error("ResNet 50, run 7")
    ''
    """
    if len(text) > NAME_LENGTH_MAX:
        return f"at most {NAME_LENGTH_MAX} characters are allowed, not {len(text)}"
    if not text.isprintable() or "/" in text or "\\" in text or text in (".", ".."):
        return f"must be printable and without slashes, not {shown(text)}"
    return ""


def is_id(text: str) -> bool:
    """Return whether a text has the form of an id: lower-case letters, digits and dashes, at most 63.

    >>> is_id("team-7"), is_id("Team 7")
    (True, False)
    """
    return _ID.fullmatch(text) is not None


def _id_error(text: str) -> str:
    return "" if is_id(text) else f"must be lower-case letters, digits and dashes, at most 63, not {shown(text)}"


def _path_error(text: str) -> str:
    if len(text) > PATH_LENGTH_MAX:
        return f"has {len(text)} characters; {PATH_LENGTH_MAX} are allowed at most"
    if text and (not text.startswith("/") or "\0" in text):
        return f"must be an absolute path, not {shown(text)}"
    return ""


def _text_path_error(text: str) -> str:
    if len(text) > PATH_LENGTH_MAX:
        return f"has {len(text)} characters; {PATH_LENGTH_MAX} are allowed at most"
    return "contains a NUL byte" if "\0" in text else ""


def shown(text: str) -> str:
    """Return a text quoted for an error, short and harmless.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'"
    """
    return ascii(text) if len(text) <= 40 else ascii(text[:40])[:-1] + "…'"


NOT_NEGATIVE = _limit("not be negative", lambda value: value >= 0)
ZERO_OR_POSITIVE = _limit("be 0 or positive", lambda value: 0 <= value < math.inf)
PERCENTILE = _limit("be from 0 to below 100", lambda value: 0 <= value < 100)
FINITE = _limit("be a finite number", math.isfinite)
NAME = Limit(f"be printable, without slashes, at most {NAME_LENGTH_MAX} characters", name_error)
ID = Limit("be lower-case letters, digits and dashes, at most 63", _id_error)
TEXT_PATH = Limit(f"be a path of at most {PATH_LENGTH_MAX} characters", _text_path_error)
PATH = Limit(f"be an absolute path of at most {PATH_LENGTH_MAX} characters", _path_error)
