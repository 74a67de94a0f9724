"""Attained service: what jobs are charged for what they hold, and what they are expected to need still."""

from __future__ import annotations

import math

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs

ALL = slice(None)
CROSSING_SECONDS = 0.001  # a limit this near counts as crossed, so that rounding never causes a wake-up after 0 s


def gpus_charged(jobs: Jobs, cores_per_gpu: float) -> Floats:
    """Return the GPUs of each job; a job without GPUs is charged its cores, `cores_per_gpu` counting as one GPU [R].

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> table.add(JobRow("a", arrival_seconds=0, sequence=0, gpu_milli=2000, cores=12))
    >>> table.add(JobRow("b", arrival_seconds=0, sequence=1, cores=12))
    >>> gpus_charged(table.jobs(now=0), cores_per_gpu=3).tolist()
    [2.0, 4.0]
    """
    return np.where(jobs.gpu_milli > 0, jobs.gpu_milli / 1000, jobs.cores / cores_per_gpu)


def unpredictable(jobs: Jobs) -> Flags:
    """Return which jobs have no known remaining time: nothing was predicted, or they outlived the prediction."""
    return ~(np.isfinite(jobs.remaining_seconds) & (jobs.remaining_seconds > 0))


def expected_by_attained(attained_seconds: Floats, quantum_seconds: float) -> tuple[Floats, Floats]:
    """Return the expected remaining time of jobs of unknown length, about what they have run, and when it changes.

    Run times are heavy-tailed (AITurbo's dataset [C]), so the run time so far is the best guess of the remaining time.
    The guess is 0 below one quantum and then doubles, at 1, 2, 4… quanta; if it grew with every second, jobs with equal
    run times would preempt each other forever [R].

    >>> expected_by_attained(np.array([0.0, 59.0, 60.0, 250.0]), quantum_seconds=60.0)
    (array([  0.,   0.,  60., 240.]), array([ 60.,   1.,  60., 230.]))
    """
    quanta = (attained_seconds + CROSSING_SECONDS) / quantum_seconds
    begun = quanta >= 1
    guess: Floats = np.where(begun, quantum_seconds * np.exp2(np.frexp(quanta)[1] - 1), 0.0)
    return guess, np.where(begun, 2 * guess, quantum_seconds) - attained_seconds


def soonest(seconds: Floats) -> float:
    """Return the earliest of several moments; infinity if there are none."""
    return float(seconds.min(initial=math.inf))


def demands_of(jobs: Jobs) -> tuple[np.ndarray, Floats]:
    """Return what jobs demand of each resource, and its capacity; resources that do not exist are left out."""
    kinds = zip(jobs.needs, jobs.capacity, strict=True)
    shared = [(demand, have) for demand, have in kinds if have > 0 and demand.any()]
    demands = np.array([demand for demand, _ in shared], dtype=np.int64).reshape(len(shared), len(jobs))
    return demands, np.array([have for _, have in shared], dtype=np.float64)


def dominant_share(amounts: np.ndarray, capacity: Floats) -> Floats:
    """Return for each column of amounts its share of the capacity, for the resource of which the share is largest."""
    share: Floats = (amounts / capacity[:, None]).max(axis=0, initial=0.0)
    return share


def attained_at(jobs: Jobs, now: float, moment: float, among: Ints | slice = ALL) -> Floats:
    """Return the run time that jobs had at an earlier moment, to the millisecond, so that equals stay equal."""
    since = np.where(jobs.running[among], now - np.maximum(jobs.running_since[among], moment), 0.0)
    return np.maximum(0.0, np.round(jobs.attained_seconds[among] - np.maximum(0.0, since), 3))
