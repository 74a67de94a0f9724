"""The value of changing a job's allocation: AITurbo's unified step, over workers, servers, GPUs and cores.

AITurbo (Zhao et al., HPDC 2021) weighs all resources in one unit of service and changes an allocation by the step that
gains most [P]. The unit is 10 for each GPU and 5 for each worker or parameter server, as in code from the same lab [D];
a core counts 1 beside them [R]. The benefit is the drop of remaining time × service [D], here per unit of service that
the job has now, so that it is in seconds. Any change other than of cores stops and restarts the job, which costs time
[D].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cotenant.core.model.estimate import Candidate
from cotenant.core.model.job import WHOLE_GPU_MILLI


@dataclass(frozen=True, slots=True)
class Weights:
    """Units of service for each resource."""

    gpu: float = 10.0
    task: float = 5.0
    core: float = 1.0


WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Elastic:
    """Which parts of a job may change besides its cores, and within which bounds; by default none."""

    workers: tuple[int, int] = (0, 0)
    servers: tuple[int, int] = (0, 0)
    gpus_each: tuple[int, int] = (0, 0)


RIGID = Elastic()


@dataclass(frozen=True, slots=True)
class Change:
    """Another allocation, and its benefit in seconds. `increase`: it takes more service than the present one."""

    to: Candidate
    benefit_seconds: float
    increase: bool


def service(team: Candidate, weights: Weights = WEIGHTS) -> float:
    """Return the service of an allocation per second.

    >>> service(Candidate(cores=4, gpu_milli=1000, workers=2, servers=1, server_cores=3))
    46.0
    """
    workers = max(1, team.workers)
    gpus = workers * team.gpu_milli / WHOLE_GPU_MILLI
    cores = workers * team.cores + team.servers * team.server_cores
    return weights.gpu * gpus + weights.task * (workers + team.servers) + weights.core * cores


def neighbours(team: Candidate, elastic: Elastic, cores: tuple[int, int], step: int = 1) -> Iterator[Candidate]:
    """Yield the allocations one step away: a worker, a server, a GPU each or cores more or fewer, within bounds.

    >>> [one.cores for one in neighbours(Candidate(cores=3, workers=1), RIGID, cores=(1, 4))]
    [2, 4]
    """
    for name, size, bounds in (
        ("workers", 1, elastic.workers),
        ("servers", 1, elastic.servers),
        (
            "gpu_milli",
            WHOLE_GPU_MILLI,
            (elastic.gpus_each[0] * WHOLE_GPU_MILLI, elastic.gpus_each[1] * WHOLE_GPU_MILLI),
        ),
        ("cores", step, cores),
    ):
        have = getattr(team, name)
        for count in (have - size, have + size):
            if max(bounds[0], 1) <= count <= bounds[1]:
                yield replace(team, **{name: count})


def best_step(
    team: Candidate,
    rate: float,
    remaining_seconds: float,
    judged: Iterable[tuple[Candidate, float]],
    restart_seconds: float = 0.0,
    weights: Weights = WEIGHTS,
) -> Change | None:
    """Return the change that gains most, in either direction; None if no change gains.

    `judged` are other allocations and their rates. A job is a candidate to increase or to decrease, by whichever gains
    more, and the change is that one.

    >>> two, four = Candidate(2, 1000, workers=1), Candidate(4, 1000, workers=1)
    >>> best_step(Candidate(3, 1000, workers=1), 10.0, 3600.0, [(two, 9.9), (four, 10.0)]).to.cores
    2
    """
    now = service(team, weights)
    best: Change | None = None
    for other, faster in judged:
        if faster <= 0:
            continue
        cost = 0.0 if replace(other, cores=team.cores, server_cores=team.server_cores) == team else restart_seconds
        then = service(other, weights)
        benefit = remaining_seconds - (remaining_seconds * rate / faster + cost) * then / now
        if benefit > 0 and (best is None or benefit > best.benefit_seconds):
            best = Change(other, benefit, then > now)
    return best
