"""A job's reported losses in bounded memory: cells of neighboring points, the same on every machine.

A job may report millions of losses. We keep at most `CELLS_MAX` cells, each the mean of some neighboring points: narrow
where the curve bends, at the beginning, and wider later (their width grows with step + a tenth of the way so far), so
that both ends of the curve are visible and noise is averaged out. A spike is left out of the mean that it would spoil.
Our own construction [R], instead of a random reservoir: it needs no randomness and weights early steps more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from cotenant.core.prediction.record_validation import LOSS_MAX as LOSS_RECORDED_MAX

CELLS_MAX = 96
CELLS_KEPT = 64  # after making room
WIDTH_FIRST = 0.004  # of (step + a tenth of the way): the width of the narrowest merged cell
WIDTH_GROWTH = 1.25
LATE_SHARE = 0.1
SPIKE_MADS = 6.0
NEIGHBOURS = 3  # on either side, by which a spike is detected
LOSS_MAX = LOSS_RECORDED_MAX / 2  # means of several may round up
WILD_FADES = 0.9  # per point: decay of the memory of losses that were not finite
WILD_MAX = 0.5
SIGNIFICANT = 9

Cell = tuple[float, float, int]  # mean step, mean loss, points


@dataclass(slots=True)
class LossPoints:
    """One job's losses by step.

    >>> points = LossPoints()
    >>> for step in range(1, 1001):
    ...     points.add(step, 1 / step)
    >>> len(points.cells) <= CELLS_MAX, points.step, sum(count for _, _, count in points.cells)
    (True, 1000.0, 1000)
    """

    cells: list[Cell] = field(default_factory=list)
    wildness: float = 0.0

    def add(self, step: int, loss: float) -> None:
        """Add a loss. A step reported before is ignored; a step further back restarts from there.

        A job that resumes from a checkpoint goes back: what it reported after the checkpoint belongs to a run that no
        longer exists. A loss that is not a finite number, or absurdly large, is not a point of the curve, but is
        remembered for a while.
        """
        sane = abs(loss) <= LOSS_MAX
        self.wildness = round(self.wildness * WILD_FADES + (not sane), 6)
        if not sane:
            return
        if self.cells and step == self.cells[-1][0]:
            return
        while self.cells and self.cells[-1][0] >= step:
            self.cells.pop()
        self.cells.append((float(step), loss, 1))
        if len(self.cells) > CELLS_MAX:
            self._make_room()

    @property
    def wild(self) -> bool:
        """Whether the loss was recently not finite."""
        return self.wildness > WILD_MAX

    @property
    def step(self) -> float:
        """The last step that has a loss; 0 before the first."""
        return self.cells[-1][0] if self.cells else 0.0

    def _make_room(self) -> None:
        width = WIDTH_FIRST
        while len(self.cells) > CELLS_KEPT:
            self.cells = [*_merged(self.cells[:-1], width), self.cells[-1]]  # the last stays where it is
            width *= WIDTH_GROWTH


def _merged(cells: Sequence[Cell], width: float) -> list[Cell]:
    """Return cells with neighbors merged, two at a time, that are closer than a share of their position."""
    way = cells[-1][0] - cells[0][0]
    merged: list[Cell] = []
    index = 0
    while index < len(cells):
        here = cells[index]
        if index + 1 < len(cells):
            after = cells[index + 1]
            if after[0] - here[0] <= width * (here[0] - cells[0][0] + LATE_SHARE * way):
                merged.append(_mean(cells, index))
                index += 2
                continue
        merged.append(here)
        index += 1
    return merged


def _mean(cells: Sequence[Cell], index: int) -> Cell:
    """Return one cell for two. If one lies far from its neighbors, only the other's loss is used."""
    (step, loss, count), (step_after, loss_after, count_after) = cells[index], cells[index + 1]
    total = count + count_after
    near = [cell[1] for cell in cells[max(0, index - NEIGHBOURS) : index + 2 + NEIGHBOURS]]
    middle = median(near)
    far = SPIKE_MADS * median([abs(one - middle) for one in near])
    where = (step * count + step_after * count_after) / total
    spiked, spiked_after = abs(loss - middle) > far, abs(loss_after - middle) > far
    if spiked == spiked_after:
        mean = (loss * count + loss_after * count_after) / total
    else:
        where, mean = (step_after, loss_after) if spiked else (step, loss)
    return _rounded(where), _rounded(mean), total


def _rounded(figure: float) -> float:
    return float(f"{figure:.{SIGNIFICANT}g}")
