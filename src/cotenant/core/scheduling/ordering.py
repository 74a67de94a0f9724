"""Sorting jobs and counting which fit: done in every cycle for every active job, so it must be fast.

Rows come in the order of their arrival, which the table maintains, and most sort keys are small integers: one stable
sort by score, if scores are not sorted already, and one by those integers replace a sort by six keys. Filling walks the
order in strides: all rows that fit together are taken at once, up to the first that does not fit.
"""

from __future__ import annotations

from operator import le, lt, sub

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.job_table import Capacity, Flags, Floats, Ints, Jobs
from cotenant.core.policy.protocols import Order

STRIDE = 1024  # rows looked at together; a full cluster ends the walk long before the last row
ALL = slice(None)
SMALL_MAX = np.iinfo(np.int16).max  # up to here numpy sorts integers by radix, in linear time


def rank(jobs: Jobs, order: Order, *, running_first: bool, among: Flags | None = None) -> Ints:
    """Return rows sorted by priority, level, (running first,) score, arrival and sequence: the order in which jobs run.

    `among` leaves out rows for which it is False.
    """
    rows = jobs.by_arrival
    if rows is None:  # a few rows of a table: the sort by all keys takes fewer steps
        running = [~jobs.running] * running_first
        rows = np.lexsort((jobs.sequence, jobs.arrival_seconds, order.score, *running, order.level, -jobs.priority))
        return rows if among is None else rows[among[rows]]
    if among is not None:
        rows = rows[among[rows]]
    rows = _sorted_by(order.score, rows)
    coarse = _coarse(jobs, order, rows, running_first=running_first)
    return rows if coarse is None else rows[np.argsort(coarse, kind="stable")]


def _sorted_by(score: Floats, rows: Ints) -> Ints:
    """Return rows sorted by score, stably."""
    values = score[rows]
    if bool((values[1:] >= values[:-1]).all()):
        return rows
    quick = np.argsort(values)  # several times quicker than a stable sort, and the same where no two are equal
    ordered = values[quick]
    if bool((ordered[1:] == ordered[:-1]).any()):
        quick = np.argsort(values, kind="stable")
    return rows[quick]


def _coarse(jobs: Jobs, order: Order, rows: Ints, *, running_first: bool) -> NDArray[np.signedinteger] | None:
    """Return one small integer for priority, level and whether a job runs; None if it is the same for all."""
    if not len(rows):
        return None
    coarse = _from_zero(order.level[rows])
    if running_first:
        coarse = 2 * coarse + ~jobs.running[rows]
    priority = jobs.priority[rows]
    if bool((priority != priority[0]).any()):
        below = np.unique(-priority, return_inverse=True)[1]
        coarse = _from_zero(coarse) + below * (int(coarse.max()) - int(coarse.min()) + 1)
    most = int(coarse.max())
    if most == int(coarse.min()):
        return None
    return coarse.astype(np.int16) if most <= SMALL_MAX else coarse


def _from_zero(values: Ints) -> Ints:
    """Return values minus the smallest; if levels lie far apart, their ranks instead."""
    least, most = int(values.min()), int(values.max())
    return values - least if most - least <= SMALL_MAX // 2 else np.unique(values, return_inverse=True)[1]


def select(jobs: Jobs, ranked: Ints, taken: Flags, capacity: Capacity, *, strict: bool) -> Flags:
    """Return the rows that fit, in order, into what is left; `taken` rows hold their part beforehand.

    `strict` ends the walk at the first job that does not fit.
    """
    selected = taken.copy()
    needs = [
        (column, max(0, have - int(column[taken].sum())))
        for column, have in zip(jobs.needs, capacity, strict=True)
        if column.any()
    ]
    columns = [column for column, _ in needs]
    left = np.array([have for _, have in needs], dtype=np.int64)
    least = np.array([int(column.min()) for column in columns], dtype=np.int64)
    rows = ranked[~taken[ranked]]
    for begin in range(0, len(rows), STRIDE):
        stride = rows[begin : begin + STRIDE]
        fitting = _fitting(np.stack([column[stride] for column in columns]), left, strict=strict) if columns else ALL
        selected[stride[fitting]] = True
        if (strict and not selected[stride].all()) or (left < least).any():
            break
    return selected


def _fitting(needs: Ints, left: Ints, *, strict: bool) -> Ints | slice:
    """Return the columns of `needs` that fit one after the other; subtracts them from what is left."""
    sums = np.cumsum(needs, axis=1)
    fitting = (sums <= left[:, None]).all(axis=0)
    if bool(fitting.all()):
        left -= sums[:, -1]
        return ALL
    count = int(fitting.argmin())  # this many fit together
    if count:
        left -= sums[:, count - 1]
    first = np.arange(count)
    return first if strict else np.concatenate([first, count + 1 + _squeezed_in(needs[:, count + 1 :], left)])


def _squeezed_in(needs: Ints, left: Ints) -> Ints:
    """Return the columns that still fit, one by one: after a job did not fit, little is left, and few jobs fit."""
    able = np.flatnonzero((needs <= left[:, None]).all(axis=0))
    if not len(able):
        return able
    wanted = needs[:, able]
    least, room, taken = wanted.min(axis=1).tolist(), left.tolist(), []
    for number, amounts in zip(able.tolist(), wanted.T.tolist(), strict=True):
        if all(map(le, amounts, room)):
            taken.append(number)
            room = list(map(sub, room, amounts))
            if any(map(lt, room, least)):
                break
    left[:] = room
    return np.array(taken, dtype=np.int64)
