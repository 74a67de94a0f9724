"""Compares the decisions of live meshes with simulations of their snapshots, over many random worlds.

python -m tests.verification.decisions --worlds 1000
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Sequence

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
    began = time.perf_counter()
    different = asyncio.run(_compare(range(options.first, options.first + options.worlds)))
    seconds = time.perf_counter() - began
    print(f"{options.worlds:,} worlds of {CYCLES} cycles, {different} with differences; {seconds:.0f} s")
    return int(different > 0)


async def _compare(seeds: Sequence[int]) -> int:
    """Print the differences of each world; return how many worlds have some."""
    different = 0
    for number, seed in enumerate(seeds, 1):
        found = await differences(seed)
        different += bool(found)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
        if number % PROGRESS_EVERY == 0 and number < len(seeds):
            print(f"{number:,} of {len(seeds):,} worlds", file=sys.stderr, flush=True)
    return different


sys.exit(main())
