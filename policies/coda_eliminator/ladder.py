"""The ladder on which a CPU job is held back, gentlest rung first (CODA, section 1 of its reconstruction [R]).

Where the hardware can hold a job to a share of the memory bandwidth: 50, 20, 10 % of it. Then, or else, half of its
cores, and half of these again; a job of no more than best effort then gets only CPU time that nobody wants. Whatever
the rung, it keeps a tenth of its cores, or of the bandwidth. The last rung suspends it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cotenant.core.policy.protocols import FREE, AttemptWindow, NodeWindow, Throttle

BANDWIDTH_PERCENTS = (50, 20, 10)
KEPT = 0.1  # of its cores or its bandwidth, whatever is done to it, unless it is suspended
SUSPENDED = Throttle(suspended=True)
START = 1  # the rung of a trial: the first one may be too gentle to tell anything ...
LARGE = 0.25  # ... and where so much is lost, one more


@dataclass(frozen=True, slots=True)
class Rung:
    """One way of holding a job back; `share` is about what it leaves of its speed, 0 to 1."""

    throttle: Throttle
    share: float


def cores_each(attempt: AttemptWindow) -> int:
    """Tell how many cores each of an attempt's tasks on the node holds; about, where that is not told."""
    return max(1, (attempt.cores or round(attempt.cores_used)) // max(1, attempt.tasks))


def rungs(attempt: AttemptWindow, window: NodeWindow) -> tuple[Rung, ...]:
    """List the rungs for an attempt on a node, the gentlest first and the suspension last.

    >>> job = AttemptWindow("cpu", 1, cpu_job=True, cores_used=8, cores=8)
    >>> node = NodeWindow("n1", 0, 5, (job,))
    >>> [rung.throttle.cores for rung in rungs(job, node)], rungs(job, node)[-1].throttle.suspended
    ([4, 2, 1, 0], True)
    >>> node = NodeWindow("n1", 0, 5, (job,), bandwidth_enforced=True)
    >>> [(rung.throttle.bandwidth_percent, rung.throttle.cores) for rung in rungs(job, node)[:-1]]
    [(50, 0), (20, 0), (10, 0), (10, 4), (10, 2), (10, 1)]
    """
    found: list[Rung] = []
    held, each = FREE, cores_each(attempt)
    if window.bandwidth_enforced:
        for percent in _binding(attempt, window):
            held = Throttle(bandwidth_percent=percent)
            found.append(Rung(held, _bandwidth_share(attempt, window, percent)))
    share = found[-1].share if found else 1.0
    cores = each // 2
    while cores >= max(1.0, KEPT * each):
        held = replace(held, cores=cores)
        found.append(Rung(held, min(share, cores / each)))
        cores //= 2
    if attempt.best_effort:
        found.append(Rung(replace(held, idle=True), min(found[-1].share if found else 1.0, 0.5)))
    return (*found, Rung(SUSPENDED, 0.0))


def _binding(attempt: AttemptWindow, window: NodeWindow) -> tuple[int, ...]:
    """Leave out the percents that an attempt does not reach anyway; the last one stays."""
    peak, used = window.memory_bandwidth_peak_bytes_per_second, _used_freely(attempt)
    if not peak or used is None:
        return BANDWIDTH_PERCENTS
    return tuple(percent for percent in BANDWIDTH_PERCENTS if percent * peak / 100 < used) or BANDWIDTH_PERCENTS[-1:]


def _used_freely(attempt: AttemptWindow) -> float | None:
    """Tell what bandwidth an attempt takes if it is let; None where it is not told, or is held back already."""
    return attempt.memory_bandwidth_bytes_per_second if attempt.throttle.free else None


def _bandwidth_share(attempt: AttemptWindow, window: NodeWindow, percent: int) -> float:
    """Tell what a share of the node's bandwidth leaves of what an attempt had of it."""
    peak, used = window.memory_bandwidth_peak_bytes_per_second, _used_freely(attempt)
    if not peak or not used:
        return percent / 100
    return min(1.0, max(KEPT, percent * peak / 100 / used))


def first_rung(found: tuple[Rung, ...], slowdown: float) -> int:
    """Choose where to begin: the more is lost the lower, but never with a suspension, unless there is nothing else.

    To leave a job only the CPU time that nobody else wants tells nothing where its cores are its own.
    """
    telling = [number for number, rung in enumerate(found[:-1]) if not rung.throttle.idle]
    return min(START + (slowdown > LARGE), telling[-1]) if telling else len(found) - 1


def telling_rung(found: tuple[Rung, ...]) -> int:
    """Choose the rung for a trial of several together, which should tell all there is: the lowest of the gentlest kind.

    That is the least share of the bandwidth where the hardware can hold a job to one, else the fewest cores; a
    suspension only where there is nothing else.

    >>> job = AttemptWindow("cpu", 1, cpu_job=True, cores_used=8, cores=8)
    >>> for enforced in (False, True):
    ...     ladder = rungs(job, NodeWindow("n1", 0, 5, (job,), bandwidth_enforced=enforced))
    ...     told(ladder[telling_rung(ladder)].throttle)
    '1 core for each task'
    '10 % of the memory bandwidth'
    """
    running = [number for number, rung in enumerate(found[:-1]) if not rung.throttle.idle]
    bandwidth = [number for number in running if not found[number].throttle.cores]
    return (bandwidth or running or [len(found) - 1])[-1]


def rung_of(found: tuple[Rung, ...], throttle: Throttle) -> int:
    """Find the rung that a throttle is, or the first that holds back as much; -1: it is free.

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


def told(throttle: Throttle) -> str:
    """Say in words how an attempt is held back.

    >>> told(Throttle(bandwidth_percent=20, cores=2)), told(SUSPENDED), told(FREE)
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
        ways.append("CPU time that nobody else wants")
    return " and ".join(ways)
