"""Slurm's lists: of hosts (`n[1-3,7]`) and of array tasks (`0-9:2,14%4`). Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product

NAMES_MAX = 100_000
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(?::(\d{1,9}))?")


class BadList(ValueError):
    """A text that is not one of Slurm's lists, or that stands for too many names."""


def hosts(text: str) -> tuple[str, ...]:
    """Return the names in a list of hosts.

    >>> hosts("n[1-3,07],gpu5,r[1-2]c[0-1]")
    ('n1', 'n2', 'n3', 'n07', 'gpu5', 'r1c0', 'r1c1', 'r2c0', 'r2c1')

    Raises:
        BadList: it is none, or too long.
    """
    found: list[str] = []
    for part in _parts(text):
        pieces = _BRACKETS.split(part)
        choices = [list(_numbers(piece)) if number % 2 else [piece] for number, piece in enumerate(pieces)]
        if len(found) + math.prod(map(len, choices)) > NAMES_MAX:
            raise BadList(f"{text[:80]!r} stands for too many hosts")
        found += ["".join(one) for one in product(*choices)]
    if any("[" in name or "]" in name for name in found):
        raise BadList(f"{text[:80]!r} is not a list of hosts")
    return tuple(found)


def tasks(text: str) -> tuple[int, ...]:
    """Return the indices in a list of array tasks.

    >>> tasks("0-3,8-12:2%4")
    (0, 1, 2, 3, 8, 10, 12)

    Raises:
        BadList: it is none, is cut short, or too long.
    """
    return tuple(int(number) for number in _numbers(text.partition("%")[0].strip("[]")))


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between commas outside of brackets."""
    depth, begin = 0, 0
    for place, sign in enumerate(text):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield text[begin:place].strip()
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:].strip()


def _numbers(text: str) -> Iterator[str]:
    """Yield the numbers of ranges, with leading zeros as they are given."""
    count = 0
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise BadList(f"{text[:80]!r} is not a list of ranges")
        first, last, step = found[1], found[2] or found[1], int(found[3] or 1)
        count += (int(last) - int(first)) // max(1, step) + 1
        if step < 1 or count > NAMES_MAX:
            raise BadList(f"{text[:80]!r} has too many numbers")
        for number in range(int(first), int(last) + 1, step):
            yield str(number).zfill(len(first))
