"""Plays seeds of the deterministic simulation: python -m tests.control_plane --seeds 100, or --seed 7 to replay one."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from functools import partial
from multiprocessing import connection, get_context
from typing import Any

from tests.control_plane.faults import FAULTS, Faults, peace, trouble
from tests.control_plane.mutants import MUTANTS, mutant
from tests.control_plane.world import Outcome, run_seed

TOLD_EVERY = 100
HASHES = {"PYTHONHASHSEED": "0"}  # the order of sets of words is part of what is replayed


def main() -> int:
    """Play seeds; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.control_plane", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, and print its history")
    parser.add_argument("--seeds", type=int, default=100, help="so many of them")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--digests", action="store_true", help="print a digest of each history: it is always the same")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="break the build like this, and stop once it is seen")
    parser.add_argument("--mutants", action="store_true", help="break it in each way in turn, until that is seen")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        words = [sys.executable, "-m", "tests.control_plane", *sys.argv[1:]]
        return subprocess.run(words, env=os.environ | HASHES, check=False).returncode
    if options.mutants:
        return _find_out(options.seeds)
    faults = MUTANTS[options.mutant].faults if options.mutant else FAULTS
    with mutant(options.mutant) if options.mutant else nullcontext():
        return _replay(options.seed, faults) if options.seed is not None else _play(options, faults)


def outcomes(seeds: Iterable[int], jobs: int = 1, faults: Faults = FAULTS) -> Generator[Outcome, None, None]:
    """Play seeds, each in a copy of this process, so that none is changed by those before it; in their order.

    One without trouble is played here first, so that what is read and compiled once is there in all copies.
    """
    run_seed(-1, peace)
    gc.collect()
    gc.freeze()  # a leader that steps down looks for garbage, and this is none
    copies, ahead = get_context("fork"), iter(seeds)
    playing: dict[Any, tuple[int, Any]] = {}  # by where they will tell: the place of the seed, and the process
    played: dict[int, Outcome] = {}
    begun = told = 0
    try:
        while True:
            while len(playing) < jobs and (seed := next(ahead, None)) is not None:
                hears, tells = copies.Pipe(duplex=False)
                process = copies.Process(target=_tell_outcome, args=(tells, faults, seed))
                process.start()
                tells.close()
                playing[hears], begun = (begun, process), begun + 1
            if not playing:
                return
            heard: Any
            for heard in connection.wait(list(playing)):
                place, process = playing.pop(heard)
                played[place] = heard.recv()
                heard.close()
                process.join()
            while told in played:
                yield played.pop(told)
                told += 1
    finally:
        for _, process in playing.values():
            process.kill()
            process.join()


def _tell_outcome(tells: Any, faults: Faults, seed: int) -> None:
    tells.send(run_seed(seed, partial(trouble, faults=faults)))


def _replay(seed: int, faults: Faults) -> int:
    (outcome,) = outcomes([seed], faults=faults)
    for place, event in enumerate(outcome.events, 1):
        print(place, event)
    print(*outcome.faults, sep="\n")
    return _tell(outcome)


def _play(options: argparse.Namespace, faults: Faults) -> int:
    begin, wrong, played, events = time.perf_counter(), 0, 0, 0
    reached: Counter[str] = Counter()
    for outcome in outcomes(range(options.first, options.first + options.seeds), options.jobs, faults):
        played, events = played + 1, events + len(outcome.events)
        wrong += _tell(outcome)
        reached += outcome.reached
        if options.digests:
            print(f"seed {outcome.seed}: {outcome.digest}")
        if not played % TOLD_EVERY:
            print(f"{played} seeds so far, {wrong} with something wrong", file=sys.stderr, flush=True)
        if (wrong and options.mutant) or time.perf_counter() - begin > options.seconds:
            break
    spent = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    each = (used.ru_utime + used.ru_stime) / max(1, played)
    told = f"in {spent:.0f} s, {each:.3f} s of a processor each"
    print(f"{played} seeds, {events} events, {wrong} with something wrong, {told}")
    print("fail points reached: " + ", ".join(f"{point} {times}" for point, times in sorted(reached.items())))
    return int(wrong > 0)


def _find_out(seeds: int) -> int:
    """Play each broken build until its rule is broken; 1 where one is not in so many seeds."""
    missed = 0
    for name, broken in MUTANTS.items():
        with mutant(name), closing(outcomes(range(broken.first, broken.first + seeds), faults=broken.faults)) as played:
            seen = ((place, outcome, one) for place, outcome in enumerate(played, 1) for one in outcome.broken)
            found = next(((place, outcome, one) for place, outcome, one in seen if one.rule is broken.rule), None)
        if found:
            place, outcome, one = found
            print(f"{name}: found out by seed {outcome.seed}, the {place}. that was played: {one}", flush=True)
        else:
            print(f"{name}: NOT found out in {seeds} seeds", flush=True)
            missed += 1
    return int(missed > 0)


def _tell(outcome: Outcome) -> int:
    if outcome.wrong:
        print(f"seed {outcome.seed}: {'; '.join(outcome.wrong)}")
        print(f"  replay: python -m tests.control_plane --seed {outcome.seed}", flush=True)
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
