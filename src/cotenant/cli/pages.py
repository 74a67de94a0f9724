"""Lists that are read to their end, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

PAGE_SIZE = 1000  # the most that services send


async def pages(method: Callable[[Any], Awaitable[Any]], request: Any) -> AsyncIterator[Any]:
    """Yield the pages of a list, from the first on. The request itself is not changed."""
    asked = type(request)()
    asked.CopyFrom(request)
    asked.page_size = asked.page_size or PAGE_SIZE
    while True:
        page = await method(asked)
        yield page
        asked.page_token = page.next_page_token
        if not asked.page_token:
            return
