"""A CPU job: compresses generated records for a while."""

from __future__ import annotations

import argparse
import time
import zlib

import numpy as np


def main() -> None:
    """Compress for the given CPU time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-seconds", type=float, default=2.0)
    cpu_seconds = parser.parse_args().cpu_seconds
    rng = np.random.default_rng(0)
    done, packed = 0, 0
    end = time.process_time() + cpu_seconds
    while time.process_time() < end:
        block = rng.integers(0, 32, 1 << 20, dtype=np.uint8).tobytes()
        packed += len(zlib.compress(block, level=6))
        done += len(block)
    print(f"{done / 2**20:.0f} MiB in, {packed / 2**20:.0f} MiB out", flush=True)


if __name__ == "__main__":
    main()
