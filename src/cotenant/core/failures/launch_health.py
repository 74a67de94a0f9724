"""Decides which nodes are held because launches fail there, and when they are tried again.

Two kinds of sick nodes are neither dead nor silent. One refuses to launch: a control group is read-only, a disk is
full. A *black hole* launches everything, and everything fails there within seconds, so that it drains the whole
backlog. Both are held after a few failures. A held node gets one *canary* at a time, a queued job, at intervals that
double. A canary that is launched (on a black hole: that survives) ends the hold.

A job that is broken by itself must not hold a node. So a failure after the launch counts only if its tenant's other
jobs do well on another node, its own program did not fail quickly on another node too, and nothing has done well on the
node since the first failure; and several jobs of several tenants are needed.

Pure: times are seconds of any monotonic clock, given as arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cotenant.core.model.lifecycle import LaunchCause
from cotenant.core.model.refusal import plural

REASON_LENGTH_MAX = 300
RECENT_MAX = 64  # failures remembered per node
OF_THE_JOB = frozenset(  # causes that do not implicate the node
    {
        LaunchCause.WORKING_DIRECTORY,
        LaunchCause.UPLOAD,
        LaunchCause.ENVIRONMENT,
        LaunchCause.IMAGE,
        LaunchCause.SECRET,
        LaunchCause.MOUNT,
    }
)


class Suspicion(StrEnum):
    """Why a node is held."""

    CANNOT_LAUNCH = "cannot_launch"
    FAILS_JOBS = "fails_jobs"


@dataclass(frozen=True, slots=True)
class HoldRules:
    """When a node is held because of attempts that failed there, and how it is tried again.

    failures: this many failed launches in a row, within `window_seconds`, hold the node; 0: never.
    canary_seconds: the wait before the first canary; it doubles with each canary that fails, up to
      `canary_seconds_max`.
    quick_seconds: an attempt that fails sooner after its start has failed quickly.
    quick_jobs, quick_tenants: this many jobs, of this many tenants, that failed quickly hold the node; 0: never.
    """

    failures: int = 3
    window_seconds: float = 300.0
    canary_seconds: float = 10.0
    canary_seconds_max: float = 600.0
    quick_seconds: float = 10.0
    quick_jobs: int = 3
    quick_tenants: int = 2

    def interval_seconds(self, failed_canaries: int) -> float:
        """Return the wait before the next canary.

        >>> [HoldRules().interval_seconds(count) for count in (0, 1, 2, 9)]
        [10.0, 20.0, 40.0, 600.0]
        """
        return min(self.canary_seconds_max, self.canary_seconds * 2.0 ** min(failed_canaries, 60))


RULES = HoldRules()


@dataclass(frozen=True, slots=True)
class LaunchFailure:
    """A launch that failed on a node. Failures with the same `subject`, an attempt or an unknown user, count once."""

    at: float
    subject: str
    cause: LaunchCause
    reason: str


@dataclass(frozen=True, slots=True)
class QuickFailure:
    """An attempt that failed quickly on a node. The tasks of an array count as one `job`."""

    at: float
    tenant: str
    job: str
    program: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """A node that is held. `next_canary` is when the next canary may start, `canary` the attempt that is one now."""

    suspicion: Suspicion
    reason: str
    next_canary: float
    failed_canaries: int = 0
    canary: str = ""


@dataclass(frozen=True, slots=True)
class NodeLaunches:
    """What is known about the launches on a node."""

    failures: tuple[LaunchFailure, ...] = ()
    quick: tuple[QuickFailure, ...] = ()
    hold: Hold | None = None


def subject_of(attempt: str, submitter: str, cause: LaunchCause) -> str:
    """Return what a launch failure counts as: three attempts of one unknown user do not implicate the node."""
    return f"user {submitter}" if cause is LaunchCause.USER else attempt


def launch_failed(known: NodeLaunches, failure: LaunchFailure, attempt: str, rules: HoldRules = RULES) -> NodeLaunches:
    """Return the node's state after a launch that failed.

    >>> known = NodeLaunches()
    >>> for number in range(3):
    ...     failed = LaunchFailure(float(number), f"job/{number}", LaunchCause.DISK, "the disk is full")
    ...     known = launch_failed(known, failed, failed.subject)
    >>> known.hold.reason, known.hold.next_canary
    ('cannot launch: the disk is full', 12.0)
    """
    if failure.cause in OF_THE_JOB:
        return replace(known, hold=_without(known.hold, attempt))
    if known.hold is not None:
        return replace(known, hold=_canary_failed(known.hold, attempt, failure.at, rules, _cannot(failure)))
    recent = [one for one in known.failures if failure.at - one.at <= rules.window_seconds]
    recent = [*(one for one in recent if one.subject != failure.subject), failure][-RECENT_MAX:]
    if not rules.failures or len(recent) < rules.failures:
        return replace(known, failures=tuple(recent))
    hold = Hold(Suspicion.CANNOT_LAUNCH, _cannot(failure), failure.at + rules.interval_seconds(0))
    return replace(known, failures=(), hold=hold)


def launched(known: NodeLaunches) -> NodeLaunches:
    """Return the node's state after a successful launch: the node can launch, whatever failed before."""
    hold = None if known.hold and known.hold.suspicion is Suspicion.CANNOT_LAUNCH else known.hold
    return replace(known, failures=(), hold=hold)


def failed_quickly(
    known: NodeLaunches,
    failure: QuickFailure,
    attempt: str,
    rules: HoldRules = RULES,
    *,
    well_elsewhere: Collection[str] = (),
    fail_elsewhere: Collection[str] = (),
) -> NodeLaunches:
    """Return the node's state after an attempt that failed quickly.

    `well_elsewhere` are tenants whose jobs do well on another node, `fail_elsewhere` programs that fail quickly on
    another node too.

    >>> known = NodeLaunches()
    >>> for at, (tenant, job) in enumerate([("a", "x"), ("b", "y"), ("a", "z")]):
    ...     failure = QuickFailure(float(at), tenant, job)
    ...     known = failed_quickly(known, failure, f"{job}/1", well_elsewhere={"a", "b"})
    >>> known.hold.reason
    '3 jobs of 2 tenants failed within 10 s of their start here; their tenants do well on other nodes'
    """
    if known.hold is not None:
        return replace(known, hold=_canary_failed(known.hold, attempt, failure.at, rules, known.hold.reason))
    recent = [one for one in known.quick if failure.at - one.at <= rules.window_seconds]
    recent = [*(one for one in recent if one.job != failure.job), failure][-RECENT_MAX:]
    counted = [one for one in recent if one.tenant in well_elsewhere and one.program not in fail_elsewhere]
    jobs, tenants = len(counted), len({one.tenant for one in counted})
    if not rules.quick_jobs or jobs < rules.quick_jobs or tenants < rules.quick_tenants:
        return replace(known, quick=tuple(recent))
    counts = (
        f"{plural(jobs, 'job')} of {plural(tenants, 'tenant')} failed within {rules.quick_seconds:g} s of their start"
    )
    reason = f"{counts} here; their tenants do well on other nodes"
    hold = Hold(Suspicion.FAILS_JOBS, reason, failure.at + rules.interval_seconds(0))
    return replace(known, quick=(), hold=hold)


def did_well(known: NodeLaunches) -> NodeLaunches:
    """Return the node's state after an attempt that succeeded there, or ran for longer than a quick failure."""
    return replace(launched(known), quick=(), hold=None)


def canary_started(known: NodeLaunches, attempt: str) -> NodeLaunches:
    """Return the node's state with this attempt as the canary."""
    return replace(known, hold=replace(known.hold, canary=attempt)) if known.hold else known


def canary_gone(known: NodeLaunches, attempt: str) -> NodeLaunches:
    """Return the node's state after a canary ended in a way that says nothing about the node, such as a cancel."""
    return replace(known, hold=_without(known.hold, attempt))


def may_try(known: NodeLaunches, now: float) -> bool:
    """Return whether a held node may get a canary now."""
    return known.hold is not None and not known.hold.canary and now >= known.hold.next_canary


def restored(
    suspicion: Suspicion, reason: str, failed_canaries: int, now: float, rules: HoldRules = RULES
) -> NodeLaunches:
    """Return a held node's state under a new leader: it starts with a canary after the first interval."""
    hold = Hold(suspicion, reason, now + rules.interval_seconds(0), failed_canaries)
    return NodeLaunches(hold=hold)


def _cannot(failure: LaunchFailure) -> str:
    return f"cannot launch: {failure.reason[:REASON_LENGTH_MAX] or failure.cause.value}"


def _without(hold: Hold | None, attempt: str) -> Hold | None:
    return replace(hold, canary="") if hold and hold.canary == attempt else hold


def _canary_failed(hold: Hold, attempt: str, at: float, rules: HoldRules, reason: str) -> Hold:
    """Return the hold after a failure; failures of attempts launched before the hold change nothing."""
    if hold.canary != attempt:
        return hold
    failed = hold.failed_canaries + 1
    return Hold(hold.suspicion, reason, at + rules.interval_seconds(failed), failed)


@dataclass(slots=True)
class Outcomes:
    """Recent outcomes of attempts on all nodes, for comparison with other nodes."""

    window_seconds: float = RULES.window_seconds
    _well: dict[str, dict[str, float]] = field(default_factory=dict)  # by tenant and node: the last time
    _failed: dict[str, dict[str, float]] = field(default_factory=dict)  # by program and node: the last time

    def well(self, tenant: str, node_id: str, at: float) -> None:
        """Record an attempt that did well."""
        self._well.setdefault(tenant, {})[node_id] = at

    def failed(self, program: str, node_id: str, at: float) -> None:
        """Record an attempt that failed quickly."""
        self._failed.setdefault(program, {})[node_id] = at

    def well_elsewhere(self, tenants: Iterable[str], node_id: str, now: float) -> set[str]:
        """Return which tenants' jobs recently did well on another node."""
        return {tenant for tenant in tenants if self._elsewhere(self._well.get(tenant, {}), node_id, now)}

    def fail_elsewhere(self, programs: Iterable[str], node_id: str, now: float) -> set[str]:
        """Return which programs recently failed quickly on another node."""
        return {program for program in programs if self._elsewhere(self._failed.get(program, {}), node_id, now)}

    def _elsewhere(self, seen: dict[str, float], node_id: str, now: float) -> bool:
        return any(other != node_id and now - at <= self.window_seconds for other, at in seen.items())

    def forget(self, now: float) -> None:
        """Drop outcomes that are too old to matter."""
        for table in (self._well, self._failed):
            for key, seen in list(table.items()):
                kept = {node_id: at for node_id, at in seen.items() if now - at <= self.window_seconds}
                if kept:
                    table[key] = kept
                else:
                    del table[key]
