"""Plays seeds of the deterministic simulation of the control plane.

python -m tests.verification.control_plane --seeds 100, or --seed 7 to replay one.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import dataclass, field

from tests.verification.control_plane.batches import outcomes
from tests.verification.control_plane.faults import Faults
from tests.verification.control_plane.mutants import MUTANTS, mutant
from tests.verification.control_plane.playing import Outcome

PROGRESS_EVERY_SECONDS = 15.0
SETTINGS = {
    "PYTHONHASHSEED": "0",  # the order of sets of words is part of what is replayed
    "OPENBLAS_NUM_THREADS": "1",  # each copy would start its own, which have nothing to do
}


def main() -> int:
    """Play seeds; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.verification.control_plane", description=__doc__)
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
        words = [sys.executable, "-m", "tests.verification.control_plane", *sys.argv[1:]]
        return subprocess.run(words, env=os.environ | SETTINGS, check=False).returncode
    if options.mutants:
        return _detect_mutants(options.seeds)
    faults = MUTANTS[options.mutant].faults if options.mutant else None
    with mutant(options.mutant) if options.mutant else nullcontext():
        return _replay(options.seed, faults) if options.seed is not None else _play_seeds(options, faults)


def _replay(seed: int, faults: Faults | None) -> int:
    (outcome,) = outcomes([seed], faults=faults, events=True)
    for place, event in enumerate(outcome.events, 1):
        print(place, event)
    print(*outcome.faults, sep="\n")
    return _print_outcome(outcome)


@dataclass
class _Totals:
    """What came of many seeds."""

    seeds: int
    began: float = field(default_factory=time.perf_counter)
    played: int = 0
    wrong: int = 0
    faults: int = 0
    virtual_seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.played += 1
        self.wrong += bool(outcome.wrong)
        self.faults += len(outcome.faults)
        self.virtual_seconds += outcome.virtual_seconds
        self.reached += outcome.reached
        self.counted += outcome.counted

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def progress(self) -> str:
        left_seconds = self.seconds / self.played * (self.seeds - self.played)
        pace = f"{60 * self.played / self.seconds:,.0f} a minute, about {left_seconds:,.0f} s left"
        return f"{self.played:,} of {self.seeds:,} seeds, {self.wrong} with something wrong; {pace}"

    def summary(self) -> str:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        each = (used.ru_utime + used.ru_stime) / max(1, self.played)
        points = ", ".join(f"{point} {times}" for point, times in sorted(self.reached.items()))
        commits, parts = self.counted["Commit"], self.counted["Began"]
        checked = (
            f"{self.counted.total():,} events, {commits:,} commits and {parts:,} begun parts of attempts among them"
        )
        befell = f"{self.faults:,} faults in {self.virtual_seconds / 3600:,.1f} h of the worlds' time"
        pace = f"{60 * self.played / self.seconds:,.0f} a minute for {self.seconds:,.0f} s"
        return "\n".join(
            [
                f"fail points reached: {points}",
                f"checked: {checked}; {befell}",
                f"{self.played:,} seeds, {self.wrong} with something wrong; {pace}, {each:.3f} s of a processor each",
            ]
        )


def _play_seeds(options: argparse.Namespace, faults: Faults | None) -> int:
    total, next_progress = _Totals(options.seeds), PROGRESS_EVERY_SECONDS
    seeds = range(options.first, options.first + options.seeds)
    with closing(outcomes(seeds, options.jobs, faults, digests=options.digests)) as played:
        for outcome in played:
            total.add(outcome)
            _print_outcome(outcome)
            if outcome.wrong and not options.mutant:
                _play_alone(outcome, faults)
            if options.digests:
                print(f"seed {outcome.seed}: {outcome.digest}")
            if total.seconds > next_progress:
                print(total.progress(), file=sys.stderr, flush=True)
                next_progress = total.seconds + PROGRESS_EVERY_SECONDS
            if (total.wrong and options.mutant) or total.seconds > options.seconds:
                break
    print(total.summary())
    return int(total.wrong > 0)


def _play_alone(outcome: Outcome, faults: Faults | None) -> None:
    """Play a seed that failed once more in a process of its own: nothing that was played before may have changed it."""
    (alone,) = outcomes([outcome.seed], faults=faults, digests=True)
    if alone.digest != outcome.digest:
        print(
            f"  played alone it is another history: {'; '.join(alone.wrong) or 'nothing is wrong with it'}", flush=True
        )


def _detect_mutants(seeds: int) -> int:
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


def _print_outcome(outcome: Outcome) -> int:
    if outcome.wrong:
        print(f"seed {outcome.seed}: {'; '.join(outcome.wrong)}")
        print(f"  replay: python -m tests.verification.control_plane --seed {outcome.seed}", flush=True)
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
