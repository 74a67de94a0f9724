"""Live profiling: measures running attempts' rates on fewer cores than they hold.

The task of a profile narrows the attempt's cores and measures one core count after the other. However it ends, its last
steps are the same: it gives all cores back to the attempt, and only then reports the end. A job that reports no steps
is not narrowed at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.rate_meter import Measurement, MeterTimeouts, RateMeter
from cotenant.node_agent.runtime.attempt_status import AttemptKey, duration, timestamp
from cotenant.node_agent.runtime.runtime_port import Runtime
from cotenant.rpc.task_group import BackgroundTasks

log = structlog.get_logger()

BUDGET_SECONDS_DEFAULT = 600.0
CORE_COUNTS_MAX = 64
TIMEOUTS = MeterTimeouts()
STEPS_WAITING_MAX = 1024
RESTORE_RETRY_SECONDS = 1.0
CLOSE_SECONDS_MAX = 5.0

T = TypeVar("T")
SendReport = Callable[[agent_pb2.ProfileReport], None]


class NoProgress(Exception):
    """The job reported no step for too long."""


class CannotNarrow(Exception):
    """The runtime refuses to narrow the attempt to this core count."""


@dataclass(slots=True, eq=False)
class Profile:
    """A running profile: `left` are the core counts without a report yet."""

    key: AttemptKey
    order: agent_pb2.ProfileOrder
    left: list[int]
    before: Profile | None = None
    why: str = ""
    steps: asyncio.Queue[tuple[int, float, str]] = field(default_factory=lambda: asyncio.Queue(STEPS_WAITING_MAX))
    task: asyncio.Task[None] | None = None

    @property
    def budget_seconds(self) -> float:
        """The time limit of the profile."""
        seconds = self.order.budget.ToMicroseconds() / 1e6
        return seconds if seconds > 0 else BUDGET_SECONDS_DEFAULT

    def record_step(self, step: int, phase: str, now: float) -> None:
        """Queue a step that the job reported; if the queue is full, drop the oldest."""
        if self.steps.full():
            self.steps.get_nowait()
        self.steps.put_nowait((step, now, phase))

    def report(self, **fields: object) -> agent_pb2.ProfileReport:
        """Return a report of this profile."""
        return agent_pb2.ProfileReport(
            job_id=self.key.job_id,
            number=self.key.number,
            time=timestamp(time.time()),
            **fields,  # type: ignore[arg-type]  # fields of the message
        )


class LiveProfiler:
    """Runs at most one profile per attempt."""

    def __init__(
        self, runtime: Runtime, progress: ProgressReader, send_report: SendReport, timeouts: MeterTimeouts | None = None
    ) -> None:
        self._runtime = runtime
        self._progress = progress
        self._send_report = send_report
        self._timeouts = timeouts or TIMEOUTS
        self._in_progress: dict[AttemptKey, Profile] = {}
        self._background = BackgroundTasks()
        self._closing = False

    def refuse(self, order: agent_pb2.ProfileOrder, why: str) -> None:
        """Refuse an order for a profile."""
        log.info("profile_refused", attempt=f"{order.job_id}/{order.number}", why=why)
        profile = Profile(AttemptKey(order.job_id, order.number), order, list(order.cores))
        self._report_remaining(profile, why)

    def start(self, order: agent_pb2.ProfileOrder) -> None:
        """Start a profile; a repeated order has no effect, a different one replaces the running profile."""
        key = AttemptKey(order.job_id, order.number)
        known = self._in_progress.get(key)
        if known is not None and known.order == order and not known.why:
            return
        if order.steps < 1 or len(order.cores) > CORE_COUNTS_MAX:
            self.refuse(order, f"a profile has at least 1 step and at most {CORE_COUNTS_MAX} core counts")
            return
        if self._closing:
            self.refuse(order, "the agent is shutting down")
            return
        profile = self._in_progress[key] = Profile(key, order, list(order.cores), known)
        profile.task = self._background.start(self._run(profile))

    def in_progress(self, key: AttemptKey) -> bool:
        """Return whether an attempt is being profiled."""
        return key in self._in_progress

    async def end(self, key: AttemptKey, why: str) -> None:
        """End an attempt's profile, if any; the attempt has all of its cores when this returns."""
        if known := self._in_progress.get(key):
            await self._end(known, why)

    async def _end(self, profile: Profile, why: str) -> None:
        if not profile.why:
            profile.why = why
            assert profile.task is not None
            profile.task.cancel()
        await asyncio.wait([each.task for each in (profile, profile.before) if each and each.task])
        if self._in_progress.get(profile.key) is profile:  # it had not started
            del self._in_progress[profile.key]
            self._report_remaining(profile, profile.why)

    async def _run(self, profile: Profile) -> None:
        if profile.before is not None:
            await self._end(profile.before, "replaced by another profile")
            profile.before = None
        log.info("profile_started", attempt=str(profile.key), cores=profile.left, steps=profile.order.steps)
        why = ""
        self._progress.profile(profile.key, profile.record_step)
        try:
            async with asyncio.timeout(profile.budget_seconds):
                await self._measure_all(profile)
        except TimeoutError:
            why = f"its budget of {profile.budget_seconds:g} s is exhausted"
        except NoProgress as silent:
            why = str(silent)
        except asyncio.CancelledError:
            why = profile.why or "the agent is shutting down"
        except Exception as error:  # a third-party runtime may raise anything
            log.exception("profile_failed", attempt=str(profile.key))
            why = f"failed: {type(error).__name__}: {error}"
        profile.why = profile.why or why or "over"
        await self._restore(profile)
        self._progress.profile(profile.key, None)
        if self._in_progress.get(profile.key) is profile:
            del self._in_progress[profile.key]
        log.info("profile_ended", attempt=str(profile.key), why=why)
        self._report_remaining(profile, why)

    async def _measure_all(self, profile: Profile) -> None:
        await self._next_step(profile)  # a job that reports nothing keeps all of its cores
        silent = 0
        for cores in list(profile.left):
            message, measured = "", None
            try:
                measured = await self._measure(profile, cores)
            except CannotNarrow as refused:
                message = str(refused)
            except NoProgress as error:
                message, silent = str(error), silent + 1
            profile.left.remove(cores)
            self._send_report(_result(profile, cores, measured, message))
            if silent > 1:
                raise NoProgress(message)

    async def _measure(self, profile: Profile, cores: int) -> Measurement:
        if reason := await uninterrupted(self._runtime.narrow(profile.key, cores)):
            raise CannotNarrow(reason)
        while not profile.steps.empty():  # reported before the change
            profile.steps.get_nowait()
        meter = RateMeter(profile.order.steps, self._timeouts, time.monotonic())
        while True:
            if measured := meter.update(*await self._next_step(profile)):
                return measured

    async def _next_step(self, profile: Profile) -> tuple[int, float, str]:
        """Return the next step that the job reports. Raises `NoProgress`."""
        seconds = self._timeouts.silence_seconds
        try:
            async with asyncio.timeout(seconds):
                return await profile.steps.get()
        except TimeoutError:
            raise NoProgress(f"the job reported no step for {seconds:g} s") from None

    async def _restore(self, profile: Profile) -> None:
        """Give all cores back; retry until it succeeds or the attempt has ended."""
        while reason := await uninterrupted(self._runtime.narrow(profile.key, None)):
            log.error("cores_release_failed", attempt=str(profile.key), why=reason)
            await asyncio.sleep(RESTORE_RETRY_SECONDS)

    def _report_remaining(self, profile: Profile, why: str) -> None:
        for cores in profile.left:
            self._send_report(_result(profile, cores, None, why))
        self._send_report(profile.report(done=True, message=why))

    async def close(self) -> None:
        """End all profiles, give all cores back and report the ends; the next agent completes what times out."""
        self._closing = True
        ends = [self.end(key, "the agent is shutting down") for key in list(self._in_progress)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), CLOSE_SECONDS_MAX)
        await self._background.close()


def _result(profile: Profile, cores: int, measured: Measurement | None, message: str) -> agent_pb2.ProfileReport:
    if measured is None:
        return profile.report(cores=cores, message=message)
    return profile.report(
        cores=cores,
        rate_per_second=measured.rate_per_second,
        steps=measured.steps,
        window=duration(measured.seconds),
    )


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine to its end even if this task is cancelled: a thread cannot be interrupted."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
