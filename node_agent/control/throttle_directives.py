"""Applies contention's directives: throttles attempts on this node, and releases them again whatever happens.

Theory of operation. A directive is a lease. Contention renews it with every sample while its incident is open; if
contention falls silent, is replaced by a process that does not know of the incident, or cannot be reached, the lease
expires and the attempt is released. So no attempt stays throttled on the word of a process that is gone. Throttles of
an earlier agent continue under a new lease that starts with this agent, because its samples report them to contention.

The newest directive for an attempt wins. Each throttled attempt has one task that reconciles the kernel's state with
the wanted one; a repeated directive only renews the lease. A release is retried until it succeeds or nothing runs.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from cotenant import telemetry
from cotenant.agent.v1 import sample_service_pb2
from cotenant.core.model.throttle import FREE, Throttle
from cotenant.node_agent.control.attempt import Attempt, Attempts
from cotenant.node_agent.control.live_profiling import LiveProfiler
from cotenant.node_agent.control.progress_reader import ProgressReader
from cotenant.node_agent.control.throttles import ThrottleLease, Throttles, describe_throttle
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.runtime_port import ThrottleState
from cotenant.rpc.task_group import BackgroundTasks
from cotenant.v1 import contention_service_pb2

log = structlog.get_logger()

SILENT_SECONDS_MAX = 60.0
SILENT_WINDOWS_MAX = 4  # with long windows
DISCONNECTED_SECONDS_MAX = 10.0
RELEASE_RETRY_SECONDS = 1.0
CLOSE_SECONDS_MAX = 5.0
REASON_LENGTH_MAX = 500

CHANGES = telemetry.counter("cotenant.agent.throttles", "{attempt}", "Changes of attempts' throttles.")


class ThrottleDirectives:
    """Keeps the throttles as contention directs."""

    def __init__(
        self,
        throttles: Throttles,
        attempts: Attempts,
        profiles: LiveProfiler,
        progress: ProgressReader,
        *,
        window_seconds: float,
        bandwidth_enforced: bool = False,
    ) -> None:
        self._throttles, self._runtime, self._leases = throttles, throttles.runtime, throttles.leases
        self._attempts, self._profiles, self._progress = attempts, profiles, progress
        self._bandwidth_enforced = bandwidth_enforced
        self._lease_seconds = max(SILENT_SECONDS_MAX, SILENT_WINDOWS_MAX * window_seconds)
        self._background = BackgroundTasks()
        self._closing = False

    def recover(self) -> None:
        """Continue the throttles that an earlier agent applied."""
        for key in list(self._attempts):
            if self._runtime is not None and not (held := self._runtime.held(key).throttle).free:
                log.info("throttle_found", attempt=str(key), throttle=describe_throttle(held))
                self._set_target(key, held, "throttled before the agent started", "")

    # Directives from contention.

    def apply_directive(self, directive: sample_service_pb2.Directive) -> None:
        """Throttle or release an attempt as directed."""
        key = AttemptKey(directive.job_id, directive.number)
        attempt = self._attempts.get(key)
        if self._runtime is None:
            log.warning("directive_ignored", attempt=str(key), why="the runtime cannot throttle attempts")
        elif attempt is None or attempt.status.ended or attempt.stop_grace_seconds is not None:
            log.info("directive_obsolete", attempt=str(key), directive=directive.id, why=_why_ignored(attempt))
        elif not 0 <= directive.share <= 1 or is_invalid(directive.throttle):
            log.error("directive_refused", attempt=str(key), directive=directive.id, share=directive.share)
        else:
            self._set_target(
                key, self._throttle_of(directive, attempt), directive.reason[:REASON_LENGTH_MAX], directive.id
            )

    def _throttle_of(self, directive: sample_service_pb2.Directive, attempt: Attempt) -> Throttle:
        if directive.HasField("throttle"):
            wanted = directive.throttle
            percent = wanted.bandwidth_percent or FREE.bandwidth_percent
            return Throttle(percent, wanted.cores, wanted.idle, wanted.suspended)
        cores = [len(task.core_ids) for task in attempt.assignment.allocation.tasks]
        best_effort = attempt.assignment.spec.best_effort
        return throttle_for_share(directive.share, max(cores, default=0), best_effort, self._bandwidth_enforced)

    def ended(self, key: AttemptKey) -> None:
        """End the throttle of an attempt that has ended."""
        if lease := self._leases.get(key):
            lease.changed.set()

    def disconnected(self) -> None:
        """Shorten all leases: the stream is lost, and throttles that are not renewed soon are released."""
        soon = time.monotonic() + DISCONNECTED_SECONDS_MAX
        for lease in self._leases.values():
            lease.until = min(lease.until, soon)
            lease.changed.set()

    def _set_target(self, key: AttemptKey, wanted: Throttle, reason: str, directive: str) -> None:
        until = time.monotonic() + self._lease_seconds
        lease = self._leases.get(key)
        if lease is None:
            if self._closing or (wanted.free and self._throttles.held(key).throttle.free):
                return
            trace_parent = self._attempts[key].assignment.trace_parent
            lease = self._leases[key] = ThrottleLease(wanted, reason, until, directive, trace_parent)
            lease.task = self._background.start(self._reconcile(key, lease))
        elif lease.wanted != wanted or lease.reason != reason:
            lease.wanted, lease.reason, lease.directive = wanted, reason, directive
            lease.changed.set()
        lease.until = until

    # Reconciliation.

    async def _reconcile(self, key: AttemptKey, lease: ThrottleLease) -> None:
        """Apply the wanted throttle whenever it changes, until the attempt is released or has ended."""
        try:
            while True:
                lease.changed.clear()
                wanted = lease.wanted
                done = await self._apply(key, lease, wanted)
                if self._is_over(key) or (wanted.free and done and lease.wanted == wanted):
                    return
                await self._wait(lease, RELEASE_RETRY_SECONDS if wanted.free and not done else None)
                if self._is_over(key):
                    return
                if time.monotonic() >= lease.until and not lease.wanted.free:
                    log.warning("throttle_expired", attempt=str(key), throttle=describe_throttle(lease.wanted))
                    lease.wanted, lease.reason = FREE, "contention no longer renews the throttle"
        finally:
            _record(key, lease)
            if self._leases.get(key) is lease:
                del self._leases[key]
            self._progress.report_soon(key)

    def _is_over(self, key: AttemptKey) -> bool:
        attempt = self._attempts.get(key)
        return attempt is None or attempt.status.ended or attempt.stop_grace_seconds is not None

    async def _wait(self, lease: ThrottleLease, seconds: float | None) -> None:
        """Wait for a change, for `seconds` at most, and no longer than the lease lasts."""
        left = max(0.0, lease.until - time.monotonic())
        try:
            async with asyncio.timeout(left if seconds is None else seconds):
                await lease.changed.wait()
        except TimeoutError:
            return

    async def _apply(self, key: AttemptKey, lease: ThrottleLease, wanted: Throttle) -> bool:
        """Apply a throttle; return False if a part of it was refused."""
        assert self._runtime is not None
        before = self._runtime.held(key)
        if not wanted.free:
            await self._profiles.end(key, "the attempt is being throttled")
        try:
            held = await self._runtime.throttle(key, wanted)
        except Exception as error:  # a third-party runtime may raise anything
            log.exception("runtime_failed", attempt=str(key))
            held = ThrottleState(before.throttle, (f"the runtime failed: {type(error).__name__}: {error}",))
        if held.throttle != lease.holds:
            _record(key, lease)
            lease.holds, lease.began, lease.because = held.throttle, time.time(), lease.reason
        if held != before:
            CHANGES.add()
            refused = {"refused": held.refused} if held.refused else {}
            log.info(
                "attempt_unthrottled" if held.throttle.free else "attempt_throttled",
                attempt=str(key), directive=lease.directive, throttle=describe_throttle(held.throttle),
                why=lease.reason, **refused,
            )  # fmt: skip
        self._progress.report_soon(key)
        return not held.refused

    async def close(self) -> None:
        """Release all attempts: leases are not renewed without an agent. The next agent completes what times out."""
        self._closing = True
        for lease in self._leases.values():
            lease.wanted, lease.reason = FREE, "the agent is shutting down"
            lease.changed.set()
        tasks = [lease.task for lease in self._leases.values() if lease.task]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS_MAX)
        await self._background.close()


def _record(key: AttemptKey, lease: ThrottleLease) -> None:
    """Record in the job's trace how, why and for how long it was throttled until now."""
    if not lease.holds.free:
        telemetry.record(
            "throttle",
            lease.trace_parent,
            lease.began,
            time.time(),
            job=key.job_id,
            attempt=key.number,
            throttle=describe_throttle(lease.holds),
            why=lease.because,
        )


def throttle_for_share(share: float, cores: int, best_effort: bool, bandwidth_enforced: bool) -> Throttle:
    """Return a throttle for a share of an attempt's full speed, 0 to 1, where each task holds at most `cores`.

    Fewer cores come first, because they slow down any work. A task with one core can only be given less CPU time that
    other tasks want, or less memory bandwidth.

    >>> throttle_for_share(0.5, 4, False, False).cores, throttle_for_share(0.5, 1, True, False).idle
    (2, True)
    >>> throttle_for_share(0, 4, False, False).suspended, throttle_for_share(1, 4, True, True) == FREE
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


def is_invalid(throttle: contention_service_pb2.Throttle) -> bool:
    """Return whether a throttle has invalid values."""
    return not (0 <= throttle.bandwidth_percent <= FREE.bandwidth_percent and throttle.cores >= 0)


def _why_ignored(attempt: Attempt | None) -> str:
    if attempt is None:
        return "unknown on this node"
    return "already ended" if attempt.status.ended else "being stopped"
