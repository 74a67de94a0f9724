"""placeholder"""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that `name` may have been meant to be, the most similar first."""
    return difflib.get_close_matches(name, list(known), n=count)
