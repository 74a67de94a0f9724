"""The ladder of throttles for a CPU job, gentlest rung first (CODA, section 1 of its reconstruction [R]).

If the hardware can limit the memory bandwidth of a job: 50, 20, 10 % of it. Then, or else, half of its cores, and half
of those again; a best-effort job then gets only otherwise idle CPU time. On each of these rungs it keeps a tenth of its
cores, or of the bandwidth. The last rung suspends it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.policy.protocols import FREE, AttemptWindow, NodeWindow, Throttle

BANDWIDTH_PERCENTS = (50, 20, 10)
KEPT = 0.1  # of its cores or its bandwidth on every rung but the suspension
SUSPENDED = Throttle(suspended=True)
START = 1  # the rung of a trial: the first one may be too gentle to show an effect ...
LARGE = 0.25  # ... and with a loss this large, one more


@dataclass(frozen=True, slots=True)
class Rung:
    """One throttle; `share` is about the share of its speed that a job keeps, 0 to 1."""

    throttle: Throttle
    share: float


def cores_each(attempt: AttemptWindow) -> int:
    """Return the cores of each task of an attempt on the node; an estimate if unknown."""
    return max(1, (attempt.cores or round(attempt.cores_used)) // max(1, attempt.tasks))


def rungs(attempt: AttemptWindow, window: NodeWindow) -> tuple[Rung, ...]:
    """Return the rungs for an attempt on a node, the gentlest first and the suspension last.

    >>> job = AttemptWindow("cpu", 1, cpu_job=True, cores_used=8, cores=8)
    >>> node = NodeWindow("n1", 0, 5, (job,))
    >>> [rung.throttle.cores for rung in rungs(job, node)], rungs(job, node)[-1].throttle.suspended
    ([4, 2, 1, 0], True)
    >>> node = NodeWindow("n1", 0, 5, (job,), bandwidth_enforced=True)
    >>> [(rung.throttle.bandwidth_percent, rung.throttle.cores) for rung in rungs(job, node)[:-1]]
    [(50, 0), (20, 0), (10, 0), (10, 4), (10, 2), (10, 1)]
    """
    found: list[Rung] = []
    throttled, each = FREE, cores_each(attempt)
    if window.bandwidth_enforced:
        for percent in _binding(attempt, window):
            throttled = Throttle(bandwidth_percent=percent)
            found.append(Rung(throttled, _bandwidth_share(attempt, window, percent)))
    share = found[-1].share if found else 1.0
    cores = each // 2
    while cores >= max(1.0, KEPT * each):
        throttled = replace(throttled, cores=cores)
        found.append(Rung(throttled, min(share, cores / each)))
        cores //= 2
    if attempt.best_effort:
        found.append(Rung(replace(throttled, idle=True), min(found[-1].share if found else 1.0, 0.5)))
    return (*found, Rung(SUSPENDED, 0.0))


def _binding(attempt: AttemptWindow, window: NodeWindow) -> tuple[int, ...]:
    """Return the percentages below the attempt's use; at least the last one."""
    peak, used = window.memory_bandwidth_peak_bytes_per_second, _used_freely(attempt)
    if not peak or used is None:
        return BANDWIDTH_PERCENTS
    return tuple(percent for percent in BANDWIDTH_PERCENTS if percent * peak / 100 < used) or BANDWIDTH_PERCENTS[-1:]


def _used_freely(attempt: AttemptWindow) -> float | None:
    """Return the bandwidth of an unthrottled attempt; None if it is unknown, or if the attempt is throttled."""
    return attempt.memory_bandwidth_bytes_per_second if attempt.throttle.free else None


def _bandwidth_share(attempt: AttemptWindow, window: NodeWindow, percent: int) -> float:
    """Return the share of an attempt's bandwidth that a share of the node's bandwidth leaves."""
    peak, used = window.memory_bandwidth_peak_bytes_per_second, _used_freely(attempt)
    if not peak or not used:
        return percent / 100
    return min(1.0, max(KEPT, percent * peak / 100 / used))


def first_rung(found: tuple[Rung, ...], slowdown: float) -> int:
    """Return the first rung to try: lower for larger losses, but a suspension only if there is nothing else.

    Limiting a job to otherwise idle CPU time shows nothing if its cores are its own.
    """
    telling = [number for number, rung in enumerate(found[:-1]) if not rung.throttle.idle]
    return min(START + (slowdown > LARGE), telling[-1]) if telling else len(found) - 1


def strongest_rung(found: tuple[Rung, ...]) -> int:
    """Return the rung for a trial of several attempts together: the lowest of the gentlest kind, to show any effect.

    That is the smallest share of the bandwidth if the hardware can limit it, else the fewest cores; a suspension only
    if there is nothing else.

    >>> job = AttemptWindow("cpu", 1, cpu_job=True, cores_used=8, cores=8)
    >>> for enforced in (False, True):
    ...     ladder = rungs(job, NodeWindow("n1", 0, 5, (job,), bandwidth_enforced=enforced))
    ...     describe(ladder[strongest_rung(ladder)].throttle)
    '1 core for each task'
    '10 % of the memory bandwidth'
    """
    running = [number for number, rung in enumerate(found[:-1]) if not rung.throttle.idle]
    bandwidth = [number for number in running if not found[number].throttle.cores]
    return (bandwidth or running or [len(found) - 1])[-1]


def rung_of(found: tuple[Rung, ...], throttle: Throttle) -> int:
    """Return the rung of a throttle, or the first that is at least as hard; -1 if it is free.

    >>> job = AttemptWindow("cpu", 1, cpu_job=True, cores_used=8, cores=8)
    >>> ladder = rungs(job, NodeWindow("n1", 0, 5, (job,)))
    >>> [rung_of(ladder, Throttle(cores=cores)) for cores in (0, 6, 4, 1)], rung_of(ladder, SUSPENDED)
    ([-1, 0, 0, 2], 3)
    """
    if throttle.free:
        return -1
    hard = (_hardness(rung.throttle) >= _hardness(throttle) for rung in found)
    return next((number for number, is_as_hard in enumerate(hard) if is_as_hard), len(found) - 1)


def _hardness(throttle: Throttle) -> tuple[bool, bool, float, float]:
    fewest = -throttle.cores if throttle.cores else float("-inf")
    return throttle.suspended, throttle.idle, -throttle.bandwidth_percent, fewest


def describe(throttle: Throttle) -> str:
    """Return a description of a throttle.

    >>> describe(Throttle(bandwidth_percent=20, cores=2)), describe(SUSPENDED), describe(FREE)
    ('20 % of the memory bandwidth and 2 cores for each task', 'suspended', 'free')
    """
    if throttle.free:
        return "free"
    if throttle.suspended:
        return "suspended"
    ways = []
    if throttle.bandwidth_percent < 100:
        ways.append(f"{throttle.bandwidth_percent} % of the memory bandwidth")
    if throttle.cores:
        ways.append(f"{throttle.cores} core{'s' * (throttle.cores != 1)} for each task")
    if throttle.idle:
        ways.append("otherwise idle CPU time")
    return " and ".join(ways)
