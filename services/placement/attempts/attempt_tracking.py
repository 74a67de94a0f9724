"""What becomes known of running attempts: advice, rates, and profiles. What follows for their cores is `dealing`'s."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import structlog

from cotenant.codec import specs
from cotenant.codec.estimates import about_cores
from cotenant.core.model.lifecycle import AttemptState
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.prediction.rate_windows import RateWindows
from cotenant.core.sizing.resize import Resizes
from cotenant.services.placement.agents import agent_sessions
from cotenant.services.placement.attempts.attempt_store import Attempts
from cotenant.services.placement.attempts.job_classes import Kinds
from cotenant.services.placement.attempts.tracked_attempt import Followed, cores_of
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.live_records import Live
from cotenant.v1 import job_pb2
from cotenant.v1 import node_service_pb2 as node_pb2
from cotenant.v1 import placement_service_pb2 as placement_pb2
from cotenant.v1 import predictor_service_pb2 as predictor_pb2

log = structlog.get_logger()

REPORTS = 12  # so many reports of progress are enough for a window
PROFILE_LATE_SECONDS = 30.0  # after its budget, a profile of which nobody hears is taken as over


class Following:
    """Takes in advice, progress and profiles. Whoever deals cores hears of it by the nodes that are stirred."""

    def __init__(
        self,
        cluster: Cluster,
        attempts: Attempts,
        sessions: agent_sessions.Sessions,
        kinds: Kinds,
        allocator: CpuAllocator,
    ) -> None:
        self._cluster, self._attempts, self._sessions, self._kinds = cluster, attempts, sessions, kinds
        self._followed: dict[str, Followed] = {}
        self._windows: RateWindows | None = None  # only where something follows from them
        self._pause_seconds = 0
        self._taken: dict[str, int] = {}  # when the last report that was taken was told of
        if isinstance(allocator, Resizes):
            self._windows = RateWindows(allocator.measure_seconds, allocator.warm_up_seconds)
            self._pause_seconds = int(allocator.measure_seconds / REPORTS)

    def of(self, live: Live) -> Followed:
        """What is known of an attempt."""
        followed = self._followed.get(live.key[0])
        if followed is None or followed.number != live.key[1]:
            followed = self._followed[live.key[0]] = Followed.begun(self._cluster, live)
        return followed

    def forget(self) -> None:
        """Forget attempts that are gone."""
        for job_id in self._followed.keys() - self._cluster.attempts.keys():
            del self._followed[job_id]
            self._taken.pop(job_id, None)
            if self._windows:
                self._windows.drop(job_id)

    def advise(self, advice: Iterable[placement_pb2.Advice]) -> list[str]:
        """Follow advice; say of what could not be followed why not, a sentence each."""
        refused: list[str] = []
        changed: list[Live] = []
        for one in advice:
            live = self._cluster.attempts.get(one.job_id)
            if live is None or live.key[1] != one.number or live.state.ended:
                refused.append(f"{one.job_id}/{one.number}: there is no such attempt, or it has ended")
                continue
            if one.HasField("estimate") and self._take_estimate(live, one.estimate):
                changed.append(live)
            if one.HasField("profile") and (why := self._profile(live, one.profile)):
                refused.append(f"{one.job_id}/{one.number}: {why}")
        self._attempts.keep(changed)
        return refused

    def _take_estimate(self, live: Live, estimate: predictor_pb2.Estimate) -> bool:
        """Note an estimate; True where sizes may follow from what is new in it, so that it is worth a commit."""
        worth = about_cores(estimate) != about_cores(live.record.estimate)
        live.record.estimate.CopyFrom(estimate)
        live.told_seconds, live.gang = time.time(), None
        self.of(live).estimate = None
        if worth:
            self._cluster.stirred.update(live.nodes)
        return worth and bool(live.epoch)  # else it is being committed, and this is kept with its next change

    def _profile(self, live: Live, plan: placement_pb2.ProfilePlan) -> str:
        """Let an attempt be measured; why not, where that cannot be."""
        if len(live.nodes) > 1:
            return f"it runs on {len(live.nodes)} nodes, and only what runs on one is profiled"
        if live.attempt.pre_run:
            return "it is a pre-run, which tells nothing of the whole job"
        if live.state is not AttemptState.RUNNING:
            return f"it is {live.state.value}, and only what runs is profiled"
        if live.target:
            return "its cores are being changed"
        if not self._sessions.send(live.nodes[0], agent_sessions.profile_order(live, plan)):
            return f"the agent of {live.nodes[0]} is away"
        followed = self.of(live)
        if not plan.cores:
            self._profile_over(live, followed)
            return ""
        followed.profile_until_seconds = time.monotonic() + specs.seconds(plan.budget) + PROFILE_LATE_SECONDS
        if self._windows:
            self._windows.hold(live.key[0])
        return ""

    def _profile_over(self, live: Live, followed: Followed) -> None:
        followed.profile_until_seconds = -math.inf
        self._cluster.stirred.update(live.nodes)
        if self._windows:
            self._windows.release(live.key[0])

    def take_progress(self, told: node_pb2.ProgressReport) -> None:
        """Note how far a job is; where a window of its rate ends, that counts on what it holds."""
        progress = told.progress
        if self._windows is None or self._too_soon(told.job_id, progress):
            return
        live = self._cluster.attempts.get(told.job_id)
        if live is None or live.key[1] != told.number or not progress.HasField("step_time") or live.attempt.pre_run:
            return
        under = live.epoch, bool(live.target), progress.phase
        step = progress.phase_step if progress.phase else progress.step
        window = self._windows.take(told.job_id, under, step, specs.seconds(progress.step_time))
        if window is None or live.target or progress.phase:
            return  # rates of validation, say, are others than those of training
        followed = self.of(live)
        if followed.profiled(time.monotonic()):
            return
        followed.rate_per_second = window.rate_per_second
        self._measured(live, followed, cores_of(live, followed), window.rate_per_second, window.seconds)
        if followed.measured_epoch != live.epoch:  # the first on these cores
            followed.measured_epoch = live.epoch
            self._cluster.stirred.update(live.nodes)

    def _too_soon(self, job_id: str, progress: job_pb2.Progress) -> bool:
        """Whether a report may be passed over, since the last was taken so short a part of a window before.

        Thousands come in a second. Those of another phase than training are all taken: they end a window.
        """
        if progress.phase or not self._pause_seconds:
            return False
        at, last = progress.step_time.seconds, self._taken.get(job_id, 0)
        if 0 <= at - last < self._pause_seconds:
            return True
        self._taken[job_id] = at
        return False

    def take_profiled(self, report: node_pb2.ProfileReport) -> None:
        """Note a rate that was measured for a profile, or its end."""
        live = self._cluster.attempts.get(report.job_id)
        if live is None or live.key[1] != report.number:
            return
        followed = self.of(live)
        if report.cores > 0 and 0 < report.rate_per_second < math.inf:
            self._measured(live, followed, report.cores, report.rate_per_second, specs.seconds(report.window))
        if report.done:
            self._profile_over(live, followed)

    def _measured(self, live: Live, followed: Followed, cores: int, rate: float, seconds: float) -> None:
        if cores > 0 and followed.track.add(cores, rate, seconds) and not followed.track.drifted:
            self._kinds.tracks.add(followed.kind, cores, rate)
