"""Pagination, bounded by count and by bytes: a page token names the last item of the previous page (AIP-158).

A token holds the list that it belongs to and the key of an item, and nothing of the process that wrote it. So it works
with every replica and after a restart, and items that do not change are neither skipped nor repeated, whatever is added
or removed in between.

A page of large messages ends before its item count is reached: a client with gRPC's default settings refuses messages
of more than 4 MiB.
"""

from __future__ import annotations

import base64
import binascii
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from cotenant.codec import errors
from cotenant.core.model.validation import Violation
from cotenant.rpc.slices import Slices

PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1000
PAGE_BYTES_MAX = 2 * 2**20  # half of what clients accept by default; a single item may be larger
SLICE = 50  # messages made before other calls get a turn, or fewer if they are slow

Value = str | float | None
Key = tuple[Value, ...]  # of an item; the last value is its id
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Page(Generic[M]):
    """The messages of a page, and the token of the next page; empty on the last one."""

    items: list[M]
    next_token: str


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which page a call asks for: at most `size` items of the list `scope`, behind the item with the key `after`."""

    size: int
    after: Key | None
    scope: str

    @classmethod
    def read(cls, size: int, token: str, scope: str, size_max: int = PAGE_SIZE_MAX) -> PageRequest:
        """Return the request of a call.

        Raises:
            Problem: INVALID_ARGUMENT the size is negative, or the token is not of this list.
        """
        found: list[Violation] = []
        request = cls.check(size, token, scope, found, size_max)
        if found:
            raise errors.invalid(found)
        return request

    @classmethod
    def check(
        cls,
        size: int,
        token: str,
        scope: str,
        violations: list[Violation],
        size_max: int = PAGE_SIZE_MAX,
        *,
        fits: Callable[[Key], bool] = lambda key: len(key) == 1,
    ) -> PageRequest:
        """Return the request of a call, and add to `violations` what is wrong with it.

        `fits` returns whether a key is one of the list's.
        """
        after = None
        if size < 0:
            violations.append(Violation("page_size", f"must not be negative, not {size}"))
        try:
            after = _read(token, scope, fits) if token else None
        except ValueError as error:
            violations.append(Violation("page_token", str(error)))
        return cls(min(size or min(PAGE_SIZE_DEFAULT, size_max), size_max), after, scope)

    def token(self, key: Key) -> str:
        """Return the token of the page behind an item."""
        return base64.urlsafe_b64encode(json.dumps([self.scope, *key], ensure_ascii=False).encode()).decode()

    async def fill(self, keys: Sequence[Key], message: Callable[[str], M | None]) -> Page[M]:
        """Return the page of the items with these keys, which come next in the list; more than `size` if there are
        more.

        `message` makes the message of an item by its id; None leaves it out: it was deleted in between.
        """
        items: list[M] = []
        slices, left = Slices(most=SLICE), PAGE_BYTES_MAX
        last: Key | None = None
        for key in keys[: self.size]:
            made = message(str(key[-1]))
            if made is not None:
                left -= made.ByteSize()
                if left < 0 and items and last is not None:
                    return Page(items, self.token(last))
                items.append(made)
            last = key
            await slices.step()
        return Page(items, self.token(last) if last is not None and len(keys) > self.size else "")


async def page_of_messages(
    ids: Sequence[str], message: Callable[[str], M | None], request: PageRequest, *, descending: bool = False
) -> Page[M]:
    """Return a page of the items with these sorted ids, by id."""
    after = None if request.after is None else str(request.after[-1])
    if descending:
        end = len(ids) if after is None else bisect_left(ids, after)
        page = list(reversed(ids[max(0, end - request.size - 1) : end]))
    else:
        begin = 0 if after is None else bisect_right(ids, after)
        page = list(ids[begin : begin + request.size + 1])
    return await request.fill([(one,) for one in page], message)


def page_of(
    ids: Sequence[str], size: int, token: str, *, descending: bool = False, scope: str = ""
) -> tuple[Sequence[str], str]:
    """Return a page of sorted IDs and the token for the next page, empty on the last one: for lists of small messages.

    `scope` identifies the list: a token of another list is rejected.

    >>> page, token = page_of(["a", "b", "c"], 2, "")
    >>> page, page_of(["a", "b", "c"], 2, token)
    (['a', 'b'], (['c'], ''))

    Raises:
        Problem: INVALID_ARGUMENT the size is negative, or the token is not of this list.
    """
    request = PageRequest.read(size, token, scope)
    size, after = request.size, None if request.after is None else str(request.after[-1])
    if descending:
        end = len(ids) if after is None else bisect_left(ids, after)
        page = list(reversed(ids[max(0, end - size) : end]))
        more = end > size
    else:
        begin = 0 if after is None else bisect_right(ids, after)
        page = list(ids[begin : begin + size])
        more = begin + size < len(ids)
    return page, request.token((page[-1],)) if page and more else ""


def _read(token: str, scope: str, fits: Callable[[Key], bool]) -> Key:
    """Return the key in a token.

    Raises:
        ValueError: it is no token, or of another list.
    """
    try:
        read = json.loads(base64.urlsafe_b64decode(token.encode()))
    except (binascii.Error, ValueError, RecursionError):
        read = None
    if not isinstance(read, list) or len(read) < 2 or not isinstance(read[0], str) or not isinstance(read[-1], str):
        raise ValueError("is not a page token of this service")
    if read[0] != scope:
        raise ValueError("belongs to another list, or to one with another filter or order; begin without a token")
    key = tuple(read[1:])
    if not all(one is None or isinstance(one, str | int | float) for one in key) or not fits(key):
        raise ValueError("is not a page token of this service")
    return key
