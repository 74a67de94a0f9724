"""Pagination: a page token names the last item of the previous page (AIP-158)."""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from cotenant.codec import errors
from cotenant.core.model.validation import Violation

PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1000


def page_of(
    ids: Sequence[str], size: int, token: str, *, descending: bool = False, scope: str = ""
) -> tuple[Sequence[str], str]:
    """Return a page of sorted IDs and the token for the next page, empty on the last one.

    `scope` identifies the list: a token of another list is rejected.

    >>> page, token = page_of(["a", "b", "c"], 2, "")
    >>> page, page_of(["a", "b", "c"], 2, token)
    (['a', 'b'], (['c'], ''))

    Raises:
        Problem: INVALID_ARGUMENT the size is negative, or the token is not of this list.
    """
    if size < 0:
        raise errors.invalid([Violation("page_size", f"must not be negative, not {size}")])
    size = min(size or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)
    after = _read(token, scope) if token else None
    if descending:
        end = len(ids) if after is None else bisect_left(ids, after)
        page = list(reversed(ids[max(0, end - size) : end]))
        more = end > size
    else:
        begin = 0 if after is None else bisect_right(ids, after)
        page = list(ids[begin : begin + size])
        more = begin + size < len(ids)
    return page, _write(page[-1], scope) if page and more else ""


def _write(last: str, scope: str) -> str:
    return base64.urlsafe_b64encode(f"{scope}\n{last}".encode()).decode()


def _read(token: str, scope: str) -> str:
    try:
        was, _, last = base64.urlsafe_b64decode(token.encode()).decode().partition("\n")
    except (binascii.Error, UnicodeDecodeError):
        raise errors.invalid([Violation("page_token", "is not a page token of this service")]) from None
    if was != scope:
        raise errors.invalid([Violation("page_token", "belongs to a list with another filter")])
    return last
