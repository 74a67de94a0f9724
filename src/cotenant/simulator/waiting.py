"""Who waits, by shape, and who has waited so long that the placement policy would give another answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, ValuesView

import numpy as np

from cotenant.core.table import Ints
from cotenant.simulator.lives import Life, Shape
from cotenant.simulator.policies import AskedPlacement


class Waiting:
    """Shapes of which some gang waits. Where the policy discerns gangs by their waits, they stand in line by them.

    `known` are all shapes of which there ever was a job, by code; `codes` tells each job's, by sequence.
    """

    def __init__(self, placement: AskedPlacement, jobs: int) -> None:
        self.known: list[Shape] = []
        self.codes: Ints = np.zeros(jobs, dtype=np.int64)
        self._placement = placement
        self._shapes: dict[int, Shape] = {}  # by code

    def __bool__(self) -> bool:
        return bool(self._shapes)

    @property
    def shapes(self) -> ValuesView[Shape]:
        """Those of which some gang waits."""
        return self._shapes.values()

    def join(self, life: Life, shape: Shape) -> None:
        """Let a job be of a shape from now on."""
        if shape.code < 0:
            shape.code = len(self.known)
            self.known.append(shape)
        life.shape = shape
        self.codes[life.sequence] = shape.code

    def hope(self) -> None:
        """Forget why gangs were refused, for something was freed."""
        for shape in self.known:
            shape.refusal = None

    def add(self, life: Life) -> None:
        """A gang begins to wait, as one of its shape."""
        shape = life.shape
        shape.waiting += 1
        self._shapes[shape.code] = shape
        if self._placement.discerns:
            shape.line[life.sequence] = life

    def remove(self, life: Life) -> None:
        """It waits no more, or not as one of that shape."""
        shape = life.shape
        shape.line.pop(life.sequence, None)
        shape.waiting -= 1
        if not shape.waiting:
            del self._shapes[shape.code]

    def grow_older(self, now: float) -> Iterator[Life]:
        """Let those be of a later shape that have waited for long enough; gives them."""
        for life, shape in self._overdue(now):
            self.remove(life)
            self.join(life, shape)
            self.add(life)
            yield life

    def _overdue(self, now: float) -> Iterator[tuple[Life, Shape]]:
        """Give those who should be of a later shape by now, one by one, with that shape; each must have it at once."""
        for shape in list(self._shapes.values()):
            while shape.line and now >= (life := next(iter(shape.line.values()))).waiting_since + shape.until_waited:
                later, waited = shape, now - life.waiting_since
                while waited >= later.until_waited or later is shape:
                    later = self._after(later, life, now)
                yield life, later

    def _after(self, shape: Shape, life: Life, now: float) -> Shape:
        """Find the shape that gangs of one have once they have waited for too long."""
        if shape.later is None:
            oldest = shape.gang(life.job.id, shape.until_waited)
            shape.later = shape.after_it(self._placement.alike_seconds(oldest), now)
        return shape.later

    @property
    def relaxes_at(self) -> float:
        """When the first of those who were refused gets another answer, though nothing else happens."""
        return min((shape.relaxes_at for shape in self._shapes.values()), default=math.inf)
