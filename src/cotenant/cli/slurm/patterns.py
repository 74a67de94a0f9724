"""File names of outputs, from patterns such as `%x-%j.out`: what `expand` in common.sh does on the nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping

DEFAULT, DEFAULT_OF_ARRAY = "slurm-%j.out", "slurm-%A_%a.out"
WIDTH_MAX = 10
NUMERIC = "AajJnst"
_PATTERN = re.compile(r"%(\d*)(.?)", re.DOTALL)


def expand(pattern: str, values: Mapping[str, str]) -> str:
    """Return the name that a pattern gives; `values` are by letter, and an unknown letter stays as it is.

    >>> expand("%x-%4a.out%%", {"x": "train", "a": "7"})
    'train-0007.out%'
    """

    def value(match: re.Match[str]) -> str:
        width, letter = match.groups()
        if letter == "%":
            return "%"
        if letter not in values or not letter:
            return match[0]
        return values[letter].rjust(min(int(width or 0), WIDTH_MAX) * (letter in NUMERIC), "0")

    return _PATTERN.sub(value, pattern)
