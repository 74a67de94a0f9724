"""Runs many seeds in worker processes, each of them several: a fork per seed would cost a third of the time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from typing import Any

from tests.verification.control_plane.faults import Faults, inject_faults, no_faults
from tests.verification.control_plane.simulation import Outcome, digest_of, run_seed

SEEDS_PER_WORKER = 40  # per worker; some megabytes that a seed leaves behind go with it
SEED_SECONDS_MAX = 120.0  # of real time: a longer one loops forever
WARM_SEED = -1

RunSeed = Callable[[int], Outcome]


class _Worker:
    """A forked process that runs seeds one after another."""

    def __init__(self, run_one: RunSeed) -> None:
        copies = get_context("fork")
        self.pipe, theirs = copies.Pipe()
        self._process: ForkProcess = copies.Process(target=_serve_seeds, args=(theirs, self.pipe, run_one))
        self._process.start()
        theirs.close()
        self._given = 0
        self.index, self.seed, self.since = 0, 0, 0.0

    @property
    def is_used_up(self) -> bool:
        """Return whether it should be replaced."""
        return self._given >= SEEDS_PER_WORKER

    def send_seed(self, index: int, seed: int) -> None:
        """Start a seed; its outcome arrives at `pipe`."""
        self.index, self.seed, self.since, self._given = index, seed, time.perf_counter(), self._given + 1
        self.pipe.send(seed)

    def outcome(self) -> Outcome:
        """Return the outcome of the seed, or how the worker ended."""
        try:
            outcome: Outcome = self.pipe.recv()
            return outcome
        except EOFError:
            self.end()
            return Outcome(self.seed, [], [f"the process that ran it exited with {self._process.exitcode}"])

    def end(self) -> None:
        """Kill the worker."""
        self._process.kill()
        self.pipe.close()
        self._process.join()


def _serve_seeds(pipe: Any, others: Any, run_one: RunSeed) -> None:
    others.close()  # otherwise the end of the parent would go unnoticed
    gc.disable()
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        pipe.send(run_one(seed))


def outcomes(
    seeds: Iterable[int],
    jobs: int = 1,
    faults: Faults | None = None,
    *,
    events: bool = False,
    digests: bool = False,
) -> Generator[Outcome, None, None]:
    """Run seeds in parallel, and yield their outcomes in order; with `events`, with their histories.

    By default the faults are drawn from each seed.

    A seed without faults runs here first, so that modules and caches are loaded in all workers.
    """
    run_seed(WARM_SEED, no_faults)
    gc.collect()
    gc.freeze()  # workers share it, and never scan it
    return run_in_workers(partial(_run_seed, faults=faults, events=events, digests=digests), seeds, jobs)


def run_in_workers(
    run_one: RunSeed, seeds: Iterable[int], jobs: int, seconds_max: float = SEED_SECONDS_MAX
) -> Generator[Outcome, None, None]:
    """Run seeds in workers; a seed fails if its worker ends or does not finish."""
    ahead = enumerate(seeds)
    idle: list[_Worker] = []
    busy: dict[Any, _Worker] = {}
    finished: dict[int, Outcome] = {}
    yielded = 0
    try:
        while True:
            while len(busy) < jobs and (item := next(ahead, None)) is not None:
                worker = idle.pop() if idle else _Worker(run_one)
                busy[worker.pipe] = worker
                worker.send_seed(*item)
            if not busy:
                return
            for pipe in connection.wait(list(busy), timeout=seconds_max / 10):
                worker = busy.pop(pipe)
                finished[worker.index] = worker.outcome()
                if worker.pipe.closed:
                    continue
                if worker.is_used_up:
                    worker.end()
                else:
                    idle.append(worker)
            for worker in [one for one in busy.values() if time.perf_counter() - one.since > seconds_max]:
                del busy[worker.pipe]
                worker.end()
                finished[worker.index] = Outcome(worker.seed, [], [f"it has not finished within {seconds_max:g} s"])
            while yielded in finished:
                yield finished.pop(yielded)
                yielded += 1
    finally:
        for worker in (*busy.values(), *idle):
            worker.end()


def _run_seed(seed: int, faults: Faults | None, events: bool, digests: bool) -> Outcome:
    """Run a seed; drop what was not requested."""
    outcome = run_seed(seed, partial(inject_faults, faults=faults))
    if digests or outcome.wrong:
        outcome.digest = digest_of(outcome.events)
    if not events:
        outcome.events = []
    return outcome
