from __future__ import annotations

import asyncio
import time

from cotenant.rpc.loop_lag import BEHIND_SECONDS, LOOK_SECONDS, STALL_SECONDS, LoopLagMonitor
from cotenant.telemetry.recent_durations import WINDOW_SECONDS


async def test_a_stalled_loop_is_logged() -> None:
    stalls = LoopLagMonitor()
    task = asyncio.ensure_future(stalls.run())
    while not stalls.told:
        await asyncio.sleep(LOOK_SECONDS / 2)
        time.sleep(LOOK_SECONDS + STALL_SECONDS)  # noqa: ASYNC251  # that is what is looked for
    task.cancel()
    assert stalls.longest_seconds >= STALL_SECONDS


def test_only_long_delays_are_logged() -> None:
    stalls = LoopLagMonitor()
    for late_seconds in (0.0, STALL_SECONDS / 2, STALL_SECONDS, 2 * STALL_SECONDS):
        stalls.take(late_seconds)
    assert (stalls.longest_seconds, stalls.told) == (2 * STALL_SECONDS, 2)


def test_a_stall_counts_in_the_window_in_which_it_ended() -> None:
    now = [5.0]
    stalls = LoopLagMonitor(clock=lambda: now[0])
    stalls.take(BEHIND_SECONDS)
    assert stalls.lag().windows_behind == 1
    now[0] += WINDOW_SECONDS
    stalls.take(2 * BEHIND_SECONDS)
    lag = stalls.lag()
    assert (lag.windows_behind, lag.longest.ToMilliseconds()) == (2, 2000)
    now[0] += 3 * WINDOW_SECONDS
    assert stalls.lag().windows_behind == 0
