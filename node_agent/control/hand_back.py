"""Gives a node back to the job of another system that the agent runs in, before that ends.

There are four occasions: the outer job's time is nearly over, the other system cancels it (SIGTERM), its watched
process is gone, or the agent had nothing to run for long enough. The order is always the same: the node reports that it
is drained, so placement sends nothing more and stops what runs, as preempted work; each attempt gets its warning and
its grace period, or less if the time does not suffice; and when all ends are reported the agent says goodbye, whereupon
placement removes the node at once. What does not end in time is left to the other system's kill, and to the heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.attempt_manager import AttemptManager
from cotenant.node_agent.control.placement_outbox import PlacementOutbox
from cotenant.node_agent.probes.outer_job import Nesting
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.launch import grace_seconds_of
from cotenant.node_agent.supervisor.process_table import open_process
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.v1 import job_pb2

log = structlog.get_logger()

LOOK_SECONDS = 0.1
MARGIN_SECONDS_MAX = 5.0  # of the time before the kill, for the ends to be reported
MARGIN_SHARE = 0.3
DRAIN_SECONDS_MAX = 2.0  # for the health check that reports it
ABANDONED_SECONDS = 3.0  # once the watched process is gone
ACKNOWLEDGED_SECONDS_MAX = 2.0


class HandBack:
    """Waits for the occasion, and gives the node back."""

    def __init__(
        self,
        nesting: Nesting,
        manager: AttemptManager,
        outbox: PlacementOutbox,
        drain: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        """`drain` makes the node report that it is drained, for a reason."""
        self._nesting, self._manager, self._outbox, self._drain = nesting, manager, outbox, drain
        self._orphaned = asyncio.Event()
        self._busy_seconds = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Return when the node was given back, or there was no time left for it. `stop` is set by SIGTERM."""
        pidfd = self._watch()
        try:
            reason, seconds = await self._occasion(stop)
            log.warning("node_handed_back", outer_job=self._nesting.job.id, why=reason, seconds=round(seconds, 1))
            if await self._stop_all(reason, seconds):
                await self._until(lambda: not self._manager.attempts, _in(ACKNOWLEDGED_SECONDS_MAX))
                self._outbox.say_goodbye(reason)
            else:
                log.error("hand_back_unfinished", attempts=[str(key) for key in self._live()])
        finally:
            if pidfd is not None:
                asyncio.get_running_loop().remove_reader(pidfd)
                os.close(pidfd)

    def _watch(self) -> int | None:
        """Watch the process whose end is the end of the outer job; return its pidfd."""
        if self._nesting.job.process is None:
            return None
        pidfd = open_process(*self._nesting.job.process)
        if pidfd is None:
            self._orphaned.set()
        else:
            asyncio.get_running_loop().add_reader(pidfd, self._orphaned.set)
        return pidfd

    async def _occasion(self, stop: asyncio.Event) -> tuple[str, float]:
        """Wait for an occasion; return the reason and the time that is left, in seconds."""
        job, drain_time = self._nesting.job, self._nesting.drain_time
        while True:
            if self._orphaned.is_set():
                return f"{job.name} ended", ABANDONED_SECONDS
            if stop.is_set():
                return f"{job.name} is being ended", job.kill_wait_seconds
            if drain_time is not None and time.time() >= drain_time:
                left = (job.end_time or drain_time) - time.time()
                return f"the time of {job.name} is nearly over", max(job.kill_wait_seconds, left)
            if self._live():
                self._busy_seconds = time.monotonic()
            elif 0 < self._nesting.idle_seconds <= time.monotonic() - self._busy_seconds:
                return f"it had nothing to run for {self._nesting.idle_seconds:g} s", job.kill_wait_seconds
            await asyncio.sleep(LOOK_SECONDS)

    async def _stop_all(self, reason: str, seconds: float) -> bool:
        """Drain the node; return whether everything ended within this time, whether or not placement answers."""
        deadline = _in(seconds)
        kill_at = deadline - min(MARGIN_SECONDS_MAX, MARGIN_SHARE * seconds)
        draining = asyncio.create_task(self._drain(reason))
        await self._until(draining.done, _in(min(DRAIN_SECONDS_MAX, MARGIN_SHARE * seconds)))
        ordered: set[AttemptKey] = set()

        def all_ended() -> bool:
            for key in self._live():
                if key not in ordered:  # also what placement assigned before it learned of the drain
                    ordered.add(key)
                    self._stop(key, kill_at)
            return not self._live()

        ended = await self._until(all_ended, deadline)
        await cancel_and_wait(draining)
        return ended

    def _stop(self, key: AttemptKey, kill_at: float) -> None:
        attempt = self._manager.attempts[key]
        grace_seconds = max(0.0, min(grace_seconds_of(attempt.assignment), kill_at - time.monotonic()))
        order = agent_pb2.StopOrder(
            job_id=key.job_id, number=key.number, epoch=attempt.status.epoch, reason=job_pb2.STOP_REASON_DRAINED
        )
        order.grace.FromMicroseconds(int(grace_seconds * 1e6))
        self._manager.stop(order)

    def _live(self) -> list[AttemptKey]:
        return sorted(key for key, attempt in self._manager.attempts.items() if not attempt.status.ended)

    async def _until(self, condition: Callable[[], bool], deadline: float) -> bool:
        while not condition():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True


def _in(seconds: float) -> float:
    return time.monotonic() + seconds
