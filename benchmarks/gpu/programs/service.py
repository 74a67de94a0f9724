"""A service that answers batches of requests at three loads, and writes the latency of each request.

First it times batches of several sizes; from the time per request follows what it can answer at most. At each load,
requests arrive at random (Poisson); an idle server starts at once, a busy one takes all that wait as its next batch. It
reports its batches as any service does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cotenant import progress

SIZES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 5
WAIT_FIXED_SECONDS, WAIT_REQUEST_SECONDS = 0.004, 0.0005  # of a batch of `--device none`
SIDE, SMALL_SIDE = 224, 32
Answer = Callable[[int], None]


def answering(device: str, *, small: bool) -> Answer:
    """Return the function that answers a batch of so many requests."""
    if device == "none":
        return lambda size: time.sleep(WAIT_FIXED_SECONDS + WAIT_REQUEST_SECONDS * size)
    import torch
    from benchmarks.gpu.programs import models

    side = SMALL_SIDE if small else SIDE
    network = models.build("image", small=small).to(device).eval()
    pool = torch.rand(max(SIZES), 3, side, side)

    def answer(size: int) -> None:
        for first in range(0, size, max(SIZES)):
            part = pool[: min(max(SIZES), size - first)]
            with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                network(part.to(device)).sum().item()  # waits for the device

    return answer


def timed(answer: Answer, size: int) -> float:
    """Answer a batch, report it, and return the seconds that it took."""
    begin = time.perf_counter()
    answer(size)
    took = time.perf_counter() - begin
    progress.batch(size, took)
    return took


def calibrate(answer: Answer) -> list[tuple[int, float]]:
    """Return the times of batches of each size, after a warm-up."""
    for size in SIZES:
        answer(size)
    return [(size, timed(answer, size)) for _ in range(REPEATS) for size in SIZES]


def per_request_seconds(batches: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the batch times over their size.

    >>> round(per_request_seconds([(1, 0.011), (4, 0.014), (8, 0.018), (16, 0.026)]), 6)
    0.001
    """
    medians = {size: statistics.median(took for other, took in batches if other == size) for size, _ in batches}
    slope, _ = np.polyfit(list(medians), list(medians.values()), 1)
    return max(float(slope), 1e-6)


def serve(answer: Answer, arrivals_per_second: float, seconds: float, seed: int) -> dict[str, Any]:
    """Serve at a rate for some seconds; return the latencies of its requests and its batches."""
    gaps = np.random.default_rng(seed).exponential(1 / arrivals_per_second, int(arrivals_per_second * seconds) + 1)
    due = np.cumsum(gaps)
    begin, done = time.perf_counter(), 0
    latencies: list[float] = []
    batches: list[tuple[int, float]] = []
    while done < len(due):
        now = time.perf_counter() - begin
        if due[done] > now:
            time.sleep(due[done] - now)
            continue
        waiting = int(np.searchsorted(due, now, side="right")) - done
        batches.append((waiting, timed(answer, waiting)))
        end = time.perf_counter() - begin
        latencies.extend((end - due[done : done + waiting]).tolist())
        done += waiting
    return {"arrivals_per_second": done / float(due[-1]), "latencies": latencies, "batches": batches}


def main() -> None:
    """Calibrate, serve at each load, and write the findings after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu", "none"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="at each load")
    parser.add_argument("--loads", default="0.5,0.8,0.95")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    answer = answering(arguments.device, small=arguments.small)
    calibration = calibrate(answer)
    most = 1 / per_request_seconds(calibration)
    found: dict[str, Any] = {"calibration": calibration, "most_per_second": most, "loads": {}}
    for number, load in enumerate(arguments.loads.split(",")):
        found["loads"][load] = serve(answer, float(load) * most, arguments.seconds, number)
        new = arguments.out.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.rename(arguments.out)


if __name__ == "__main__":
    main()
