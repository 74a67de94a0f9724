"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

NEAR_LENGTH_MAX, NEAR_MAX = 128, 2_000  # longer and further names are not compared


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that `name` may have been meant to be, the most similar first.

    None is similar to a name that is very long: looking for one takes a time that grows with both lengths.
    """
    if len(name) > NEAR_LENGTH_MAX:
        return []
    known = (other for other in known if len(other) <= NEAR_LENGTH_MAX)
    return difflib.get_close_matches(name, list(islice(known, NEAR_MAX)), n=count)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask whether a similar name was meant; "" where none is similar.

    >>> did_you_mean("fiffo", ["fifo", "las"])
    '; did you mean fifo?'
    """
    similar = nearest(name, known)
    return f"; did you mean {' or '.join(similar)}?" if similar else ""
