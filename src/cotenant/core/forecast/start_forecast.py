"""When waiting jobs will probably start: a short simulation of what is to come, from how things stand now.

Jobs end after what they have left, as the predictor says; whenever one does, the very `place` of the scheduling cycle
is asked who starts. That is done once with the medians of all run times, which also tells whose ends a job waits for,
and then with a few drawn ones, which gives an interval.

Reservations are made and kept in it, gangs that starve come first, jobs are moved, and those that stand after a waiting
one make it room where the queue stops jobs for others: by the functions that the cycle has for that.

What it takes for granted, so that it can be told at all: the order stays what it is now, nobody new comes, no node
fails or joins, nobody is stopped twice. A job may start later than foretold where others come that are put before it,
and sooner where jobs before it are cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cotenant.core.forecast.forecast_state import Holder, Picture, Waiter
from cotenant.core.forecast.play import Run, held
from cotenant.core.policy.protocols import PlacementPolicy
from cotenant.core.prediction.remaining_time import drawn

__all__ = ["DRAWS", "WAITING_MAX", "Expected", "Forecast", "Holder", "Picture", "Waiter", "forecast", "held"]

WAITING_MAX = 1_000  # waiting jobs that are looked at, the first in the order
DRAWS = 20
HORIZON_SECONDS = 30 * 86_400.0
ENDS_MAX = 5  # jobs that are named, for whose end another one waits


@dataclass(frozen=True, slots=True)
class Expected:
    """When a job will start, in seconds from now: the median, and between which times in 8 of 10 cases.

    Infinity: not as far as was looked. `ends` are jobs whose end frees the places that it gets, the last to end first,
    and before them those by whose end its turn comes, in a strict queue or within its tenant's limit; at most
    `ENDS_MAX` of `ends_count`. `finish_seconds` is when it will have finished, where all goes as the medians say.
    """

    seconds: float
    p10_seconds: float
    p90_seconds: float
    ends: tuple[str, ...] = ()
    ends_count: int = 0
    finish_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is expected of the wanted jobs, by id. `reached_seconds`: as far as was looked, from now on.

    `draws` counts how often the future was played through, the time with the medians included.
    """

    expected: Mapping[str, Expected]
    reached_seconds: float
    draws: int


def forecast(
    picture: Picture,
    policy: PlacementPolicy,
    rng: np.random.Generator,
    wanted: Collection[str] | None = None,
    *,
    draws: int = DRAWS,
    horizon_seconds: float = HORIZON_SECONDS,
    spent: Callable[[], bool] = lambda: False,
) -> Forecast:
    """Play the future through, and say when the wanted jobs start (None: all); the ledger is left as it was.

    `draws` run times are drawn beside the medians, fewer where all are certain. Once the time for it is `spent` there
    are no more; a job that the time did not suffice for starts at infinity, and surely not before `reached_seconds`.
    """
    asked = frozenset(waiter.gang.job_id for waiter in picture.waiters)
    asked = asked if wanted is None else asked & frozenset(wanted)
    rests = [holder.rest for holder in picture.holders] + [waiter.run for waiter in picture.waiters]
    lengths = drawn(rests, rng, draws)
    runs: list[Run] = []
    for row in lengths:
        run = Run(picture, policy, rng, row, asked)
        whole = run.play(horizon_seconds, spent)
        if runs and not whole:
            break
        runs.append(run)
        if not whole:
            break
    first = runs[0]
    return Forecast({job_id: _expected(job_id, runs) for job_id in asked}, first.now, len(runs))


def _expected(job_id: str, runs: Sequence[Run]) -> Expected:
    first = runs[0]
    at = np.sort([run.starts.get(job_id, math.inf) for run in runs])
    low, middle, high = (float(at[round(share * (len(at) - 1))]) for share in (0.1, 0.5, 0.9))
    if job_id not in first.starts:
        return Expected(middle, low, high)
    ends = first.freed_for[job_id]
    return Expected(middle, low, high, ends[:ENDS_MAX], len(ends), first.finishes[job_id])
