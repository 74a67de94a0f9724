"""Recovery time and leader changes, as the overload benchmark measures them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.overload import POLL_SECONDS, WINDOW_SECONDS, LeaderWatch, recovery_seconds


def test_recovery_is_complete_when_jobs_start_as_quickly_as_before() -> None:
    every_tenth = [number / 10 for number in range(100)]
    assert recovery_seconds(every_tenth, 2.0, 10.0, 9.0) == 0.0
    assert recovery_seconds([at for at in every_tenth if not 2.0 < at < 5.0], 2.0, 10.0, 9.0) == 3.0
    assert recovery_seconds(every_tenth, 2.0, 11.0, 9.0) is None
    assert recovery_seconds(every_tenth, 2.0, 10.0, 2.0 + WINDOW_SECONDS / 2) is None, (
        "the observed window is too short"
    )


async def test_a_new_term_of_the_same_leader_is_no_change_but_a_returning_leader_is() -> None:
    seen = iter([("", "a"), ("", "b"), None, ("", "a")])
    all_seen = asyncio.Event()

    async def leader(service: str) -> tuple[str, str] | None:
        try:
            return next(seen) if service == "queue" else ("", "a")
        except StopIteration:
            all_seen.set()
            return "", "a"

    leaders = LeaderWatch(cast("Any", SimpleNamespace(leader=leader)))
    async with asyncio.timeout(60 * POLL_SECONDS):
        await all_seen.wait()
    await leaders.close()
    assert leaders.seen["queue"] == ["a", "b", "a"]
    assert leaders.changes == 2
