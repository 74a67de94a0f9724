"""Who waits, by shape, and who has waited so long that the placement policy would give another answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from dataclasses import replace

import numpy as np

from cotenant.core.model.job_table import Ints
from cotenant.core.model.refusal import Code, Refusal
from cotenant.simulator.free_resources import Free
from cotenant.simulator.job import Life, Shape
from cotenant.simulator.policy_set import AskedPlacement

ROUNDING_SECONDS = 1e-6
SHAPES_FEW = 64  # for which there is room at first
HOLDS_SECONDS_MIN = 1.0  # a refusal is asked about anew no sooner, though nothing happens


class Waiting:
    """Shapes of which some gang waits. Where the policy discerns gangs by their waits, they stand in line by them.

    `known` are all shapes of which there ever was a job, by code; `codes` tells each job's, by sequence.
    """

    def __init__(self, placement: AskedPlacement, jobs: int) -> None:
        self.known: list[Shape] = []
        self.codes: Ints = np.zeros(jobs, dtype=np.int64)
        self._needs: Ints = np.zeros((SHAPES_FEW, 3), dtype=np.int64)
        self._placement = placement
        self._hopes_at = math.inf
        self._shapes: dict[int, Shape] = {}  # by code

    def __bool__(self) -> bool:
        return bool(self._shapes)

    @property
    def shapes(self) -> ValuesView[Shape]:
        """Those of which some gang waits."""
        return self._shapes.values()

    @property
    def needs(self) -> Ints:
        """What gangs need, by the code of their shape: GPUs in thousandths, cores and memory."""
        return self._needs[: len(self.known)]

    def join(self, life: Life, shape: Shape) -> None:
        """Let a job be of a shape from now on."""
        if shape.code < 0:
            shape.code = len(self.known)
            self.known.append(shape)
            if len(self.known) > len(self._needs):
                self._needs = np.concatenate([self._needs, self._needs])
            self._needs[shape.code] = shape.gpu_milli, shape.cores, shape.memory_bytes
        life.shape = shape
        self.codes[life.sequence] = shape.code

    def hope(self) -> None:
        """Forget why gangs were refused, for something was freed."""
        for shape in self.known:
            shape.refusal = None

    def doubt(self, now: float) -> None:
        """Forget why gangs were refused where some refusal held only until now."""
        if now >= self._hopes_at:
            self._hopes_at = math.inf
            self.hope()

    def hopes_at(self, refusals: Iterable[Refusal], now: float) -> float:
        """Say when somebody is to be asked again though nothing was freed, once these were refused too.

        Those whose places are in fragments are watched instead.
        """
        holds = [refusal.holds_seconds for refusal in refusals if refusal.code is not Code.FRAGMENTED]
        self._hopes_at = min([self._hopes_at, *(now + max(seconds, HOLDS_SECONDS_MIN) for seconds in holds)])
        return self._hopes_at

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

    def size_anew(self, lives: Iterable[Life], size: Callable[[Life], Shape | None], now: float) -> Iterator[Life]:
        """Let those be of another shape that wait and have another size now, as `size` says; gives them.

        They have waited for as long as before.
        """
        for life in [life for life in lives if not life.running]:
            if shape := size(life):
                waited = life.fragmented_until(now)
                self.remove(life)
                self.join(life, shape)
                self.add(life)
                life.fragmented_mark = shape.fragmented.read(now) - waited
                shape.line = dict(sorted(shape.line.items(), key=lambda one: -one[1].fragmented_until(now)))
                yield life

    def grow_older(self, now: float) -> Iterator[Life]:
        """Let those be of a later shape that have waited for long enough; gives them."""
        shapes = [shape for shape in self._shapes.values() if shape.until_seconds < math.inf]
        for shape in shapes:  # grows by the later ones, of which some may be too old already
            before = len(shapes)
            while shape.line and _due(life := next(iter(shape.line.values())), now):
                later, waited = self._after(shape, now), life.fragmented_until(now)
                self.remove(life)
                self.join(life, later)
                self.add(life)
                life.fragmented_mark = later.fragmented.read(now) - waited
                shapes += [later] * (len(shapes) == before)
                yield life

    def _after(self, shape: Shape, now: float) -> Shape:
        """Find the shape that gangs of one have once they have waited for too long."""
        if shape.later is None:
            oldest = replace(shape.gang(""), fragmented_seconds=shape.until_seconds)
            shape.later = shape.after_it(self._placement.alike_seconds(oldest), now)
        return shape.later

    def watch(self, refusals: Mapping[str, Refusal], free: Free, now: float) -> float:
        """Note whose places are in fragments from now on; returns in how long the first of them gets another answer.

        `refusals` are those of the last cycle, by job; beside them there is what shapes were refused for before. Who
        needs more than is `free` waits for that.
        """
        apart = {job_id for job_id, refusal in refusals.items() if refusal.code is Code.FRAGMENTED}
        for shape in self._shapes.values():
            known = shape.refusal is not None and shape.refusal.code is Code.FRAGMENTED
            refused = known or (bool(apart) and any(life.job.id in apart for life in shape.line.values()))
            shape.fragmented.turn(now, on=refused and not free.lacks(shape))
        return min((shape.relaxes_in(now) for shape in self._shapes.values()), default=math.inf)


def _due(life: Life, now: float) -> bool:
    """Tell whether a life has waited for too long to be of its shape, but for what rounding does to the time."""
    return life.fragmented_until(now) >= life.shape.until_seconds - ROUNDING_SECONDS
