"""Takes memory bandwidth (`stream`) or the last-level cache (`cache`), with a process for each core that it may use."""

from __future__ import annotations

import argparse
import os

import numpy as np

STREAM_CACHES, CACHE_SHARE = 4.0, 0.5  # sizes of the arrays, in last-level caches: of each process, of all together


def stream(doubles: int) -> None:
    """Copy and add arrays that no cache holds, without end."""
    one, other = np.ones(doubles), np.ones(doubles)
    while True:
        np.add(one, other, out=other)


def thrash(doubles: int, seed: int) -> None:
    """Read and write an array that fills part of a cache, in random order, without end."""
    values = np.ones(doubles)
    places = np.random.default_rng(seed).permutation(doubles)
    while True:
        values[places] = values[places[::-1]]


def main() -> None:
    """Fork a process for each core, and work until ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("stream", "cache"))
    parser.add_argument("--cache-bytes", type=int, required=True, help="size of the last-level cache")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    number = next((number for number in range(1, cores) if os.fork() == 0), 0)
    if arguments.kind == "stream":
        stream(int(STREAM_CACHES * arguments.cache_bytes) // 16)
    else:
        thrash(int(CACHE_SHARE * arguments.cache_bytes) // 24 // cores, number)  # with the order: 24 bytes an element


if __name__ == "__main__":
    main()
