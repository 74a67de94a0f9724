"""A naive scheduler with a cycle every second, and a naive line for each queue policy: no code of Cotenant's."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass
class Job:
    number: int  # in the order of arrival
    came: int
    work: int
    gpus: int
    cores: int
    tenant: str = ""
    deadline: float = inf
    known: bool = True
    done: int = 0
    before: int = 0  # attained when the present run began
    forgiven: int = 0
    since: int = 0
    runs: bool = False
    stops: int = 0
    over: int | None = None
    dropped: int | None = None


Order = Callable[[list[Job], int, list[Job]], list[Job]]


def replay(jobs: list[Job], gpus: int, cores: int, order: Order, *, preemptive: bool, strict: bool) -> None:
    """Run jobs; `order` sorts the present jobs, without those it gives up. Ended jobs are `history`."""
    here, history, now = list[Job](), list[Job](), 0
    while len(history) + sum(job.dropped is not None for job in jobs) < len(jobs):
        for job in [job for job in here if job.runs and job.done == job.work]:
            here.remove(job)
            history.append(job)
            job.over = now
        for job in [job for job in jobs if job.came == now]:
            here.append(job)
            job.since = now
        queue = order(here, now, history)
        for job in [job for job in here if job not in queue]:
            here.remove(job)
            job.dropped = now
        chosen = [] if preemptive else [job for job in here if job.runs]
        for job in [job for job in queue if job not in chosen]:
            together = [*chosen, job]
            if sum(one.gpus for one in together) <= gpus and sum(one.cores for one in together) <= cores:
                chosen = together
            elif strict:
                break
        for job in here:
            if job.runs and job not in chosen:
                job.stops, job.since, job.forgiven = job.stops + 1, now, 0
            job.before = job.before if job.runs else job.done
            job.runs = job in chosen
            job.done += job.runs
        now += 1


def service(job: Job) -> float:
    """Return a job's attained GPU-seconds; three cores count as a GPU."""
    return job.done * (job.gpus or job.cores / 3)
