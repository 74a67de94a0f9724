"""Simulates a server that takes all waiting requests as its next batch: the slow twin of `predicting.latency`.

It knows nothing of Markov chains: it has a clock, a queue, and requests that are stamped when they come.
"""

from __future__ import annotations

from random import Random

WARM_SHARE = 0.1  # of the requests, ignored at the beginning


def simulate(per_request: float, fixed: float, rate: float, requests: int, seed: int) -> list[float]:
    """Return the latencies of requests, in order of their answers."""
    rng = Random(seed)
    latencies: list[float] = []
    came = rng.expovariate(rate)  # the next request
    now = 0.0
    waiting: list[float] = []
    while len(latencies) < requests:
        if not waiting:
            now = max(now, came)
            waiting.append(came)
            came += rng.expovariate(rate)
        batch, waiting = waiting, []
        now += per_request * len(batch) + fixed
        latencies.extend(now - stamp for stamp in batch)
        while came < now:
            waiting.append(came)
            came += rng.expovariate(rate)
    return latencies[int(WARM_SHARE * requests) :]


def simulate_full_batches(
    per_request: float, fixed: float, size: int, rate: float, requests: int, seed: int
) -> list[float]:
    """Return the latencies if the server waits until a batch is full."""
    rng = Random(seed)
    latencies: list[float] = []
    came = free = 0.0
    batch: list[float] = []
    while len(latencies) < requests:
        came += rng.expovariate(rate)
        batch.append(came)
        if len(batch) == size:
            free = max(free, came) + per_request * size + fixed
            latencies.extend(free - stamp for stamp in batch)
            batch = []
    return latencies[int(WARM_SHARE * requests) :]
