"""Tracking of running attempts: advice, rates and profiles. `cpu_rebalancer` acts on what is learned here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.codec import specs
from cotenant.codec.estimates import core_relevant_parts
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.model.node_capabilities import Capability
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.prediction.rate_windows import RateWindows
from cotenant.core.sizing.resize import Resizes
from cotenant.internal.v1 import placement_service_pb2 as placement_pb2
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_store import AttemptStore
from cotenant.services.placement.attempts.job_classes import JobClasses
from cotenant.services.placement.attempts.tracked_attempt import TrackedAttempt, cores_held
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import LiveAttempt
from cotenant.v1 import job_pb2
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

REPORTS_PER_WINDOW = 12  # progress reports that are enough for a measurement window
PROFILE_LATE_SECONDS = 30.0  # how long after its budget a profile without an end report counts as over


class AttemptTracker:
    """Records advice, progress and profiles; marks nodes as changed where cores should be rebalanced."""

    def __init__(
        self,
        cluster: Cluster,
        attempts: AttemptStore,
        sessions: agent_sessions.Sessions,
        job_classes: JobClasses,
        allocator: CpuAllocator,
    ) -> None:
        self._cluster, self._attempts, self._sessions, self._job_classes = cluster, attempts, sessions, job_classes
        self._tracked: dict[str, TrackedAttempt] = {}
        self._windows: RateWindows | None = None  # None if the allocator does not use rates
        self._pause_seconds = 0
        self._taken: dict[str, int] = {}  # step time of the last report used, by job
        if isinstance(allocator, Resizes):
            self._windows = RateWindows(allocator.measure_seconds, allocator.warm_up_seconds)
            self._pause_seconds = int(allocator.measure_seconds / REPORTS_PER_WINDOW)

    def of(self, live: LiveAttempt) -> TrackedAttempt:
        """Return the tracked state of an attempt."""
        tracked = self._tracked.get(live.key[0])
        if tracked is None or tracked.number != live.key[1]:
            tracked = self._tracked[live.key[0]] = TrackedAttempt.begun(self._cluster, live)
        return tracked

    def forget(self) -> None:
        """Drop attempts that no longer exist."""
        for job_id in self._tracked.keys() - self._cluster.attempts.keys():
            del self._tracked[job_id]
            self._taken.pop(job_id, None)
            if self._windows:
                self._windows.drop(job_id)

    def advise(self, advice: Iterable[placement_pb2.Advice]) -> list[str]:
        """Apply advice; return one sentence for each piece that could not be applied."""
        refused: list[str] = []
        changed: list[LiveAttempt] = []
        for one in advice:
            live = self._cluster.attempts.get(one.job_id)
            if live is None or live.key[1] != one.number or live.state.ended:
                refused.append(f"{one.job_id}/{one.number}: no such attempt, or it has ended")
                continue
            if one.HasField("estimate") and self._take_estimate(live, one.estimate):
                changed.append(live)
            if one.HasField("time_limit"):
                self._limit_time(live, one.time_limit)
                changed.append(live)
            if one.HasField("profile") and (why := self._profile(live, one.profile)):
                refused.append(f"{one.job_id}/{one.number}: {why}")
        self._attempts.save(changed)
        return refused

    def _take_estimate(self, live: LiveAttempt, estimate: predictor_pb2.Estimate) -> bool:
        """Record an estimate; return True if it may change sizes and is therefore worth a commit."""
        worth = core_relevant_parts(estimate) != core_relevant_parts(live.record.estimate)
        live.record.estimate.CopyFrom(estimate)
        live.estimate_seconds, live.gang = time.time(), None
        self.of(live).estimate = None
        if worth:
            self._cluster.changed_nodes.update(live.nodes)
        return worth and bool(live.epoch)  # else its start is being committed, and its next change saves this

    def _limit_time(self, live: LiveAttempt, change: placement_pb2.ChangedTimeLimit) -> None:
        """Change an attempt's time limit and tell its agents, those that are away when they connect again."""
        live.record.spec.ClearField("time_limit")
        if change.HasField("limit"):
            live.record.spec.time_limit.CopyFrom(change.limit)
        if live.epoch:  # else it is assigned with the new limit
            for node_id in live.nodes:
                self._sessions.send(node_id, agent_sessions.time_limit_order(live))

    def _profile(self, live: LiveAttempt, plan: placement_pb2.ProfilePlan) -> str:
        """Order a profile of an attempt; return why it cannot be profiled, or ""."""
        if len(live.nodes) > 1:
            return f"it runs on {len(live.nodes)} nodes; only jobs on one node are profiled"
        if live.attempt.pre_run:
            return "it is a pre-run, whose rates do not apply to the whole job"
        if live.state is not AttemptState.RUNNING:
            return f"it is {live.state.value}; only running attempts are profiled"
        if live.target:
            return "its cores are being changed"
        node = self._cluster.nodes.get(live.nodes[0])
        if node and not node.capabilities.can(Capability.PROFILES):
            return f"the executor of {node.id} measures no profiles"
        if not self._sessions.send(live.nodes[0], agent_sessions.profile_order(live, plan)):
            return f"the agent of {live.nodes[0]} is disconnected"
        tracked = self.of(live)
        if not plan.cores:
            self._profile_over(live, tracked)
            return ""
        tracked.profile_until_seconds = time.monotonic() + specs.seconds(plan.budget) + PROFILE_LATE_SECONDS
        if self._windows:
            self._windows.hold(live.key[0])
        return ""

    def _profile_over(self, live: LiveAttempt, tracked: TrackedAttempt) -> None:
        tracked.profile_until_seconds = -math.inf
        self._cluster.changed_nodes.update(live.nodes)
        if self._windows:
            self._windows.release(live.key[0])

    def take_progress(self, report: agent_pb2.ProgressReport) -> None:
        """Record a job's progress; at the end of a window, record its rate for the cores that it holds."""
        progress = report.progress
        if self._windows is None or self._too_soon(report.job_id, progress):
            return
        live = self._cluster.attempts.get(report.job_id)
        if live is None or live.key[1] != report.number or not progress.HasField("step_time") or live.attempt.pre_run:
            return
        under = live.epoch, bool(live.target), progress.phase
        step = progress.phase_step if progress.phase else progress.step
        window = self._windows.take(report.job_id, under, step, specs.seconds(progress.step_time))
        if window is None or live.target or progress.phase:
            return  # validation, for example, runs at other rates than training
        tracked = self.of(live)
        if tracked.profiled(time.monotonic()):
            return
        tracked.rate_per_second = window.rate_per_second
        self._measured(live, tracked, cores_held(live, tracked), window.rate_per_second, window.seconds)
        if tracked.measured_epoch != live.epoch:  # the first window on these cores
            tracked.measured_epoch = live.epoch
            self._cluster.changed_nodes.update(live.nodes)

    def _too_soon(self, job_id: str, progress: job_pb2.Progress) -> bool:
        """Return whether a report may be skipped because the last one used is only a fraction of a window older.

        Thousands of reports arrive per second. Reports of phases other than training are all used: they end a window.
        """
        if progress.phase or not self._pause_seconds:
            return False
        at, last = progress.step_time.seconds, self._taken.get(job_id, 0)
        if 0 <= at - last < self._pause_seconds:
            return True
        self._taken[job_id] = at
        return False

    def take_profiled(self, report: agent_pb2.ProfileReport) -> None:
        """Record a rate measured by a profile, or the profile's end."""
        live = self._cluster.attempts.get(report.job_id)
        if live is None or live.key[1] != report.number:
            return
        tracked = self.of(live)
        if report.cores > 0 and 0 < report.rate_per_second < math.inf:
            self._measured(live, tracked, report.cores, report.rate_per_second, specs.seconds(report.window))
        if report.done:
            self._profile_over(live, tracked)

    def _measured(self, live: LiveAttempt, tracked: TrackedAttempt, cores: int, rate: float, seconds: float) -> None:
        if cores > 0 and tracked.track.add(cores, rate, seconds) and not tracked.track.drifted:
            self._job_classes.tracks.add(tracked.kind, cores, rate)
