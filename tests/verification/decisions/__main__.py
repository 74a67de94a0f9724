"""Compares the decisions of live meshes with simulations of their snapshots, over many random worlds.

python -m tests.verification.decisions --worlds 1000
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time

import structlog
from tests.verification.decisions.comparison import CYCLES, differences

PROGRESS_EVERY = 50


def main() -> int:
    """Run the worlds; return 1 if a decision differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.verification.decisions", description=__doc__)
    parser.add_argument("--worlds", type=int, default=100, help="number of random worlds")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    began, different = time.perf_counter(), 0
    for number, seed in enumerate(range(options.first, options.first + options.worlds), 1):
        found = asyncio.run(differences(seed))
        different += bool(found)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
        if number % PROGRESS_EVERY == 0 and number < options.worlds:
            print(f"{number:,} of {options.worlds:,} worlds", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    print(f"{options.worlds:,} worlds of {CYCLES} cycles, {different} with differences; {seconds:.0f} s")
    return int(different > 0)


sys.exit(main())
