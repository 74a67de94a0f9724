"""A training loop with a data loader: processes prepare batches on the job's cores, the step consumes them.

The step imitates a GPU's: its time does not depend on the cores, so the loop is as fast as the slower of loader and
step. As with a real GPU job, too few cores starve it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time

import numpy as np

from cotenant import progress

BATCH_SECONDS = 0.09  # CPU time of the loader per batch
STEP_SECONDS = 0.05  # time of the declared GPU per batch


def load(seed: int) -> float:
    """Decode and augment one batch, which is real work on a core."""
    rng = np.random.default_rng(seed)
    end = time.process_time() + BATCH_SECONDS
    total = 0.0
    while time.process_time() < end:
        image = rng.standard_normal((64, 64))
        total += float(np.abs(np.fft.fft2(image)).mean())
    return total


def main() -> None:
    """Train for some steps and report each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    cores = len(os.sched_getaffinity(0))
    began = time.monotonic()
    with multiprocessing.Pool(cores) as loader:
        for step, batch in enumerate(loader.imap(load, range(steps)), 1):
            time.sleep(STEP_SECONDS)
            loss = 2.0 / (0.1 * step + 1) + 0.01 * (batch % 1)
            progress.step(step, loss=loss)
            if step % 10 == 0:
                print(f"step {step} loss {loss:.3f}", flush=True)
    rate = steps / (time.monotonic() - began)
    print(f"{steps} steps on {cores} cores: {rate:.1f} steps/s", flush=True)


if __name__ == "__main__":
    main()
