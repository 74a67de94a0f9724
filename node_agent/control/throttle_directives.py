"""Carries out what contention directs: holds attempts back on this node, and lets them go again whatever happens.

Theory of operation. A directive is a lease. Contention renews it with every sample for as long as its incident is open;
where it falls silent, is replaced by one that knows nothing of it, or cannot be reached, the lease runs out and the
attempt is free. So nobody is held back on the word of somebody who is no longer there. What an earlier agent held back
is held on under a lease that begins with us, for the samples tell contention of it.

The newest directive for an attempt wins, and each attempt has one task that brings the kernel to it; one that comes
again only renews. Letting go is tried until it succeeds or nothing runs any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from cotenant import telemetry
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.control.attempt_manager import Attempt
from cotenant.node_agent.control.live_profiling import Profiles
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.runtime_port import Held, Runtime, Throttles
from cotenant.rpc.task_group import Background
from cotenant.v1 import contention_service_pb2

log = structlog.get_logger()

SILENT_SECONDS_MAX = 60.0
SILENT_WINDOWS_MAX = 4  # where windows are long
AWAY_SECONDS_MAX = 10.0
LETTING_GO_RETRY_SECONDS = 1.0
CLOSE_SECONDS_MAX = 5.0
REASON_LENGTH_MAX = 500

CHANGES = telemetry.counter("cotenant.agent.throttles", "{attempt}", "Changes of how attempts are held back.")


@dataclass(slots=True)
class Lease:
    """What is wanted of an attempt, why, and until when on the monotonic clock.

    `holds` is how it has been held back since `began`, in unix time, and `because` why.
    """

    wanted: Throttle
    reason: str
    until: float
    directive: str = ""
    trace_parent: str = ""
    holds: Throttle = FREE
    began: float = 0.0
    because: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Throttling:
    """All attempts that are held back, or are being let go."""

    def __init__(
        self,
        runtime: Runtime,
        profiles: Profiles,
        attempts: Callable[[], Mapping[AttemptKey, Attempt]],
        changed: Callable[[AttemptKey], None],
        *,
        window_seconds: float,
        bandwidth_enforced: bool = False,
    ) -> None:
        self._runtime = runtime if isinstance(runtime, Throttles) else None
        self._profiles, self._attempts, self._changed = profiles, attempts, changed
        self._bandwidth_enforced = bandwidth_enforced
        self._lease_seconds = max(SILENT_SECONDS_MAX, SILENT_WINDOWS_MAX * window_seconds)
        self._leases: dict[AttemptKey, Lease] = {}
        self._background = Background()
        self._closing = False

    def take_up(self) -> None:
        """Go on with what an agent before us held back."""
        for key in list(self._attempts()):
            if self._runtime is not None and not (held := self._runtime.held(key).throttle).free:
                log.info("throttle_found", attempt=str(key), throttle=words(held))
                self._want(key, held, "it was held back when the agent began", "")

    def held_back(self, key: AttemptKey) -> bool:
        """Whether an attempt is held back, or about to be: its rate says nothing of its cores."""
        return key in self._leases or not self.held(key).throttle.free

    def holding(self) -> bool:
        """Whether any attempt is held back, or about to be, or is being let go."""
        return bool(self._leases)

    def held(self, key: AttemptKey) -> Held:
        """How an attempt is held back now."""
        return self._runtime.held(key) if self._runtime is not None else Held()

    def told(self, key: AttemptKey) -> str:
        """How and why an attempt is held back, in one sentence; empty where it is not."""
        throttle, lease = self.held(key).throttle, self._leases.get(key)
        if throttle.free:
            return ""
        return f"{words(throttle)}: {lease.reason}" if lease is not None and lease.reason else words(throttle)

    # What contention says.

    def obey(self, directive: contention_service_pb2.Directive) -> None:
        """Hold an attempt back as it is said, or let it go."""
        key = AttemptKey(directive.job_id, directive.number)
        attempt = self._attempts().get(key)
        if self._runtime is None:
            log.warning("directive_ignored", attempt=str(key), why="the runtime cannot hold attempts back")
        elif attempt is None or attempt.status.ended or attempt.stop_grace_seconds is not None:
            log.info("directive_too_late", attempt=str(key), directive=directive.id, why=_why_not(attempt))
        elif not 0 <= directive.share <= 1 or wrong(directive.throttle):
            log.error("directive_refused", attempt=str(key), directive=directive.id, share=directive.share)
        else:
            self._want(key, self._throttle_of(directive, attempt), directive.reason[:REASON_LENGTH_MAX], directive.id)

    def _throttle_of(self, directive: contention_service_pb2.Directive, attempt: Attempt) -> Throttle:
        if directive.HasField("throttle"):
            said = directive.throttle
            return Throttle(said.bandwidth_percent or FREE.bandwidth_percent, said.cores, said.idle, said.suspended)
        cores = [len(task.core_ids) for task in attempt.assignment.allocation.tasks]
        best_effort = attempt.assignment.spec.best_effort
        return throttle_for(directive.share, max(cores, default=0), best_effort, self._bandwidth_enforced)

    def ended(self, key: AttemptKey) -> None:
        """An attempt has ended: it is not held back any more."""
        if lease := self._leases.get(key):
            lease.changed.set()

    def away(self) -> None:
        """The stream is lost: what is not renewed soon is let go."""
        soon = time.monotonic() + AWAY_SECONDS_MAX
        for lease in self._leases.values():
            lease.until = min(lease.until, soon)
            lease.changed.set()

    def _want(self, key: AttemptKey, wanted: Throttle, reason: str, directive: str) -> None:
        until = time.monotonic() + self._lease_seconds
        lease = self._leases.get(key)
        if lease is None:
            if self._closing or (wanted.free and self.held(key).throttle.free):
                return
            trace_parent = self._attempts()[key].assignment.trace_parent
            lease = self._leases[key] = Lease(wanted, reason, until, directive, trace_parent)
            lease.task = self._background.start(self._carry_out(key, lease))
        elif lease.wanted != wanted or lease.reason != reason:
            lease.wanted, lease.reason, lease.directive = wanted, reason, directive
            lease.changed.set()
        lease.until = until

    # What is done.

    async def _carry_out(self, key: AttemptKey, lease: Lease) -> None:
        """Bring the kernel to what is wanted, again and again, until the attempt is free or has ended."""
        try:
            while True:
                lease.changed.clear()
                wanted = lease.wanted
                done = await self._bring_to(key, lease, wanted)
                if self._over(key) or (wanted.free and done and lease.wanted == wanted):
                    return
                await self._wait(lease, LETTING_GO_RETRY_SECONDS if wanted.free and not done else None)
                if self._over(key):
                    return
                if time.monotonic() >= lease.until and not lease.wanted.free:
                    log.warning("throttle_ran_out", attempt=str(key), throttle=words(lease.wanted))
                    lease.wanted, lease.reason = FREE, "contention does not say any more that it should be held back"
        finally:
            _record(key, lease)
            if self._leases.get(key) is lease:
                del self._leases[key]
            self._changed(key)

    def _over(self, key: AttemptKey) -> bool:
        attempt = self._attempts().get(key)
        return attempt is None or attempt.status.ended or attempt.stop_grace_seconds is not None

    async def _wait(self, lease: Lease, seconds: float | None) -> None:
        """Wait for news, at most so long, and no longer than the lease lasts."""
        left = max(0.0, lease.until - time.monotonic())
        try:
            async with asyncio.timeout(left if seconds is None else seconds):
                await lease.changed.wait()
        except TimeoutError:
            return

    async def _bring_to(self, key: AttemptKey, lease: Lease, wanted: Throttle) -> bool:
        """Have an attempt held back so; False where something of it was refused."""
        assert self._runtime is not None
        before = self._runtime.held(key)
        if not wanted.free:
            await self._profiles.end(key, "it is being held back")
        try:
            held = await self._runtime.throttle(key, wanted)
        except Exception as error:  # a stranger's runtime may raise whatever it likes
            log.exception("runtime_failed", attempt=str(key))
            held = Held(before.throttle, (f"the runtime failed: {type(error).__name__}: {error}",))
        if held.throttle != lease.holds:
            _record(key, lease)
            lease.holds, lease.began, lease.because = held.throttle, time.time(), lease.reason
        if held != before:
            CHANGES.add()
            refused = {"refused": held.refused} if held.refused else {}
            log.info(
                "attempt_freed" if held.throttle.free else "attempt_throttled",
                attempt=str(key), directive=lease.directive, throttle=words(held.throttle), why=lease.reason, **refused,
            )  # fmt: skip
        self._changed(key)
        return not held.refused

    async def close(self) -> None:
        """Let all go: nobody renews a lease while the agent is away. What is not done in time, the next agent finds."""
        self._closing = True
        for lease in self._leases.values():
            lease.wanted, lease.reason = FREE, "the agent is shutting down"
            lease.changed.set()
        tasks = [lease.task for lease in self._leases.values() if lease.task]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS_MAX)
        await self._background.close()


def _record(key: AttemptKey, lease: Lease) -> None:
    """Put into the job's trace for how long, how and why it was held back up to now."""
    if not lease.holds.free:
        telemetry.record(
            "throttle",
            lease.trace_parent,
            lease.began,
            time.time(),
            job=key.job_id,
            attempt=key.number,
            throttle=words(lease.holds),
            why=lease.because,
        )


def throttle_for(share: float, cores: int, best_effort: bool, bandwidth_enforced: bool) -> Throttle:
    """Find a way to a share of an attempt's full speed, from 0 to 1, where each task holds so many cores at most.

    Fewer cores come first, for they hold back whatever it does. A task with one core can do with less only of CPU time
    that somebody else wants, or of memory bandwidth.

    >>> throttle_for(0.5, 4, False, False).cores, throttle_for(0.5, 1, True, False).idle
    (2, True)
    >>> throttle_for(0, 4, False, False).suspended, throttle_for(1, 4, True, True) == FREE
    (True, True)
    """
    if share >= 1:
        return FREE
    if share <= 0:
        return Throttle(suspended=True)
    fewer = max(1, int(share * cores))
    if fewer < cores:
        return Throttle(cores=fewer)
    if best_effort:
        return Throttle(idle=True)
    return Throttle(bandwidth_percent=max(1, round(100 * share))) if bandwidth_enforced else FREE


def wrong(throttle: contention_service_pb2.Throttle) -> bool:
    """Whether a throttle cannot be meant."""
    return not (0 <= throttle.bandwidth_percent <= FREE.bandwidth_percent and throttle.cores >= 0)


def words(throttle: Throttle) -> str:
    """Say how something is held back.

    >>> words(Throttle(cores=2, idle=True)), words(FREE)
    ('on 2 of its cores, only with CPU time that nobody else wants', 'not held back')
    """
    ways = []
    if throttle.bandwidth_percent < FREE.bandwidth_percent:
        ways.append(f"with {throttle.bandwidth_percent} % of the memory bandwidth")
    if throttle.cores:
        ways.append(f"on {throttle.cores} of its cores")
    if throttle.idle:
        ways.append("only with CPU time that nobody else wants")
    if throttle.suspended:
        ways.append("suspended")
    return ", ".join(ways) or "not held back"


def _why_not(attempt: Attempt | None) -> str:
    if attempt is None:
        return "it is not known on this node"
    return "it has ended" if attempt.status.ended else "it is being stopped"
