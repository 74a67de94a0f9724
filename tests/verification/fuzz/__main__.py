"""Fuzzes all readers of outside input: `make fuzz ARGS="--inputs 1000000"`.

Each target runs in a separate process, so that a crash is a finding like any other; as many run in parallel as there
are cores (`--jobs`). Half of the inputs are spread evenly over all targets; the other half so that each target takes
the same time, as measured in the first half. It prints the statistics of each target, and for each finding the smallest
input that reproduces it; `--keep DIR` writes these inputs to files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.verification.fuzz import agent_sockets, calls, connections, sequences
from tests.verification.fuzz.runner import GROWTH_BYTES_MAX, Finding, LastInput, Outcome, name_of, run
from tests.verification.fuzz.targets import Target, all_targets

PROGRESS_SECONDS = 10.0
IN_MEMORY = Path("/dev/shm")
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Batch:
    """A number of inputs for a target, drawn from its own seed."""

    name: str
    target: Target | Callable[..., Outcome]
    inputs: int
    seed: str


@dataclass(slots=True)
class RunningBatch:
    """A batch in progress in another process."""

    batch: Batch
    child: BaseProcess
    last_input: LastInput
    outcome: Outcome


def main() -> int:
    """Run the selected targets; return 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.verification.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="total number of inputs; 20,000")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="repeat the inputs of this seed; default: random"
    )
    parser.add_argument("--only", default="", help="run targets whose names contain one of these, separated by commas")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="parallel processes; default: one per core"
    )
    parser.add_argument("--keep", type=Path, help="directory for inputs that reproduce findings")
    options = parser.parse_args()
    only = options.only.split(",")
    targets = {name: target for name, target in _targets() if any(part in name for part in only)}
    print(f"seed {options.seed}; {len(targets)} targets, {options.jobs} in parallel", flush=True)
    if not targets:
        return 2
    begun = time.monotonic()
    even = {name: options.inputs // (2 * len(targets)) for name in targets}
    first = _run_batches([Batch(name, targets[name], even[name], f"{options.seed}") for name in targets], options.jobs)
    rates = {one.target: _rate(one) for one in first}
    left, sum_of_rates = options.inputs - sum(even.values()), sum(rates.values())
    by_time = {name: round(left * rate / sum_of_rates) for name, rate in rates.items()}
    second = _run_batches(
        [Batch(name, targets[name], by_time[name], f"{options.seed}, on") for name in targets], options.jobs
    )
    return _print_summary(_merge([*first, *second]), options.keep, time.monotonic() - begun)


def _targets() -> Iterator[tuple[str, Target | Callable[..., Outcome]]]:
    for target in all_targets():
        yield target.name, target
    for name in calls.NAMES:
        yield name, calls.run
    yield connections.NAME, connections.run
    yield agent_sockets.NAME, agent_sockets.run
    yield sequences.NAME, sequences.run


def _rate(outcome: Outcome) -> float:
    return outcome.inputs / outcome.seconds if outcome.seconds and outcome.inputs else 1.0


def _run_batches(batches: Sequence[Batch], jobs: int) -> list[Outcome]:
    """Run batches in parallel, the longest first, as far as known."""
    waiting, running, outcomes = list(batches), dict[Connection, RunningBatch](), list[Outcome]()
    shown = time.monotonic()
    while waiting or running:
        while waiting and len(running) < max(1, jobs):
            pipe, one = _start(waiting.pop())
            running[pipe] = one
        ready = wait(list(running), PROGRESS_SECONDS)
        for pipe in [one for one in running if one in ready]:
            if _receive(pipe, one := running[pipe]):
                del running[pipe]
                outcomes.append(one.outcome)
                print("\n".join([_line(one.outcome), *map(str, one.outcome.findings)]), flush=True)
        if time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            progress = ", ".join(
                f"{one.batch.name} {one.outcome.inputs:,} of {one.batch.inputs:,}" for one in running.values()
            )
            print(f"  … {progress}", flush=True)
    return outcomes


def _start(batch: Batch) -> tuple[Connection, RunningBatch]:
    """Start a batch in a separate process."""
    last_input = LastInput()
    pipe, sending = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_run_in_child, args=(batch, last_input, sending))
    child.start()
    sending.close()
    return pipe, RunningBatch(batch, child, last_input, Outcome(batch.name))


def _receive(pipe: Connection, one: RunningBatch) -> bool:
    """Process a message of a child; return True once it has ended."""
    try:
        one.outcome, ended = pipe.recv()
    except EOFError:
        one.child.join()
        what = f"the process exited with {one.child.exitcode}"
        one.outcome.findings.append(Finding(one.batch.name, what, one.last_input.last()))
        return True
    if ended:
        one.child.join()
    return bool(ended)


def _run_in_child(batch: Batch, last_input: LastInput, sending: Connection) -> None:
    def watch(so_far: Outcome) -> None:
        sending.send((so_far, False))

    place = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="cotenant-fuzz-", dir=place) as directory:
        path = Path(directory)
        if isinstance(batch.target, Target):
            outcome = run(batch.target, batch.inputs, batch.seed, path, last_input, watch)
        else:
            outcome = batch.target(batch.name, batch.inputs, batch.seed, path, watch)
    sending.send((outcome, True))
    sending.close()


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.target:24} {outcome.inputs:9,} inputs {outcome.refused:9,} refused {_rate(outcome):9,.0f}/s "
        f"{outcome.grown_bytes / 2**20:+7.1f} MiB  {len(outcome.findings) or 'no'} findings"
    )


def _merge(outcomes: Sequence[Outcome]) -> Mapping[str, Outcome]:
    """Merge the outcomes of each target."""
    joined: dict[str, Outcome] = {}
    for one in outcomes:
        known = joined.setdefault(one.target, Outcome(one.target))
        known.inputs += one.inputs
        known.refused += one.refused
        known.seconds += one.seconds
        known.grown_bytes = max(known.grown_bytes, one.grown_bytes)
        known.findings += [new for new in one.findings if new.what not in {old.what for old in known.findings}]
    return joined


def _print_summary(outcomes: Mapping[str, Outcome], keep: Path | None, seconds: float) -> int:
    print("\ntotal:")
    for outcome in outcomes.values():
        print(_line(outcome))
    findings = [finding for outcome in outcomes.values() for finding in outcome.findings]
    findings += [
        Finding(outcome.target, f"grew by {outcome.grown_bytes >> 20} MiB", b"")
        for outcome in outcomes.values()
        if outcome.grown_bytes > GROWTH_BYTES_MAX
    ]
    for finding in findings:
        print(finding)
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{finding.target.replace(' ', '-').replace('/', '-')}-{name_of(finding.data)}").write_bytes(
                finding.data
            )
    inputs = sum(outcome.inputs for outcome in outcomes.values())
    print(f"{inputs:,} inputs in {seconds:,.0f} s, {len(findings) or 'no'} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    os.environ["GRPC_VERBOSITY"] = "NONE"
    sys.exit(main())
