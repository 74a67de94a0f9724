"""Fuzzes for as long as one likes: `make fuzz ARGS="--inputs 1000000"`.

Each target runs in a process of its own, so that a crash is a finding like others. It prints what each target took,
and of each finding the smallest input that shows it; `--keep DIR` writes these into files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz import calls
from tests.fuzz.running import GROWTH_BYTES_MAX, Finding, Outcome, Traced, name_of, run
from tests.fuzz.targets import Target, all_targets

CALLS_SHARE = 0.03  # of all inputs: a call costs as much as a hundred small files
PROGRESS_SECONDS = 10.0
FORK = multiprocessing.get_context("fork")


def main() -> int:
    """Run what was asked for; 1 where something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="in all")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="repeats a run; by default another each time"
    )
    parser.add_argument("--only", default="", help="targets whose name holds this")
    parser.add_argument("--keep", type=Path, help="a directory for inputs that show findings")
    told = parser.parse_args()
    files = [target for target in all_targets() if told.only in target.name]
    with_calls = [name for name in calls.NAMES if told.only in name]
    print(f"seed {told.seed}; {len(files) + len(with_calls)} targets", flush=True)
    for_calls = (int(told.inputs * CALLS_SHARE) if files else told.inputs) if with_calls else 0
    shares = sum(target.share for target in files)
    outcomes = []
    for target in files:
        outcomes.append(_apart(target, round((told.inputs - for_calls) * target.share / shares), told.seed))
        _print(outcomes[-1])
    for name in with_calls:
        outcomes.append(_apart(name, for_calls // len(with_calls), told.seed))
        _print(outcomes[-1])
    return _sum_up(outcomes, told.keep)


def _apart(target: Target | str, inputs: int, seed: int) -> Outcome:
    """Run a target in a process of its own."""
    traced = Traced()
    receiving, sending = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_child, args=(target, inputs, seed, traced, sending))
    child.start()
    sending.close()
    name = target if isinstance(target, str) else target.name
    outcome, shown = Outcome(name), time.monotonic()
    ended = False
    while not ended:
        try:
            outcome, ended = receiving.recv()
        except EOFError:
            break
        if not ended and time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"  … {name}: {outcome.inputs:,} of {inputs:,}", flush=True)
    child.join()
    if not ended:
        what = f"the process ended with {child.exitcode}"
        outcome.findings.append(Finding(name, what, traced.last()))
    return outcome


def _child(target: Target | str, inputs: int, seed: int, traced: Traced, sending: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="cotenant-fuzz-") as directory:
        path = Path(directory)
        if isinstance(target, str):
            outcome = calls.run(target, inputs, seed, path, lambda so_far: sending.send((so_far, False)))
        else:
            outcome = run(target, inputs, seed, path, traced, lambda so_far: sending.send((so_far, False)))
    sending.send((outcome, True))
    sending.close()


def _print(outcome: Outcome) -> None:
    rate = outcome.inputs / outcome.seconds if outcome.seconds else 0.0
    print(
        f"{outcome.target:24} {outcome.inputs:9,} inputs {outcome.refused:9,} refused {rate:9,.0f}/s "
        f"{outcome.grown_bytes / 2**20:+7.1f} MiB  {len(outcome.findings) or 'no'} findings",
        flush=True,
    )


def _sum_up(outcomes: Sequence[Outcome], keep: Path | None) -> int:
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    findings += [
        Finding(outcome.target, f"grew by {outcome.grown_bytes >> 20} MiB", b"")
        for outcome in outcomes
        if outcome.grown_bytes > GROWTH_BYTES_MAX
    ]
    for finding in findings:
        print(finding)
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{finding.target.replace(' ', '-').replace('/', '-')}-{name_of(finding.data)}").write_bytes(
                finding.data
            )
    inputs = sum(outcome.inputs for outcome in outcomes)
    print(f"{inputs:,} inputs in all, {len(findings) or 'no'} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(main())
