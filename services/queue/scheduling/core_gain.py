"""What more cores would give a running job, from its measured rate and the predictor's curve."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.core.model.lifecycle import Phase
from cotenant.core.model.refusal import plural
from cotenant.core.placement.candidate_allocations import largest_role
from cotenant.services.queue.estimates.observation_sink import allocation_of
from cotenant.services.queue.jobs.transitions import Record

GAIN_MIN = 1.05  # rates closer than this are the same: the noise of a window
ENOUGH = 0.95  # of the best rate: cores beyond those that reach it are wasted


def core_gain(record: Record, now: float) -> str:
    """Return its cores, its measured rate and the rate with more cores; empty if it does not run or has no rate.

    "1 core; measured 9.7/s; 2 cores would give about 19/s". The predictor's rates are scaled to the measured one. While
    no rate on more cores is known, and its cores are not fixed, the rate is at most proportional to them.
    """
    if record.phase is not Phase.RUNNING or not (rate := _measured(record, now)):
        return ""
    cores = allocation_of(record.job.attempt).cores
    if not cores:
        return ""
    text = f"{plural(cores, 'core')}; measured {rate:.3g}/s"
    rates = _predicted(record)
    if more := better(rates, cores):
        return f"{text}; {more} cores would give about {rate * rates[more] / rates[cores]:.2g}/s"
    if not _open(record) or any(count > cores for count in rates):
        return text
    return f"{text}; each further core would add at most {rate / cores:.2g}/s, which is not measured yet"


def better(rates: Mapping[int, float], cores: int) -> int | None:
    """Return the fewest cores that give nearly the best rate of more cores; None if it is hardly better than now.

    >>> better({1: 10.0, 2: 19.0, 4: 19.5}, 1), better({1: 10.0, 2: 19.0, 4: 19.5}, 2), better({2: 5.0}, 1)
    (2, None, None)
    """
    more = {count: rate for count, rate in rates.items() if count > cores}
    if cores not in rates or not more:
        return None
    best = max(more.values())
    if best < GAIN_MIN * rates[cores]:
        return None
    return min(count for count, rate in more.items() if rate >= ENOUGH * best)


def _open(record: Record) -> bool:
    """Return whether a job leaves its cores to the allocator, and nobody knows how many it can use."""
    known = record.estimate is not None and record.estimate.cores_useful > 0
    return not known and largest_role(record.spec).request.cores is None


def _measured(record: Record, now: float) -> float:
    own = record.rate_track.measured(now) if record.rate_track else None
    return own.rate_per_second if own and own.windows else record.job.progress.rate_per_second


def _predicted(record: Record) -> dict[int, float]:
    """Return the predictor's rates by cores, on as many nodes and GPUs as the job holds."""
    if record.estimate is None:
        return {}
    held = allocation_of(record.job.attempt)
    types = {"", held.gpu_type, largest_role(record.spec).request.gpu_type}
    return {
        one.allocation.cores: one.rate_per_second
        for one in record.estimate.candidates
        if one.rate_per_second > 0
        and one.allocation.gpu_milli == held.gpu_milli
        and one.allocation.nodes == held.nodes
        and not one.allocation.servers
        and one.allocation.gpu_type in types
    }
