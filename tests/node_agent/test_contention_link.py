"""A node's samples go to the replica of contention that its name prefers, and to the next one while that is away."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from cotenant.node_agent.contention_link import LASTED_SECONDS, ContentionLink
from cotenant.rpc.shards import ranked

ADDRESSES = [f"127.0.0.1:{port}" for port in (1, 2, 3)]


class Link(ContentionLink):
    """Tries addresses, each for as long as the test says, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lasted: list[float]) -> None:
        super().__init__(
            "|".join(ADDRESSES),
            "",
            "n1",
            sample=lambda: None,  # type: ignore[arg-type, return-value]  # none is taken
            obey=lambda directive: None,
            away=lambda: None,
            interval_seconds=1.0,
            rng=Random(1),
        )
        self.tried: list[str] = []
        self._lasted, self._now = lasted, 0.0
        monkeypatch.setattr("cotenant.node_agent.contention_link.time.monotonic", lambda: self._now)
        self._backoff.next_seconds = lambda: 0.0  # type: ignore[method-assign]  # no time passes

    async def _hold_stream(self, address: str) -> None:
        self.tried.append(address)
        if not self._lasted:
            await asyncio.Event().wait()
        self._now += self._lasted.pop(0)


async def tried(monkeypatch: pytest.MonkeyPatch, lasted: list[float]) -> Any:
    link = Link(monkeypatch, list(lasted))
    running = asyncio.create_task(link.run())
    while len(link.tried) <= len(lasted):  # noqa: ASYNC110  # what is waited for tells nobody
        await asyncio.sleep(0)
    running.cancel()
    return link.tried


async def test_the_next_ones_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = ranked("n1", ADDRESSES)
    assert await tried(monkeypatch, [0.0, 1.0, 0.0, 0.0]) == [first, second, third, first, second]


async def test_one_that_held_a_stream_for_long_gives_way_to_the_first_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = ranked("n1", ADDRESSES)
    assert await tried(monkeypatch, [0.0, LASTED_SECONDS, LASTED_SECONDS]) == [first, second, first, first]
