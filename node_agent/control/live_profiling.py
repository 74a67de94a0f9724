"""Profiles of running attempts: their rate on fewer cores than they hold, measured on the job itself.

The task of a profile narrows the attempt's cores and measures, one core count after the other, and whatever ends it,
its last acts are the same: the attempt gets all of its cores again, and only then is the end told. A job that tells
no step is not touched at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.rate_meter import Measured, Meter, Patience
from cotenant.node_agent.runtime.attempt_status import AttemptKey, duration, timestamp
from cotenant.node_agent.runtime.runtime_port import Runtime
from cotenant.rpc.task_group import Background
from cotenant.v1 import node_service_pb2

log = structlog.get_logger()

BUDGET_SECONDS_DEFAULT = 600.0
CORE_COUNTS_MAX = 64
PATIENCE = Patience()
STEPS_WAITING_MAX = 1024
RESTORE_RETRY_SECONDS = 1.0
CLOSE_SECONDS_MAX = 5.0

T = TypeVar("T")
Tell = Callable[[node_service_pb2.ProfileReport], None]


class Silent(Exception):
    """The job told no step for too long."""


class CannotNarrow(Exception):
    """The runtime does not let the attempt have so few cores."""


@dataclass(slots=True, eq=False)
class Profile:
    """One that is under way: `left` are the core counts that nothing was told of yet."""

    key: AttemptKey
    order: node_service_pb2.ProfileOrder
    left: list[int]
    before: Profile | None = None
    why: str = ""
    steps: asyncio.Queue[tuple[int, float, str]] = field(default_factory=lambda: asyncio.Queue(STEPS_WAITING_MAX))
    task: asyncio.Task[None] | None = None

    @property
    def budget_seconds(self) -> float:
        """How long it may take."""
        told = self.order.budget.ToMicroseconds() / 1e6
        return told if told > 0 else BUDGET_SECONDS_DEFAULT

    def hear(self, step: int, phase: str, now: float) -> None:
        """Take a step that the job told; where nobody has looked for very long, the oldest is lost."""
        if self.steps.full():
            self.steps.get_nowait()
        self.steps.put_nowait((step, now, phase))

    def report(self, **fields: object) -> node_service_pb2.ProfileReport:
        """Something to tell of it."""
        return node_service_pb2.ProfileReport(
            job_id=self.key.job_id,
            number=self.key.number,
            time=timestamp(time.time()),
            **fields,  # type: ignore[arg-type]  # as the message has them
        )


class Profiles:
    """At most one profile of each attempt at a time."""

    def __init__(
        self, runtime: Runtime, progress: ProgressReader, tell: Tell, patience: Patience | None = None
    ) -> None:
        self._runtime = runtime
        self._progress = progress
        self._tell = tell
        self._patience = patience or PATIENCE
        self._under_way: dict[AttemptKey, Profile] = {}
        self._background = Background()
        self._closing = False

    def refuse(self, order: node_service_pb2.ProfileOrder, why: str) -> None:
        """Answer an order that cannot be obeyed."""
        log.info("profile_refused", attempt=f"{order.job_id}/{order.number}", why=why)
        profile = Profile(AttemptKey(order.job_id, order.number), order, list(order.cores))
        self._tell_rest(profile, why)

    def begin(self, order: node_service_pb2.ProfileOrder) -> None:
        """Measure; the same order again changes nothing, another one takes the place of the first."""
        key = AttemptKey(order.job_id, order.number)
        known = self._under_way.get(key)
        if known is not None and known.order == order and not known.why:
            return
        if order.steps < 1 or len(order.cores) > CORE_COUNTS_MAX:
            self.refuse(order, f"a profile has at least 1 step and at most {CORE_COUNTS_MAX} core counts")
            return
        if self._closing:
            self.refuse(order, "the agent is shutting down")
            return
        profile = self._under_way[key] = Profile(key, order, list(order.cores), known)
        profile.task = self._background.start(self._run(profile))

    def under_way(self, key: AttemptKey) -> bool:
        """Whether an attempt has one."""
        return key in self._under_way

    async def end(self, key: AttemptKey, why: str) -> None:
        """End an attempt's profile, if it has one; it has all of its cores when this returns."""
        if known := self._under_way.get(key):
            await self._end(known, why)

    async def _end(self, profile: Profile, why: str) -> None:
        if not profile.why:
            profile.why = why
            assert profile.task is not None
            profile.task.cancel()
        await asyncio.wait([one.task for one in (profile, profile.before) if one and one.task])
        if self._under_way.get(profile.key) is profile:  # it had not even begun
            del self._under_way[profile.key]
            self._tell_rest(profile, profile.why)

    async def _run(self, profile: Profile) -> None:
        if profile.before is not None:
            await self._end(profile.before, "another profile was ordered")
            profile.before = None
        log.info("profile_began", attempt=str(profile.key), cores=profile.left, steps=profile.order.steps)
        why = ""
        self._progress.profile(profile.key, profile.hear)
        try:
            async with asyncio.timeout(profile.budget_seconds):
                await self._measure_all(profile)
        except TimeoutError:
            why = f"its budget of {profile.budget_seconds:g} s is used up"
        except Silent as silent:
            why = str(silent)
        except asyncio.CancelledError:
            why = profile.why or "the agent is shutting down"
        except Exception as error:  # a stranger's runtime may raise whatever it likes
            log.exception("profile_failed", attempt=str(profile.key))
            why = f"it failed: {type(error).__name__}: {error}"
        profile.why = profile.why or why or "over"
        await self._restore(profile)
        self._progress.profile(profile.key, None)
        if self._under_way.get(profile.key) is profile:
            del self._under_way[profile.key]
        log.info("profile_ended", attempt=str(profile.key), why=why)
        self._tell_rest(profile, why)

    async def _measure_all(self, profile: Profile) -> None:
        await self._next_step(profile)  # a job that tells nothing keeps all of its cores
        silent = 0
        for cores in list(profile.left):
            message, measured = "", None
            try:
                measured = await self._measure(profile, cores)
            except CannotNarrow as refused:
                message = str(refused)
            except Silent as told:
                message, silent = str(told), silent + 1
            profile.left.remove(cores)
            self._tell(_result(profile, cores, measured, message))
            if silent > 1:
                raise Silent(message)

    async def _measure(self, profile: Profile, cores: int) -> Measured:
        if reason := await undivided(self._runtime.narrow(profile.key, cores)):
            raise CannotNarrow(reason)
        while not profile.steps.empty():  # told before the change
            profile.steps.get_nowait()
        meter = Meter(profile.order.steps, self._patience, time.monotonic())
        while True:
            if measured := meter.take(*await self._next_step(profile)):
                return measured

    async def _next_step(self, profile: Profile) -> tuple[int, float, str]:
        """The next step that the job tells. Raises `Silent`."""
        seconds = self._patience.silence_seconds
        try:
            async with asyncio.timeout(seconds):
                return await profile.steps.get()
        except TimeoutError:
            raise Silent(f"the job told no step for {seconds:g} s") from None

    async def _restore(self, profile: Profile) -> None:
        """Give all cores back; it is tried until it succeeds or nothing runs any more."""
        while reason := await undivided(self._runtime.narrow(profile.key, None)):
            log.error("cores_not_given_back", attempt=str(profile.key), why=reason)
            await asyncio.sleep(RESTORE_RETRY_SECONDS)

    def _tell_rest(self, profile: Profile, why: str) -> None:
        for cores in profile.left:
            self._tell(_result(profile, cores, None, why))
        self._tell(profile.report(done=True, message=why))

    async def close(self) -> None:
        """End all profiles, with all cores back and the ends told; what cannot be, the next agent will see to."""
        self._closing = True
        ends = [self.end(key, "the agent is shutting down") for key in list(self._under_way)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), CLOSE_SECONDS_MAX)
        await self._background.close()


def _result(profile: Profile, cores: int, measured: Measured | None, message: str) -> node_service_pb2.ProfileReport:
    if measured is None:
        return profile.report(cores=cores, message=message)
    return profile.report(
        cores=cores,
        rate_per_second=measured.rate_per_second,
        steps=measured.steps,
        window=duration(measured.seconds),
    )


async def undivided(work: Coroutine[Any, Any, T]) -> T:
    """Do something to its end also where we are cancelled in between: a thread cannot be called back."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
