"""Plays seeds of the deterministic simulation: python -m tests.control_plane --seeds 100, or --seed 7 to replay one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from multiprocessing import get_context

from tests.control_plane.faults import peace, trouble
from tests.control_plane.mutants import MUTANTS, mutant
from tests.control_plane.world import Outcome, run_seed

HASHES = {"PYTHONHASHSEED": "0"}  # the order of sets of words is part of what is replayed


def main() -> int:
    """Play seeds; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.control_plane", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and print its history")
    parser.add_argument("--seeds", type=int, default=100, help="so many of them")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the build like this, and stop once it is seen")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        words = [sys.executable, "-m", "tests.control_plane", *sys.argv[1:]]
        return subprocess.run(words, env=os.environ | HASHES, check=False).returncode
    with mutant(options.mutant) if options.mutant else nullcontext():
        return _replay(options.seed) if options.seed is not None else _play(options)


def outcomes(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Play seeds, each in a copy of this process, so that none is changed by those before it.

    One without trouble is played here first, so that what is read and compiled once is there in all copies.
    """
    run_seed(-1, peace)
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(_outcome, seeds)


def _outcome(seed: int) -> Outcome:
    return run_seed(seed, trouble)


def _replay(seed: int) -> int:
    (outcome,) = outcomes([seed])
    for place, event in enumerate(outcome.events, 1):
        print(place, event)
    print(*outcome.faults, sep="\n")
    return _tell(outcome)


def _play(options: argparse.Namespace) -> int:
    begin, wrong, played, events = time.perf_counter(), 0, 0, 0
    for outcome in outcomes(range(options.first, options.first + options.seeds)):
        played, events = played + 1, events + len(outcome.events)
        wrong += _tell(outcome)
        if (wrong and options.mutant) or time.perf_counter() - begin > options.seconds:
            break
    spent = time.perf_counter() - begin
    print(f"{played} seeds, {events} events, {wrong} with something wrong, in {spent:.0f} s")
    return int(wrong > 0)


def _tell(outcome: Outcome) -> int:
    if outcome.wrong:
        print(f"seed {outcome.seed}: {'; '.join(outcome.wrong)}")
        print(f"  replay: python -m tests.control_plane --seed {outcome.seed}", flush=True)
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
