"""A job of a live twin, run like any user's job: fixed work per step, on as many threads as it has CPUs.

A step of a `steep` job hashes a number of blocks, divided among its CPUs, so its speed is proportional to them; a step
of a `level` job waits as if for an accelerator, and hashes one block. At its end it writes its step times by number of
CPUs, for the simulation of the same jobs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cotenant import progress

BLOCK = bytes(1 << 19)  # hashing it lets other threads run


def hashed(blocks: int) -> None:
    """Hash some blocks on one CPU."""
    for _ in range(blocks):
        hashlib.sha256(BLOCK).digest()


def main(kind: str, steps: int, blocks: int, pause_seconds: float, told: Path) -> None:
    """Run the steps, report each, and write the step times by number of CPUs."""
    took: dict[int, list[float]] = {}
    begin = last = time.time()
    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as threads:
        for step in range(1, steps + 1):
            cpus = len(os.sched_getaffinity(0))
            if kind == "level":
                time.sleep(pause_seconds)
                hashed(1)
            else:
                shares = [blocks // cpus + (number < blocks % cpus) for number in range(cpus)]
                list(threads.map(hashed, shares))
            now = time.time()
            took.setdefault(cpus, []).append(now - last)
            last = now
            progress.step(step)
    if os.environ.get("RANK", "0") != "0":
        return  # replicas of a gang take the same steps
    told.write_text(json.dumps({"begin": begin, "end": last, "took": took}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
