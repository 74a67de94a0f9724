"""Which gangs a cycle is asked about, one by one: those whose answer is known already are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from cotenant.core.model.gang import Gang
from cotenant.core.model.job_table import Ints, Jobs
from cotenant.core.model.refusal import Refusal
from cotenant.core.model.tenancy import Headroom
from cotenant.core.scheduling import cycle
from cotenant.core.scheduling.reservations import Reserving
from cotenant.simulator.free_resources import Free
from cotenant.simulator.job import Life, Shape
from cotenant.simulator.policy_set import AskedPlacement
from cotenant.simulator.waiting_jobs import Waiting

EVERYTHING = (math.inf, math.inf, math.inf)  # more GPUs, cores and memory than there ever are


class Candidates:
    """Gangs of jobs in their order. Whoever asks for the next one has placed the last one, or refused it.

    `headroom` is counted down by the cycle as gangs start, `free` here.
    """

    def __init__(
        self,
        lives: Mapping[int, Life],
        waiting: Waiting,
        placement: AskedPlacement,
        free: Free,
        headroom: Headroom,
        now: float,
    ) -> None:
        self._now = now
        self._lives, self._waiting, self._placement = lives, waiting, placement
        self._free = Free(free.gpu_milli, free.cores, free.memory_bytes)
        self._headroom = headroom

    def up_to_a_refusal(self, sequences: Ints) -> Iterator[Gang]:
        """Stop at the first gang that finds no room; one over its tenant's limit holds nobody back."""
        for sequence in sequences:
            life = self._lives[int(sequence)]
            if self._over_limit(life.shape):
                continue
            if self._free.lacks(life.shape):
                return
            yield life.gang(self._now)
            if self._placement.refusal:
                return
            self._free.take(life.shape)

    def hopeful(self, sequences: Ints) -> Iterator[Gang]:
        """Leave out shapes that were refused since something was last freed, and those that need more than is free."""
        shapes, needs, codes = self._waiting.known, self._waiting.needs, self._waiting.codes[sequences]
        unrefused = np.array([shape.refusal is None for shape in shapes], dtype=np.bool_)
        at, most = 0, EVERYTHING
        while True:
            free = self._free
            enough = free.gpu_milli >= most[0] and free.cores >= most[1] and free.memory_bytes >= most[2]
            if not enough:  # for one of the shapes at least, or one was refused
                hopeful = unrefused & (needs <= (free.gpu_milli, free.cores, free.memory_bytes)).all(axis=1)
                rest = hopeful[codes[at:]]
                sequences, codes, at = sequences[at:][rest], codes[at:][rest], 0
                most = needs[hopeful].max(axis=0, initial=0).tolist()
            if at == len(sequences):
                return
            code, sequence = int(codes[at]), int(sequences[at])
            shape = shapes[code]
            shape.refusal = self._over_limit(shape)
            if not shape.refusal:
                yield self._lives[sequence].gang(self._now)
                shape.refusal = self._placement.refusal
                if not shape.refusal:
                    self._free.take(shape)
                at += 1
            if shape.refusal is not None:
                unrefused[code], most = False, EVERYTHING

    def able_or_starving(self, sequences: Ints, rule: Reserving) -> Iterator[Gang]:
        """Leave out those that need more than is free, but for the first that starve: they may reserve something."""
        lacks, codes = (
            np.array([self._free.lacks(shape) for shape in self._waiting.known]),
            self._waiting.codes[sequences],
        )
        tries = rule.tries
        for sequence, lacking in zip(sequences.tolist(), lacks[codes].tolist(), strict=True):
            life = self._lives[sequence]
            if lacking and (not tries or self._now - life.waiting_since < rule.after_seconds):
                continue
            tries -= lacking
            yield life.gang(self._now)

    def _over_limit(self, shape: Shape) -> Refusal | None:
        """Say how one more gang of a shape would take its tenant over a limit."""
        return self._headroom.refuse(shape.tenant, shape.gpu_milli, shape.cores) if shape.tenant else None


def victims_of(
    lives: Mapping[int, Life],
    jobs: Jobs,
    choice: cycle.Choice,
    stop_cost_seconds: Callable[[Life, float], float],
    now: float,
) -> Iterator[cycle.Victim]:
    """Name those who may be stopped for others, what they hold, and what a stop would cost where that matters."""
    ahead = choice.ahead().tolist()
    if choice.standings is None:
        for sequence, first in zip(jobs.sequence[choice.victims].tolist(), ahead, strict=True):
            life = lives[sequence]
            yield cycle.Victim(life.job.id, life.holdings, first, life.shape.tenant)
        return
    standings = choice.standings.tolist()
    for sequence, first, standing in zip(jobs.sequence[choice.victims].tolist(), ahead, standings, strict=True):
        life = lives[sequence]
        cost = stop_cost_seconds(life, now)
        yield cycle.Victim(life.job.id, life.holdings, first, life.shape.tenant, standing, cost)
