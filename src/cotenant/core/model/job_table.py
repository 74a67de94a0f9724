"""Active jobs in columns, kept up to date by their owner: the queue or the simulator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.model.resources import AMOUNTS, NAMES, NOTHING, Amounts, Resources, amounts_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


# What the jobs of a table share: free resources on nodes that take work, plus everything the jobs hold now. Resources
# about to be released count as free.
Capacity = Resources
NO_CODE = -1  # of a job without an equivalence class


@dataclass(frozen=True, slots=True)
class JobRow(Amounts):
    """A job as it enters the table, with nothing attained yet."""

    id: str
    arrival_seconds: float
    sequence: int  # breaks ties: earlier jobs have smaller ones
    gpu_milli: int = 0
    cores: int = 0
    replicas: int = 1
    priority: int = 0
    tenant: int = 0
    tenant_weight: float = 1.0
    deadline_seconds: float = np.inf
    preemptible: bool = True
    code: int = NO_CODE  # of its equivalence class


@dataclass(frozen=True, slots=True)
class Jobs:
    """All active jobs at one moment: one array per column, all of the same length, rows in no order.

    Times are in seconds. `attained_seconds` is the run time so far, `attained_gpu_seconds` that times the GPUs held,
    `waiting_since` when the job last began to wait, `running_since` when its present run began, `remaining_seconds` the
    predicted remaining time (NaN: unpredictable) with `confidence` from 0 to 1. `predicted_seconds` is the predicted
    total run time; unlike a remaining time of 0, it shows by how much a job has exceeded it. `gpu_worth` is what a GPU
    that a running job holds is worth to it, in GPUs of the average type; attained GPU time counts by it. `tenant`
    numbers tenants, `tenant_weight` is that tenant's weight. `borrows` marks jobs whose present or last run holds
    resources that placement lent to it. `needs` are the columns of all resources, in the order of `KINDS`. `capacity`
    is what all jobs share. `by_arrival` lists the rows by arrival and sequence, if that is known already. `past_use` is
    what tenants held on decayed average (`core.scheduling.decayed_usage`), with a row for each of `KINDS` and a column
    for each number of a tenant; None if past use does not count.
    """

    sequence: Ints
    arrival_seconds: Floats
    gpu_milli: Ints
    cores: Ints
    needs: tuple[Ints, ...]
    replicas: Ints
    priority: Ints
    tenant: Ints
    deadline_seconds: Floats
    preemptible: Flags
    running: Flags
    borrows: Flags
    attained_seconds: Floats
    attained_gpu_seconds: Floats
    waiting_since: Floats
    running_since: Floats
    remaining_seconds: Floats
    predicted_seconds: Floats
    confidence: Floats
    gpu_worth: Floats
    tenant_weight: Floats
    capacity: Capacity = NOTHING
    by_arrival: Ints | None = None
    past_use: Floats | None = None

    def __len__(self) -> int:
        return len(self.sequence)


_INTS = ("sequence", *NAMES, "replicas", "priority", "tenant", "code")
_FLAGS = ("preemptible", "running", "borrows")
_FLOATS = (
    "arrival_seconds",
    "deadline_seconds",
    "attained_seconds",
    "attained_gpu_seconds",
    "waiting_since",
    "running_since",
    "remaining_seconds",
    "predicted_seconds",
    "confidence",
    "gpu_worth",
    "tenant_weight",
)
_NAMES = (*_INTS, *_FLAGS, *_FLOATS)


class _Arrivals:
    """Rows in the order of their jobs' arrival, maintained because sorting them in each cycle costs more.

    A removed row leaves a gap, which is closed when the rows are read next: many may be removed before that.
    """

    def __init__(self, capacity: int) -> None:
        self._rows: Ints = np.zeros(capacity, dtype=np.int64)  # -1 in a gap
        self._places: Ints = np.zeros(capacity, dtype=np.int64)  # of each row in `_rows`
        self._count = self._gaps = 0

    def add(self, row: int, new: tuple[float, int], arrived: Callable[[int], tuple[float, int]]) -> None:
        """Insert a row after all rows that arrived no later."""
        if self._count == len(self._rows):
            self._close()
        if self._count == len(self._rows):
            self._rows, self._places = (np.concatenate([old, old]) for old in (self._rows, self._places))
        last = int(self._rows[self._count - 1]) if self._count else -1
        place = self._count
        if place and (last < 0 or arrived(last) > new):
            place = self._make_room(new, arrived)
        self._rows[place], self._places[row] = row, place
        self._count += 1

    def _make_room(self, new: tuple[float, int], arrived: Callable[[int], tuple[float, int]]) -> int:
        """Return the place of a row that is not last, after moving the rows behind it."""
        self._close()
        place = bisect_right(self._rows[: self._count], new, key=arrived)
        later = self._rows[place : self._count].copy()
        self._rows[place + 1 : self._count + 1] = later
        self._places[later] += 1
        return place

    def sort(self, arrival_seconds: Floats, sequence: Ints) -> None:
        """Take all rows, of which these are the columns."""
        self._count, self._gaps = len(sequence), 0
        size = max(len(self._rows), self._count)
        self._rows, self._places = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        self._rows[: self._count] = rows = np.lexsort((sequence, arrival_seconds))
        self._places[rows] = np.arange(self._count)

    def remove(self, row: int, last: int) -> None:
        """Drop a row; row `last` takes over its number."""
        self._rows[self._places[row]] = -1
        self._gaps += 1
        if row != last:
            place = self._places[last]
            self._rows[place], self._places[row] = row, place

    def rows(self) -> Ints:
        """Return all rows; valid until a row is added or removed."""
        self._close()
        return self._rows[: self._count]

    def _close(self) -> None:
        if self._gaps:
            kept = self._rows[: self._count]
            kept = kept[kept >= 0]
            self._count, self._gaps = len(kept), 0
            self._rows[: self._count] = kept
            self._places[kept] = np.arange(self._count)


class JobTable:
    """Active jobs, dense: removing a job moves the last row into its place.

    >>> table = JobTable()
    >>> table.add(JobRow("a", arrival_seconds=0, sequence=0, gpu_milli=2000))
    >>> table.start("a", now=10)
    >>> table.jobs(now=25).attained_gpu_seconds.tolist()
    [30.0]
    """

    def __init__(self, capacity: int = 64) -> None:
        self.ids: list[str] = []
        self.capacity = Capacity()
        self.past_use: Floats | None = None
        self._row: dict[str, int] = {}
        capacity = max(1, capacity)  # it grows by doubling
        self._arrivals = _Arrivals(capacity)
        self._keep(
            np.zeros((len(_INTS), capacity), dtype=np.int64),
            np.zeros((len(_FLAGS), capacity), dtype=np.bool_),
            np.zeros((len(_FLOATS), capacity), dtype=np.float64),
        )

    def _keep(self, *blocks: NDArray[Any]) -> None:
        """Keep the columns in these blocks, one for each type: a row is copied at once for all columns of a type."""
        self._blocks = blocks
        self._columns: dict[str, NDArray[Any]] = dict(zip(_NAMES, chain(*blocks), strict=True))

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._row

    def row(self, job_id: str) -> int:
        """Return the present row of a job; removing another job may change it."""
        return self._row[job_id]

    def running(self, job_id: str) -> bool:
        """Return whether a job is running."""
        return bool(self._columns["running"][self._row[job_id]])

    def add(self, job: JobRow) -> None:
        """Add a waiting job."""
        if job.id in self._row:
            raise ValueError(f"job {job.id} is in the table already")
        row = len(self.ids)
        self._enlist(row, job)
        if row == len(self._columns["sequence"]):
            self._keep(*(np.concatenate([block, block], axis=1) for block in self._blocks))
        self.ids.append(job.id)
        self._row[job.id] = row
        self._set(
            row,
            sequence=job.sequence,
            arrival_seconds=job.arrival_seconds,
            gpu_milli=job.gpu_milli,
            cores=job.cores,
            **amounts_of(job),
            replicas=job.replicas,
            priority=job.priority,
            tenant=job.tenant,
            deadline_seconds=job.deadline_seconds,
            preemptible=job.preemptible,
            running=False,
            borrows=False,
            attained_seconds=0.0,
            attained_gpu_seconds=0.0,
            waiting_since=job.arrival_seconds,
            running_since=np.nan,
            remaining_seconds=np.nan,
            predicted_seconds=np.nan,
            confidence=0.0,
            gpu_worth=1.0,
            tenant_weight=job.tenant_weight,
            code=job.code,
        )

    def add_all(
        self,
        ids: Sequence[str],
        arrival_seconds: Sequence[float],
        sequence: Sequence[int],
        like: Sequence[JobRow],
        kinds: Sequence[int],
    ) -> None:
        """Add many waiting jobs; `kinds` has for each the index of the row in `like` that it otherwise equals.

        >>> table, pair = JobTable(), JobRow("", 0.0, 0, gpu_milli=2000)
        >>> table.add_all(["b", "a"], [7.0, 3.0], [0, 1], [pair], [0, 0])
        >>> jobs = table.jobs(now=9.0)
        >>> jobs.gpu_milli.tolist(), jobs.by_arrival.tolist()
        ([2000, 2000], [1, 0])
        """
        if not self._row.keys().isdisjoint(ids) or len(set(ids)) != len(ids):
            raise ValueError("a job is in the table already")
        samples = JobTable(len(like))
        for number, row in enumerate(like):
            samples.add(replace(row, id=str(number)))
        first, last = len(self.ids), len(self.ids) + len(ids)
        while last > len(self._columns["sequence"]):
            self._keep(*(np.concatenate([block, block], axis=1) for block in self._blocks))
        for block, sample in zip(self._blocks, samples._blocks, strict=True):
            block[:, first:last] = sample[:, np.asarray(kinds, dtype=np.int64)]
        for name, values in (
            ("sequence", sequence),
            ("arrival_seconds", arrival_seconds),
            ("waiting_since", arrival_seconds),
        ):
            self._columns[name][first:last] = values
        self._row.update(zip(ids, range(first, last), strict=True))
        self.ids += ids
        self._arrivals.sort(self._columns["arrival_seconds"][:last], self._columns["sequence"][:last])

    def _enlist(self, row: int, job: JobRow) -> None:
        """Insert a new row by its arrival; it comes last unless an earlier job is back."""
        arrivals, sequences = self._columns["arrival_seconds"], self._columns["sequence"]

        def arrived(other: int) -> tuple[float, int]:
            return float(arrivals[other]), int(sequences[other])

        self._arrivals.add(row, (job.arrival_seconds, job.sequence), arrived)

    def remove(self, job_id: str) -> None:
        """Remove a job."""
        row, last = self._row.pop(job_id), len(self.ids) - 1
        self._arrivals.remove(row, last)
        if row != last:
            for block in self._blocks:
                block[:, row] = block[:, last]
            moved = self.ids[last]
            self.ids[row], self._row[moved] = moved, row
        self.ids.pop()

    def start(self, job_id: str, now: float, *, borrows: bool = False) -> None:
        """Record that a job has started, and whether it borrows what it holds."""
        self._set(self._row[job_id], running=True, running_since=now, borrows=borrows)

    def stop(self, job_id: str, now: float) -> None:
        """Record that a job waits again; it keeps what it attained."""
        row = self._row[job_id]
        if self._columns["running"][row]:
            ran = max(0.0, now - float(self._columns["running_since"][row]))
            self._add_service(row, ran)
        self._set(row, running=False, running_since=np.nan, waiting_since=now, gpu_worth=1.0)

    def attain(self, job_id: str, run_seconds: float, gpu_worth: float = 1.0) -> None:
        """Credit run time from before the table knew the job, on GPUs of this worth."""
        if run_seconds:
            row = self._row[job_id]
            worth, self._columns["gpu_worth"][row] = self._columns["gpu_worth"][row], gpu_worth
            self._add_service(row, run_seconds)
            self._columns["gpu_worth"][row] = worth

    def update(self, job_id: str, **values: float) -> None:
        """Set columns of one job: priority, deadline_seconds, remaining_seconds, confidence, cores…

        Once `predicted_seconds` is set, the remaining time follows from it at every moment.
        """
        self._set(self._row[job_id], **values)

    def _add_service(self, row: int, run_seconds: float) -> None:
        columns = self._columns
        columns["attained_seconds"][row] += run_seconds
        gpus = columns["gpu_milli"][row] / 1000 * columns["gpu_worth"][row]
        columns["attained_gpu_seconds"][row] += run_seconds * gpus

    def _set(self, row: int, **values: float) -> None:
        for name, value in values.items():
            self._columns[name][row] = value

    def waits(self) -> bool:
        """Return whether any job is waiting."""
        return not bool(self._columns["running"][: len(self.ids)].all())

    def running_rows(self) -> Ints:
        """Return the rows of the running jobs."""
        return np.flatnonzero(self._columns["running"][: len(self.ids)])

    def codes(self) -> Ints:
        """Return by row the code of its job's equivalence class, as its owner set it with `update`."""
        codes: Ints = self._columns["code"][: len(self.ids)]
        return codes

    def rows_of(self, codes: Iterable[int]) -> list[int]:
        """Return the rows of the waiting jobs of some equivalence classes."""
        waiting = ~self._columns["running"][: len(self.ids)]
        rows: list[int] = np.flatnonzero(waiting & np.isin(self.codes(), list(codes))).tolist()
        return rows

    def held(self) -> Resources:
        """Return what the running jobs hold."""
        running = self._columns["running"][: len(self.ids)]
        return Resources(*(int(self._columns[name][: len(self.ids)][running].sum()) for name in NAMES))

    def jobs(self, now: float, rows: Ints | None = None) -> Jobs:
        """Return all active jobs at a moment, or those in some rows, in that order.

        The arrays are views, valid until the table changes.
        """
        taken = slice(len(self.ids)) if rows is None else rows
        columns: dict[str, NDArray[Any]] = dict(
            zip(_NAMES, chain(*(block[:, taken] for block in self._blocks)), strict=True)
        )
        running = columns["running"]
        ran = np.where(running, np.maximum(0.0, now - columns["running_since"]), 0.0)
        columns["attained_seconds"] = columns["attained_seconds"] + ran
        columns["attained_gpu_seconds"] = (
            columns["attained_gpu_seconds"] + ran * columns["gpu_milli"] / 1000 * columns["gpu_worth"]
        )
        rest = np.maximum(0.0, columns["predicted_seconds"] - columns["attained_seconds"])
        columns["remaining_seconds"] = np.where(np.isnan(rest), columns["remaining_seconds"], rest)
        needs = tuple([columns[name] for name in NAMES])
        for name in (*AMOUNTS, "code"):
            del columns[name]
        by_arrival = self._arrivals.rows() if rows is None else None
        return Jobs(**columns, needs=needs, capacity=self.capacity, by_arrival=by_arrival, past_use=self.past_use)
