"""Start forecasts: a short simulation from the present state that tells when waiting jobs will probably start.

Jobs end after their predicted remaining time; after each end, the scheduling cycle's own `place` decides which jobs
start. This is done once with the medians of all run times, which also tells which jobs a job waits for, and then with a
few samples, which gives an interval.

The forecast makes and keeps reservations, puts long-waiting gangs first, moves jobs, and stops jobs for waiting ones if
the queue does that: with the same functions as the cycle.

Assumptions: the order stays as it is now, no new jobs arrive, no node fails or joins, no job is stopped twice. A job
may start later than predicted if jobs arrive that go before it, and earlier if jobs before it are cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.forecast.forecast_state import QueueSnapshot, RunningEntry, WaitingEntry
from cotenant.core.forecast.play import ForecastRun, held
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.prediction.remaining_time import sample_run_times

__all__ = [
    "DRAWS",
    "WAITING_MAX",
    "ExpectedStart",
    "Forecast",
    "QueueSnapshot",
    "RunningEntry",
    "WaitingEntry",
    "forecast",
    "held",
]

WAITING_MAX = 1_000  # waiting jobs that are considered, the first in the order
DRAWS = 20
HORIZON_SECONDS = 30 * 86_400.0
ENDS_MAX = 5  # jobs that are named as those a job waits for


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """When a job will start, in seconds from now: the median, and the range that holds in 8 of 10 cases.

    Infinity: beyond the horizon. `ends` are jobs whose end frees the places that it gets, the last to end first,
    preceded by jobs whose end brings its turn, in a strict queue or within its tenant's limit; at most `ENDS_MAX` of
    `ends_count`. `finish_seconds` is when it will have finished, if everything goes as the medians predict; infinity if
    that is unknown. `of_unknown`: all of `ends` are jobs whose remaining time is unknown, so the figures mean nothing.
    """

    seconds: float
    p10_seconds: float
    p90_seconds: float
    ends: tuple[str, ...] = ()
    ends_count: int = 0
    finish_seconds: float = math.inf
    of_unknown: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected starts of the wanted jobs, by id. `reached_seconds`: how far ahead the forecast reaches.

    `draws` counts the runs, including the one with the medians.
    """

    expected: Mapping[str, ExpectedStart]
    reached_seconds: float
    draws: int


def forecast(
    snapshot: QueueSnapshot,
    policy: PlacementPolicy,
    rng: np.random.Generator,
    wanted: Collection[str] | None = None,
    *,
    draws: int = DRAWS,
    horizon_seconds: float = HORIZON_SECONDS,
    spent: Callable[[], bool] = lambda: False,
) -> Forecast:
    """Return when the wanted jobs start (None: all); leaves the ledger unchanged.

    `draws` samples of run times are added to the medians, fewer if all are certain. Once the time is `spent`, no more
    runs are made; a job that the time did not suffice for starts at infinity, and surely not before `reached_seconds`.
    """
    asked = frozenset(waiter.gang.job_id for waiter in snapshot.waiters)
    asked = asked if wanted is None else asked & frozenset(wanted)
    rests = [holder.rest for holder in snapshot.holders] + [waiter.run for waiter in snapshot.waiters]
    lengths = sample_run_times(rests, rng, draws)
    runs: list[ForecastRun] = []
    for row in lengths:
        run = ForecastRun(snapshot, policy, rng, row, asked)
        whole = run.play(horizon_seconds, spent)
        if runs and not whole:
            break
        runs.append(run)
        if not whole:
            break
    first = runs[0]
    return Forecast({job_id: _expected(job_id, runs) for job_id in asked}, first.now, len(runs))


def _expected(job_id: str, runs: Sequence[ForecastRun]) -> ExpectedStart:
    first = runs[0]
    at = np.sort([run.starts.get(job_id, math.inf) for run in runs])
    low, middle, high = (float(at[round(share * (len(at) - 1))]) for share in (0.1, 0.5, 0.9))
    if job_id not in first.starts:
        return ExpectedStart(middle, low, high)
    ends = first.freed_for[job_id]
    finish = first.finish_seconds(job_id)
    return ExpectedStart(middle, low, high, ends[:ENDS_MAX], len(ends), finish, job_id in first.of_unknown)
