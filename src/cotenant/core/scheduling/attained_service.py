"""What jobs are charged for what they hold, and what they are expected to need still."""

from __future__ import annotations

import math

import numpy as np

from cotenant.core.model.job_table import Flags, Floats, Ints, Jobs

ALL = slice(None)
CROSSING_SECONDS = 0.001  # a limit this near counts as crossed, so that rounding never asks for a wake-up of 0 s


def gpus_charged(jobs: Jobs, cores_per_gpu: float) -> Floats:
    """Count the GPUs of each job; one without any is charged its cores, so many of them like one GPU [R].

    >>> from cotenant.core.model.job_table import JobRow, JobTable
    >>> table = JobTable()
    >>> table.add(JobRow("a", arrival_seconds=0, sequence=0, gpu_milli=2000, cores=12))
    >>> table.add(JobRow("b", arrival_seconds=0, sequence=1, cores=12))
    >>> gpus_charged(table.jobs(now=0), cores_per_gpu=3).tolist()
    [2.0, 4.0]
    """
    return np.where(jobs.gpu_milli > 0, jobs.gpu_milli / 1000, jobs.cores / cores_per_gpu)


def unpredictable(jobs: Jobs) -> Flags:
    """Tell of which jobs the rest is not known: nothing was predicted, or they outlived what was."""
    return ~(np.isfinite(jobs.remaining_seconds) & (jobs.remaining_seconds > 0))


def as_much_again(attained_seconds: Floats, quantum_seconds: float) -> tuple[Floats, Floats]:
    """Expect of jobs of unknown length about as much again as they have had; also in how many seconds that changes.

    Run times are heavy-tailed (AITurbo's dataset [C]), so that what a job has had is the best guess of its rest. The
    guess is 0 below one quantum and then doubles, at 1, 2, 4… quanta; were it to grow with every second, jobs that had
    the same would stop each other without end [R].

    >>> as_much_again(np.array([0.0, 59.0, 60.0, 250.0]), quantum_seconds=60.0)
    (array([  0.,   0.,  60., 240.]), array([ 60.,   1.,  60., 230.]))
    """
    quanta = (attained_seconds + CROSSING_SECONDS) / quantum_seconds
    begun = quanta >= 1
    guess: Floats = np.where(begun, quantum_seconds * np.exp2(np.frexp(quanta)[1] - 1), 0.0)
    return guess, np.where(begun, 2 * guess, quantum_seconds) - attained_seconds


def soonest(seconds: Floats) -> float:
    """The first of several moments; infinite where there are none."""
    return float(seconds.min(initial=math.inf))


def demands_of(jobs: Jobs) -> tuple[np.ndarray, Floats]:
    """Give what jobs demand of each resource, and its capacity; of what there is not, nobody has a share."""
    kinds = (
        (jobs.gpu_milli, jobs.capacity.gpu_milli),
        (jobs.cores, jobs.capacity.cores),
        (jobs.memory_bytes, jobs.capacity.memory_bytes),
    )
    shared = [(demand, have) for demand, have in kinds if have > 0 and demand.any()]
    demands = np.array([demand for demand, _ in shared], dtype=np.int64).reshape(len(shared), len(jobs))
    return demands, np.array([have for _, have in shared], dtype=np.float64)


def dominant_share(amounts: np.ndarray, capacity: Floats) -> Floats:
    """Say for each column of amounts which share of the capacity it is, of the resource of which it is the most."""
    share: Floats = (amounts / capacity[:, None]).max(axis=0, initial=0.0)
    return share


def attained_at(jobs: Jobs, now: float, moment: float, among: Ints | slice = ALL) -> Floats:
    """Say what run time jobs (or some of them) had at a moment before now; to the millisecond: equals stay so."""
    since = np.where(jobs.running[among], now - np.maximum(jobs.running_since[among], moment), 0.0)
    return np.maximum(0.0, np.round(jobs.attained_seconds[among] - np.maximum(0.0, since), 3))
