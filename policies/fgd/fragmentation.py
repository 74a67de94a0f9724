"""The share of the free GPUs that a workload could not use: the fragmentation measure of Weng et al. (ATC 2023 [P]).

Theory of operation. A node n is measured against a task m (section 3.2 [P]). If the task could not run there, for lack
of GPUs or cores, or because the GPUs are of another type, all free GPU capacity of the node is lost to it; if it could,
those GPUs are lost of which too small a part is free for it. F_n(M) is the expectation over the tasks M that are likely
to come, by their popularity; the sum over all nodes is the fragmentation of the cluster. Memory is treated like cores
[R]. Tasks without GPUs would count everything free as lost, on every node alike [P]; that does not depend on any
decision, so they are left out here.

Weights are integers and so are all sums: equal nodes measure equal, to the last bit, whichever nodes are measured with
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.ledger import Counts, Ledger
from cotenant.core.model.gang import Demand
from cotenant.core.model.resources import WHOLE_GPU_MILLI, numbers_of

NO_GPU = -1  # no particular GPU
IMPOSSIBLE = np.int64(2**62)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Some nodes, a row each, with what would be free."""

    numbers: Counts
    total_milli: Counts
    whole: Counts
    counted: Counts  # a row for each other resource: cores and amounts
    lost: Counts  # of GPUs with less than each threshold free: a column per threshold


@dataclass(frozen=True, slots=True)
class Increases:
    """How much a replica on each node would add to F_n(M), times the sum of weights, and on which GPU.

    `IMPOSSIBLE` where it would not fit; a GPU is given if the replica takes a share.
    """

    increase: Counts
    gpu: Counts


@dataclass(frozen=True, slots=True)
class Measure:
    """Fragmentation of the nodes of one ledger by one workload: tasks with GPUs, and how often each occurs."""

    ledger: Ledger
    weights: Counts
    gpu_milli: Counts
    needed: tuple[tuple[int, Counts], ...]  # the other resources that any task needs: which, and how much each needs
    allowed: NDArray[np.bool_]  # a row per node, a column per task: the GPUs are of the type, and shareable if needed
    thresholds: Counts
    threshold_of: Counts

    @classmethod
    def of(cls, ledger: Ledger, workload: Mapping[Demand, int]) -> Measure:
        """Return the measure for these tasks; tasks without GPUs are left out."""
        tasks = [demand for demand in workload if demand.gpu_milli]
        milli = np.array([task.gpu_milli for task in tasks], dtype=np.int64)
        thresholds, threshold_of = np.unique(np.minimum(milli, WHOLE_GPU_MILLI), return_inverse=True)
        allowed = np.ones((len(ledger), len(tasks)), dtype=np.bool_)
        for column, task in enumerate(tasks):
            allowed[:, column] = ledger.of_type(task.gpu_type)
            if task.gpu_milli < WHOLE_GPU_MILLI:
                allowed[:, column] &= ledger.sharing
        return cls(
            ledger,
            np.array([workload[task] for task in tasks], dtype=np.int64),
            milli,
            tuple(
                (row, np.array(needs))
                for row, needs in enumerate(zip(*map(_counted, tasks), strict=True))
                if any(needs)
            ),
            allowed,
            thresholds,
            threshold_of.astype(np.int64),
        )

    def fragmentation(self, nodes: Counts) -> Counts:
        """Return F_n(M) of some nodes as they are, in thousandths of GPUs times the sum of weights."""
        parts = self.ledger.parts_on(nodes)
        return self._expected(self._standing(nodes, parts))

    def increases(self, demand: Demand, nodes: Counts) -> Increases:
        """Return how much F_n(M) of some nodes would grow with one more replica, on the GPU where it grows least."""
        parts = self.ledger.parts_on(nodes)
        standing = self._standing(nodes, parts)
        before = self._expected(standing)
        needs = np.array(_counted(demand), dtype=np.int64)[:, None]
        fits = np.logical_and.reduce(standing.counted >= needs)
        if demand.gpu_milli % WHOLE_GPU_MILLI:
            return self._of_share(demand, standing, parts, before, fits)
        gpus = demand.gpu_milli // WHOLE_GPU_MILLI
        fits &= standing.whole >= gpus
        after = _Nodes(
            nodes,
            standing.total_milli - demand.gpu_milli,
            standing.whole - gpus,
            standing.counted - needs,
            standing.lost,
        )
        increase = np.where(fits, self._expected(after) - before, IMPOSSIBLE)
        return Increases(increase, np.full(len(nodes), NO_GPU))

    def _of_share(
        self, demand: Demand, standing: _Nodes, parts: Counts, before: Counts, fits: NDArray[np.bool_]
    ) -> Increases:
        """Try each GPU with room; of GPUs with equal free parts only the first, since they are equivalent."""
        count = len(standing.numbers)
        rows, gpus = np.nonzero((parts >= demand.gpu_milli) & fits[:, None] & _first_of_equals(parts))
        here = parts[rows, gpus]
        left = here - demand.gpu_milli
        lost = standing.lost[rows] + _below(left, self.thresholds) - _below(here, self.thresholds)
        after = _Nodes(
            standing.numbers[rows],
            standing.total_milli[rows] - demand.gpu_milli,
            standing.whole[rows] - (here == WHOLE_GPU_MILLI),
            standing.counted.take(rows, axis=1) - np.array(_counted(demand), dtype=np.int64)[:, None],
            lost,
        )
        increase = self._expected(after) - before[rows]
        best = np.lexsort((gpus, here, increase, rows))
        rows, at = np.unique(rows[best], return_index=True)
        least, chosen = np.full(count, IMPOSSIBLE), np.full(count, NO_GPU)
        least[rows], chosen[rows] = increase[best][at], gpus[best][at]
        return Increases(least, chosen)

    def _standing(self, nodes: Counts, parts: Counts) -> _Nodes:
        ledger, whole = self.ledger, self.ledger.free_gpus[nodes]
        broken = np.where(parts < WHOLE_GPU_MILLI, parts, 0)
        lost = np.zeros((len(nodes), len(self.thresholds)), dtype=np.int64)
        for column, limit in enumerate(self.thresholds.tolist()):
            lost[:, column] = np.where(broken < limit, broken, 0).sum(axis=1)
        return _Nodes(
            nodes,
            whole * WHOLE_GPU_MILLI + broken.sum(axis=1),
            whole,
            ledger.free[1:].take(nodes, axis=1),  # far quicker than `free[1:, nodes]`
            lost,
        )

    def _expected(self, nodes: _Nodes) -> Counts:
        """Return the sum over the tasks of what is lost to each, by its weight.

        A share that fits on no GPU needs no check: all parts are smaller then, and lost either way.
        """
        runs = self.allowed[nodes.numbers]
        runs &= nodes.whole[:, None] * WHOLE_GPU_MILLI >= np.where(self.gpu_milli < WHOLE_GPU_MILLI, 0, self.gpu_milli)
        for row, need in self.needed:
            runs &= nodes.counted[row][:, None] >= need
        lost: Counts = np.where(runs, nodes.lost[:, self.threshold_of], nodes.total_milli[:, None])
        sums: Counts = (lost * self.weights).sum(axis=1)
        return sums


def _counted(demand: Demand) -> tuple[int, ...]:
    """Return what a replica needs beside GPUs."""
    return numbers_of(demand)[1:]


def _first_of_equals(parts: Counts) -> NDArray[np.bool_]:
    """Mark the first of equal values in each row."""
    order = np.argsort(parts, axis=1, kind="stable")
    values = np.take_along_axis(parts, order, axis=1)
    first = np.ones_like(parts, dtype=np.bool_)
    first[:, 1:] = values[:, 1:] != values[:, :-1]
    marks = np.empty_like(first)
    np.put_along_axis(marks, order, first, axis=1)
    return marks


def _below(parts: Counts, thresholds: Counts) -> Counts:
    return np.where(parts[:, None] < thresholds, parts[:, None], 0)
