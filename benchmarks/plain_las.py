"""Least attained service in a few plain lines: what a simulation costs that does nothing else.

Discretized LAS over a number of GPUs, by counting: running jobs in a list, waiting jobs in one heap for each level and
size. No nodes, policies, tenants, predictions, reasons for waiting or recordings. It schedules as
`simulate(…, queue="las", placement="count")` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

THRESHOLDS = (3250.0, 7200.0)  # GPU-seconds
CROSSING_SECONDS = 0.001  # a threshold this near counts as crossed


def plain_las(jobs: Sequence[tuple[float, float, int]], gpus: int) -> tuple[float, int]:
    """Return the average completion time, in seconds, and the preemptions of jobs (arrival, duration, GPUs) in order.

    >>> plain_las([(0.0, 10.0, 2), (0.0, 4.0, 1)], gpus=2)
    (12.0, 0)
    """
    left, attained, since = [seconds for _, seconds, _ in jobs], [0.0] * len(jobs), [0.0] * len(jobs)
    waiting: dict[tuple[int, int], list[int]] = {}
    running: set[int] = set()
    now, arrived, done, total, preemptions = 0.0, 0, 0, 0.0, 0

    def level_of(job: int, ran: float) -> int:
        service = (attained[job] + ran + CROSSING_SECONDS) * jobs[job][2]
        return sum(service >= threshold for threshold in THRESHOLDS)

    while done < len(jobs):
        for job in [job for job in running if since[job] + left[job] <= now]:
            running.remove(job)
            done, total = done + 1, total + now - jobs[job][0]
        while arrived < len(jobs) and jobs[arrived][0] <= now:
            heappush(waiting.setdefault((0, jobs[arrived][2]), []), arrived)
            arrived += 1
        levels = {job: level_of(job, now - since[job]) for job in running}
        queue = sorted((levels[job], 0, job, 0) for job in running)
        for (level, size), heap in waiting.items():
            if heap:
                heappush(queue, (level, 1, heap[0], size))  # a sorted list is a heap
        free, kept = gpus, set[int]()
        while queue and free:
            level, waits, job, _ = heappop(queue)
            if jobs[job][2] > free:
                continue  # nor do those behind it in its heap
            free -= jobs[job][2]
            kept.add(job)
            if waits:
                heap = waiting[level, jobs[job][2]]
                heappop(heap)
                since[job] = now
                if heap:
                    heappush(queue, (level, 1, heap[0], jobs[job][2]))
        for job in running - kept:
            ran = now - since[job]
            left[job], attained[job], preemptions = left[job] - ran, attained[job] + ran, preemptions + 1
            heappush(waiting.setdefault((levels[job], jobs[job][2]), []), job)
        running = kept
        coming = [jobs[arrived][0]] if arrived < len(jobs) else []
        for job in running:
            coming.append(since[job] + left[job])
            level = level_of(job, now - since[job])
            if level < len(THRESHOLDS):
                coming.append(now + THRESHOLDS[level] / jobs[job][2] - attained[job] - (now - since[job]))
        now = min(coming, default=math.inf)
    return total / len(jobs), preemptions
