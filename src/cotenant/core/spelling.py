"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

NEAR_LENGTH_MAX, NEAR_MAX = 128, 2_000  # longer names, and names beyond this many, are not compared


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names most similar to `name`, the most similar first.

    Names that are very long have no similar ones: searching takes time that grows with both lengths.
    """
    if len(name) > NEAR_LENGTH_MAX:
        return []
    import difflib  # here, because commands that do not fail have no use for it

    known = (other for other in known if len(other) <= NEAR_LENGTH_MAX)
    return difflib.get_close_matches(name, list(islice(known, NEAR_MAX)), n=count)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint at similar names; "" if there are none. A name that is known, but cannot be used, is no hint.

    >>> did_you_mean("fiffo", ["fifo", "las", "fiffo"])
    '; did you mean fifo?'
    """
    similar = nearest(name, (other for other in known if other != name))
    return f"; did you mean {' or '.join(similar)}?" if similar else ""
