"""Ends pre-runs that have shown what they were to show: that the job comes to its first step, or outlives its time.

That it has passed is kept before anybody stops the attempt, and the stop is asked for until it is seen. So wherever the
queue or placement dies between, whoever hears of the attempt next goes on from what is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import grpc
import structlog

from cotenant.codec import errors, specs
from cotenant.core.model.lifecycle import Phase, StopReason
from cotenant.core.model.refusal import about
from cotenant.rpc.task_group import Background
from cotenant.services.queue.jobs.job_store import Keeper
from cotenant.services.queue.jobs.transitions import PHASES, Record, pass_pre_run
from cotenant.v1 import job_pb2, records_pb2

log = structlog.get_logger()

STOP_AGAIN_SECONDS = 0.5
STOPPED = "has shown in its pre-run that it runs"
GOING = frozenset({Phase.STARTING, Phase.RUNNING})

Stop = Callable[[Record, int, StopReason, str], Awaitable[None]]


class PreRuns:
    """Watches the pre-runs that are under way."""

    def __init__(self, keeper: Keeper, stop: Stop, background: Background) -> None:
        self._keeper, self._stop, self._background = keeper, stop, background
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ending: set[str] = set()  # jobs whose pre-run is being ended

    def follow(self, record: Record) -> None:
        """Take note of what has become of a job's attempt."""
        if not record.pre_runs or record.phase not in GOING:
            self.drop(record.id)
        elif record.stored.pre_run_passed:
            self._begin_end(record, "")
        elif record.phase is Phase.RUNNING and record.id not in self._timers:
            most = record.spec.pre_run_seconds or 0.0
            left = specs.seconds(record.job.attempt.start_time) + most - time.time()
            left = min(max(0.0, left), most)  # whatever the clocks of nodes say
            timer = asyncio.get_running_loop().call_later(left, self._over, record, record.attempt_number)
            self._timers[record.id] = timer

    def drop(self, job_id: str) -> None:
        """A job's attempt is over."""
        if timer := self._timers.pop(job_id, None):
            timer.cancel()

    def progressed(self, record: Record, progress: job_pb2.Progress) -> None:
        """A job told how far it is in its pre-run; what was told before this attempt began is passed over."""
        attempt = record.job.attempt
        trains = progress.HasField("step_time") and progress.step > 0 and not progress.phase
        mine = specs.seconds(progress.step_time) >= specs.seconds(attempt.start_time)
        if trains and mine and record.phase is Phase.RUNNING:
            self._begin_end(record, f"it told of step {progress.step}")

    def _over(self, record: Record, number: int) -> None:
        self._timers.pop(record.id, None)
        if record.phase is Phase.RUNNING and record.attempt_number == number:
            self._begin_end(record, f"it still ran after {about(record.spec.pre_run_seconds or 0.0)}")

    def _begin_end(self, record: Record, why: str) -> None:
        if record.id not in self._ending:
            self._ending.add(record.id)
            self._background.start(self._end(record, record.attempt_number, why))

    async def _end(self, record: Record, number: int, why: str) -> None:
        """Keep that it has passed, then have it stopped."""
        try:
            if await self._keeper.insist(record, lambda stored: _passed(stored, number, why)):
                log.info("pre_run_passed", job=record.id, attempt=number, why=why)
            while record.phase in GOING and record.attempt_number == number and record.stored.pre_run_passed:
                try:
                    await self._stop(record, number, StopReason.SUPERSEDED, STOPPED)
                except grpc.aio.AioRpcError as error:
                    log.info("stop_delayed", job=record.id, error=errors.from_error(error).message)
                await asyncio.sleep(STOP_AGAIN_SECONDS)
        finally:
            self._ending.discard(record.id)


def _passed(stored: records_pb2.StoredJob, number: int, why: str) -> bool:
    going = PHASES.from_wire(stored.job.phase) in GOING and stored.job.attempt.number == number
    if stored.pre_run_passed or not going:
        return False
    pass_pre_run(stored, why)
    return True
