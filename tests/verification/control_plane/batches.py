"""Plays many seeds in copies of this process, each some after another: a copy for each would cost a third of it all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from typing import Any

from tests.verification.control_plane.faults import Faults, inject_faults, no_faults
from tests.verification.control_plane.playing import Outcome, digest_of, run_seed

SEEDS_PER_WORKER = 40  # by one copy; what a seed leaves behind, some megabytes, goes with it
SEED_SECONDS_MAX = 120.0  # of real time: one that takes longer goes round in circles
WARM_SEED = -1

Play = Callable[[int], Outcome]


class _Worker:
    """A copy of this process that plays one seed after the other, as it is told."""

    def __init__(self, play: Play) -> None:
        copies = get_context("fork")
        self.pipe, theirs = copies.Pipe()
        self._process: ForkProcess = copies.Process(target=_serve_seeds, args=(theirs, self.pipe, play))
        self._process.start()
        theirs.close()
        self._given = 0
        self.index, self.seed, self.since = 0, 0, 0.0

    @property
    def is_used_up(self) -> bool:
        """Whether another copy should go on."""
        return self._given >= SEEDS_PER_WORKER

    def send_seed(self, index: int, seed: int) -> None:
        """Let it play a seed; `pipe` tells what came of it."""
        self.index, self.seed, self.since, self._given = index, seed, time.perf_counter(), self._given + 1
        self.pipe.send(seed)

    def outcome(self) -> Outcome:
        """What came of the seed, or how the copy ended over it."""
        try:
            told: Outcome = self.pipe.recv()
            return told
        except EOFError:
            self.end()
            return Outcome(self.seed, [], [f"the process that played it ended with {self._process.exitcode}"])

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self.pipe.close()
        self._process.join()


def _serve_seeds(pipe: Any, others: Any, play: Play) -> None:
    others.close()  # or the end of whoever gives seeds would not be noticed
    gc.disable()
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        pipe.send(play(seed))


def outcomes(
    seeds: Iterable[int],
    jobs: int = 1,
    faults: Faults | None = None,
    *,
    events: bool = False,
    digests: bool = False,
) -> Generator[Outcome, None, None]:
    """Play seeds, so many at a time, and tell what came of them in their order; with `events`, their histories too.

    What befalls them is drawn from them, unless it is said.

    One without trouble is played here first, so that what is read and compiled once is there in all copies.
    """
    run_seed(WARM_SEED, no_faults)
    gc.collect()
    gc.freeze()  # a leader that steps down looks for garbage, and this is none
    return played(partial(_play_seed, faults=faults, events=events, digests=digests), seeds, jobs)


def played(
    play: Play, seeds: Iterable[int], jobs: int, seconds_max: float = SEED_SECONDS_MAX
) -> Generator[Outcome, None, None]:
    """Play seeds in copies of this process; one over which a copy ends, or does not end, has failed."""
    ahead = enumerate(seeds)
    idle: list[_Worker] = []
    playing: dict[Any, _Worker] = {}
    finished: dict[int, Outcome] = {}
    told = 0
    try:
        while True:
            while len(playing) < jobs and (item := next(ahead, None)) is not None:
                worker = idle.pop() if idle else _Worker(play)
                playing[worker.pipe] = worker
                worker.send_seed(*item)
            if not playing:
                return
            for pipe in connection.wait(list(playing), timeout=seconds_max / 10):
                worker = playing.pop(pipe)
                finished[worker.index] = worker.outcome()
                if worker.pipe.closed:
                    continue
                if worker.is_used_up:
                    worker.end()
                else:
                    idle.append(worker)
            for worker in [one for one in playing.values() if time.perf_counter() - one.since > seconds_max]:
                del playing[worker.pipe]
                worker.end()
                finished[worker.index] = Outcome(worker.seed, [], [f"it has not come to its end in {seconds_max:g} s"])
            while told in finished:
                yield finished.pop(told)
                told += 1
    finally:
        for worker in (*playing.values(), *idle):
            worker.end()


def _play_seed(seed: int, faults: Faults | None, events: bool, digests: bool) -> Outcome:
    """Play a seed; what nobody asks for is not carried over."""
    outcome = run_seed(seed, partial(inject_faults, faults=faults))
    if digests or outcome.wrong:
        outcome.digest = digest_of(outcome.events)
    if not events:
        outcome.events = []
    return outcome
