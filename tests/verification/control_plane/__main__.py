"""Runs seeds of the deterministic simulation of the control plane.

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

from tests.verification.control_plane.faults import Faults
from tests.verification.control_plane.mutants import MUTANTS, mutant
from tests.verification.control_plane.simulation import Outcome
from tests.verification.control_plane.worker_pool import outcomes

PROGRESS_EVERY_SECONDS = 15.0
SETTINGS = {
    "PYTHONHASHSEED": "0",  # the order of sets of strings is part of the replay
    "OPENBLAS_NUM_THREADS": "1",  # each worker would start its own, without work for them
}


def main() -> int:
    """Run seeds; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.verification.control_plane", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed, and print its history")
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel processes")
    parser.add_argument("--digests", action="store_true", help="print each history's digest, which is always the same")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="run this broken build, and stop once it is detected")
    parser.add_argument("--mutants", action="store_true", help="run each broken build in turn, until it is detected")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        words = [sys.executable, "-m", "tests.verification.control_plane", *sys.argv[1:]]
        return subprocess.run(words, env=os.environ | SETTINGS, check=False).returncode
    if options.mutants:
        return _detect_mutants(options.seeds)
    faults = MUTANTS[options.mutant].faults if options.mutant else None
    with mutant(options.mutant) if options.mutant else nullcontext():
        return _replay(options.seed, faults) if options.seed is not None else _run_seeds(options, faults)


def _replay(seed: int, faults: Faults | None) -> int:
    (outcome,) = outcomes([seed], faults=faults, events=True)
    for place, event in enumerate(outcome.events, 1):
        print(place, event)
    print(*outcome.faults, sep="\n")
    return _print_outcome(outcome)


@dataclass
class _Totals:
    """The combined outcomes of seeds."""

    seeds: int
    began: float = field(default_factory=time.perf_counter)
    finished: int = 0
    wrong: int = 0
    faults: int = 0
    virtual_seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.finished += 1
        self.wrong += bool(outcome.wrong)
        self.faults += len(outcome.faults)
        self.virtual_seconds += outcome.virtual_seconds
        self.reached += outcome.reached
        self.counted += outcome.counted

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def progress(self) -> str:
        left_seconds = self.seconds / self.finished * (self.seeds - self.finished)
        pace = f"{60 * self.finished / self.seconds:,.0f} a minute, about {left_seconds:,.0f} s left"
        return f"{self.finished:,} of {self.seeds:,} seeds, {self.wrong} with errors; {pace}"

    def summary(self) -> str:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        each = (used.ru_utime + used.ru_stime) / max(1, self.finished)
        points = ", ".join(f"{point} {times}" for point, times in sorted(self.reached.items()))
        commits, parts = self.counted["Commit"], self.counted["Began"]
        checked = f"{self.counted.total():,} events, with {commits:,} commits and {parts:,} started parts of attempts"
        injected = f"{self.faults:,} faults in {self.virtual_seconds / 3600:,.1f} h of simulated time"
        pace = f"{60 * self.finished / self.seconds:,.0f} a minute for {self.seconds:,.0f} s"
        return "\n".join(
            [
                f"fail points reached: {points}",
                f"checked: {checked}; {injected}",
                f"{self.finished:,} seeds, {self.wrong} with errors; {pace}, {each:.3f} s of CPU time each",
            ]
        )


def _run_seeds(options: argparse.Namespace, faults: Faults | None) -> int:
    total, next_progress = _Totals(options.seeds), PROGRESS_EVERY_SECONDS
    seeds = range(options.first, options.first + options.seeds)
    with closing(outcomes(seeds, options.jobs, faults, digests=options.digests)) as finished:
        for outcome in finished:
            total.add(outcome)
            _print_outcome(outcome)
            if outcome.wrong and not options.mutant:
                _run_alone(outcome, faults)
            if options.digests:
                print(f"seed {outcome.seed}: {outcome.digest}")
            if total.seconds > next_progress:
                print(total.progress(), file=sys.stderr, flush=True)
                next_progress = total.seconds + PROGRESS_EVERY_SECONDS
            if (total.wrong and options.mutant) or total.seconds > options.seconds:
                break
    print(total.summary())
    return int(total.wrong > 0)


def _run_alone(outcome: Outcome, faults: Faults | None) -> None:
    """Run a failed seed again in a separate process: earlier seeds may not have influenced it."""
    (alone,) = outcomes([outcome.seed], faults=faults, digests=True)
    if alone.digest != outcome.digest:
        print(f"  run alone it has another history: {'; '.join(alone.wrong) or 'without errors'}", flush=True)


def _detect_mutants(seeds: int) -> int:
    """Run each broken build until its rule is violated; return 1 if one is not detected within the seeds."""
    missed = 0
    for name, broken in MUTANTS.items():
        seeds_of_build = range(broken.first, broken.first + seeds)
        with mutant(name), closing(outcomes(seeds_of_build, faults=broken.faults)) as finished:
            seen = ((place, outcome, one) for place, outcome in enumerate(finished, 1) for one in outcome.broken)
            found = next(((place, outcome, one) for place, outcome, one in seen if one.rule is broken.rule), None)
        if found:
            place, outcome, one = found
            print(f"{name}: detected by seed {outcome.seed}, after {place} seeds: {one}", flush=True)
        else:
            print(f"{name}: NOT detected in {seeds} seeds", flush=True)
            missed += 1
    return int(missed > 0)


def _print_outcome(outcome: Outcome) -> int:
    if outcome.wrong:
        print(f"seed {outcome.seed}: {'; '.join(outcome.wrong)}")
        print(f"  replay: python -m tests.verification.control_plane --seed {outcome.seed}", flush=True)
    return int(bool(outcome.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
