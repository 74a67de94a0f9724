"""What a job told of its loss, in bounded memory: cells of neighbouring points, the same whatever the machine.

A job may tell millions of losses. We keep at most `CELLS_MAX` cells, each the mean of some neighbouring points: narrow
where the curve bends, at the beginning, and wide later (their width grows with step + a tenth of the way so far), so
that both ends of the curve are seen and the noise is averaged out. A spike is left out of the mean that it would spoil.
Our own construction [R], in the place of a random reservoir: it needs no chance and weighs early steps more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

CELLS_MAX = 96
CELLS_KEPT = 64  # after making room
WIDTH_FIRST = 0.004  # of (step + a tenth of the way), the narrowest a merged cell is made
WIDTH_GROWTH = 1.25
LATE_SHARE = 0.1
SPIKE_MADS = 6.0
NEIGHBOURS = 3  # on either side, by which a spike is known
LOSS_MAX = 1e100  # beyond it, squares would be no numbers
WILD_FADES = 0.9  # per point: what is left of the memory of losses that were no numbers
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
        """Take in a loss. A step that was told before is passed over; one further back begins again from there.

        A job that resumes from a checkpoint goes back: what it told after the checkpoint belongs to a run that is no
        more. A loss that is no number, or beyond all reason, is no point of the curve, but is remembered for a while.
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
        """Whether the loss was no finite number lately."""
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
    """Merge neighbours, two at a time, that are closer than a share of where they stand."""
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
    """Make one cell of two. Of one that stands far out among its neighbours only the other's loss is taken."""
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
