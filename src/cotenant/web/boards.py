"""Tables of single pages, each read again and again while somebody has its page open.

A board asks several services. If one of them does not answer, the board has the rest, and says what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

import grpc.aio

from cotenant import telemetry
from cotenant.cli.connection import Mesh
from cotenant.client.errors import CotenantError, PermissionDenied
from cotenant.rpc.access import AccessError
from cotenant.web.changes import Changes
from cotenant.web.rows import Row, to_json

T = TypeVar("T")
log = telemetry.logger()

MAY_NOT = "your API token may not see this"


class Ask(Protocol):
    """Calls of one principal; errors are those of `cotenant.client`."""

    def __call__(self, work: Callable[[Mesh], Awaitable[T]], /) -> Awaitable[T]:
        """Return what `work` returns."""


class BoardKind(NamedTuple):
    """What a board reads, as rows by id, and how often."""

    read: Callable[[Ask], Awaitable[Mapping[str, Row]]]
    every_seconds: float


class Part(NamedTuple):
    """A part of a board: what was asked, as rows, or why it is missing."""

    rows: list[Row]
    trouble: str


async def part(asked: Awaitable[list[Row]]) -> Part:
    """Return a part of a board; a refusal, or a service that does not answer, leaves a gap that says so."""
    try:
        return Part(await asked, "")
    except PermissionDenied:
        return Part([], MAY_NOT)
    except (CotenantError, AccessError) as error:
        return Part([], getattr(error, "message", "") or str(error))


class Board:
    """A table that is read while pages show it."""

    def __init__(self, ask: Ask, kind: BoardKind) -> None:
        self.rows = Changes()
        self._ask, self._kind = ask, kind
        self._readers = 0
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Changes]:
        """Keep the table up to date inside the context: an open page."""
        self._readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._read())
        try:
            yield self.rows
        finally:
            self._readers -= 1
            if not self._readers:
                self.close()

    def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _read(self) -> None:
        while True:
            try:
                self._put(await self._kind.read(self._ask))
            except (CotenantError, AccessError, grpc.aio.AioRpcError) as error:
                log.info("board_failed", error=str(error))
            except Exception:  # of one row, perhaps: without another try, an open page would never change again
                log.exception("board_failed")
            await asyncio.sleep(self._kind.every_seconds)

    def _put(self, rows: Mapping[str, Row]) -> None:
        for gone in self.rows.ids() - rows.keys():
            self.rows.remove(gone)
        for row_id, row in rows.items():
            self.rows.put(row_id, to_json({"id": row_id, **row}))
