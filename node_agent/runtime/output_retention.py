"""Keeps the output of ended attempts for a while, retrying when the disk or the kernel refuses.

A forgotten attempt leaves a control group and a directory. The group is removed first, because the directory is how an
agent knows it after a restart; then the directory is moved to the kept ones. Either may fail: the disk or the cgroup
hierarchy may be read-only. Each is retried with growing delays until it succeeds; if the agent exits before that, the
next agent continues.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Protocol

import structlog

from cotenant import fail_points
from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.runtime import attempt_directory
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import AttemptKey

log = structlog.get_logger()

GROUP_SECONDS_MAX = 10.0  # per attempt to remove a control group
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 0.5, 15.0


class EndedAttempt(Protocol):
    """An attempt that has ended."""

    @property
    def key(self) -> AttemptKey:
        """The attempt's key."""

    async def remove_group(self, timeout_seconds: float) -> bool:
        """Remove its control group; return False if the kernel still keeps it after the timeout."""


class OutputRetention:
    """Moves directories of ended attempts to `root`, which keeps at most `keep_max` of them, each for `seconds_max`."""

    def __init__(self, root: Path, *, keep_max: int, seconds_max: float) -> None:
        self._root, self._keep_max, self._seconds_max = root, keep_max, seconds_max
        self._moving = asyncio.Lock()

    async def keep(self, attempt: EndedAttempt, directory: AttemptDirectory) -> None:
        """Remove the attempt's control group and move its directory; return once both are done."""
        backoff = Backoff(
            first_seconds=RETRY_SECONDS_FIRST, longest_seconds=RETRY_SECONDS_MAX, rng=Random(str(attempt.key))
        )
        tries = 1
        while not await self._try(attempt, directory, tries):
            tries += 1
            await asyncio.sleep(backoff.next_seconds())
        if tries > 1:
            log.info("attempt_output_retained", attempt=str(attempt.key), tries=tries)

    async def _try(self, attempt: EndedAttempt, directory: AttemptDirectory, tries: int) -> bool:
        if not await attempt.remove_group(timeout_seconds=GROUP_SECONDS_MAX):
            return False
        if tries == 1:
            await fail_points.reach("agent.acknowledged")
        async with self._moving:
            try:
                await asyncio.to_thread(directory.keep, self._root)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if isinstance(error, FileNotFoundError) and not directory.path.exists():
                    return True  # removed by someone else
                log.warning("attempt_retention_failed", attempt=str(attempt.key), error=str(error), tries=tries)
                return False
            await self._prune()
        return True

    async def _prune(self) -> None:
        younger_than = time.time() - self._seconds_max
        try:
            await asyncio.to_thread(
                attempt_directory.prune, self._root, keep_max=self._keep_max, younger_than=younger_than
            )
        except (OSError, RuntimeError) as error:  # the next kept attempt retries
            log.warning("retention_prune_failed", error=str(error))
