"""Small worlds for property tests: clusters that are partly allocated, gangs that may or may not fit, and queues.

Each prints itself as what it was made of, so that the smallest world that breaks a law can be read and built again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cotenant.core.capacity.ledger import Holding, Ledger, Offer, Overcommitted
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import JobKind, JobSpec, Locality, Request, Role
from cotenant.core.model.job_table import Capacity, JobRow, JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.model.resources import NAMES
from cotenant.core.policy.protocols import EndedJob

NOW = 10_000.0  # of the queues
PRINTED = (
    *("arrival_seconds", "running", "running_since", "waiting_since", "attained_seconds", "remaining_seconds"),
    *("confidence", "deadline_seconds", "priority", "preemptible", "tenant", "tenant_weight"),
)
TYPES = ("", "NVIDIA A100", "Tesla T4")
WANTED_TYPES = ("", "", "", "", "", "a100", "T4", "t4 | A100")


class Printed:
    """An object that Hypothesis prints as Python does, and not by how it was drawn."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


class PrintedTable(Printed, JobTable):
    """A table of jobs that prints its rows, each with what differs from a waiting CPU job without any figures."""

    def __repr__(self) -> str:
        plain = JobTable()
        plain.add(JobRow("plain", arrival_seconds=math.nan, sequence=-1))
        usual = _printed(plain)[0]
        rows = [
            "".join(f", {name}={text}" for name, text in row if (name, text) not in usual) for row in _printed(self)
        ]
        jobs = "".join(f"\n    {job_id}{text}" for job_id, text in zip(self.ids, rows, strict=True))
        return f"JobTable(capacity={tuple(self.capacity)}, now={NOW:g}:{jobs or ' no jobs'})"


def _printed(table: JobTable) -> list[list[tuple[str, str]]]:
    """Return the columns of each row of a table, as text."""
    jobs = table.jobs(NOW)
    columns = {name: getattr(jobs, name).tolist() for name in PRINTED}
    columns |= {name: column.tolist() for name, column in zip(NAMES, jobs.needs, strict=True)}
    return [[(name, f"{values[row]}") for name, values in columns.items()] for row in range(len(jobs))]


def demands(*, shares: bool = True) -> st.SearchStrategy[Demand]:
    """Return demands of one replica; with `shares` also of a part of a GPU."""
    sizes = [0, 1000, 1000, 2000, 3000] + ([200, 500, 700] if shares else [])
    return st.builds(
        Demand,
        gpu_milli=st.sampled_from(sizes),
        cores=st.integers(0, 5),
        memory_bytes=st.sampled_from([0, 0, 0, 1, 7]),
        gpu_type=st.sampled_from(WANTED_TYPES),
    )


def shapes(*, shares: bool = True) -> st.SearchStrategy[NodeShape]:
    """Return shapes of nodes; with `shares` also of those whose GPUs may be shared."""
    return st.builds(
        NodeShape,
        gpus=st.sampled_from([4, 8, 2, 1, 0]),
        cores=st.sampled_from([24, 12, 6, 3, 0]),
        memory_bytes=st.sampled_from([40, 40, 10, 0]),
        gpu_type=st.sampled_from(TYPES),
        shareable=st.booleans() if shares else st.just(False),
    )


def parts(*, shares: bool = True) -> st.SearchStrategy[Part]:
    """Return parts of gangs."""
    return st.builds(Part, st.sampled_from(["worker", "ps"]), st.sampled_from([1, 2, 2, 3, 5]), demands(shares=shares))


LOCALITIES = st.sampled_from([None, None, None, Locality.SERVER, Locality.RACK, Locality.ANYWHERE])


@st.composite
def gangs(draw: st.DrawFn, *, shares: bool = True, roles_max: int = 3, job_id: str = "job") -> Gang:
    """Draw a gang of a few parts, with or without a locality."""
    return Gang(
        job_id,
        tuple(draw(st.lists(parts(shares=shares), min_size=1, max_size=roles_max))),
        draw(LOCALITIES),
    )


@dataclass
class World(Printed):
    """A cluster and its allocations, by attempt."""

    ledger: Ledger
    taken: list[tuple[Holding, ...]]

    def __repr__(self) -> str:
        shapes = "".join(
            f"\n    node {node}{f' in {rack}' if rack else ''}: {shape}{', shareable' * shape.shareable}"
            f"{'' if self.ledger.open[node] else ', closed'}"
            for node, (shape, rack) in enumerate(zip(self.ledger.shapes, self.ledger.racks, strict=True))
        )
        return f"World({shapes}\n    taken: {self.taken or 'nothing'})"


@st.composite
def worlds(
    draw: st.DrawFn, *, shares: bool = True, closed: bool = True, nodes_max: int = 5, racks_max: int = 1
) -> World:
    """Draw a cluster that is partly allocated; some of its nodes may be closed."""
    made_of = draw(st.lists(shapes(shares=shares), min_size=1, max_size=nodes_max))
    several = st.lists(st.sampled_from(["r0", "r1", "r2"][:racks_max]), min_size=len(made_of), max_size=len(made_of))
    ledger = Ledger(made_of, draw(several) if racks_max > 1 else (), [f"n{number}" for number in range(len(made_of))])
    taken: list[tuple[Holding, ...]] = []
    spots = st.lists(st.integers(0, nodes_max - 1), min_size=1, max_size=3)
    for demand, nodes in draw(st.lists(st.tuples(demands(shares=shares), spots))):
        held = [take_one(ledger, node % len(ledger), demand) for node in nodes]
        if kept := tuple(holding for holding in held if holding is not None):
            taken.append(kept)
    if closed:
        shut = draw(st.sets(st.integers(0, nodes_max - 1)) if draw(st.booleans()) else st.just(set[int]()))
        ledger.open[[node for node in shut if node < len(ledger)]] = False
    return World(ledger, taken)


def take_one(ledger: Ledger, node: int, demand: Demand) -> Holding | None:
    """Take one replica on a node; None if there is no room."""
    try:
        return ledger.take(node, demand)
    except Overcommitted:
        return None


Picture = tuple[list[int], list[int], list[int], list[tuple[int, ...]], list[bool]]


def picture(ledger: Ledger) -> Picture:
    """Return the whole state of a ledger, for comparison."""
    return (
        ledger.free_gpus.tolist(),
        ledger.free_cores.tolist(),
        ledger.free_memory.tolist(),
        [ledger.parts_of(node) for node in range(len(ledger))],
        ledger.open.tolist(),
    )


def emptied(ledger: Ledger) -> Ledger:
    """Return a ledger of the same nodes without allocations."""
    empty = Ledger(ledger.shapes, ledger.racks)
    empty.open[:] = ledger.open
    return empty


def replicas_of(offer: Offer, gang: Gang) -> list[int]:
    """Return the numbers of replicas in an offer, by part."""
    return [sum(share.replicas for share in offer if share.part == number) for number in range(len(gang.parts))]


def requests() -> st.SearchStrategy[Request]:
    """Return requests of one replica."""
    return st.builds(
        Request,
        gpu_milli=st.sampled_from([0, 200, 500, 1000, 2000, 4000]),
        cores=st.none() | st.integers(0, 6),
        memory_bytes=st.sampled_from([0, 0, 3, 11]),
        gpu_type=st.sampled_from(WANTED_TYPES),
    )


def specs(*, roles_max: int = 3) -> st.SearchStrategy[JobSpec]:
    """Return jobs of a few roles."""
    roles = st.builds(Role, st.sampled_from(["worker", "ps"]), st.integers(1, 4), requests())
    return st.builds(
        JobSpec,
        kind=st.sampled_from(JobKind),
        roles=st.lists(roles, min_size=1, max_size=roles_max).map(tuple),
        locality=LOCALITIES,
    )


@st.composite
def tables(draw: st.DrawFn, *, now: float = NOW, count_max: int = 12) -> JobTable:
    """Draw jobs submitted before `now`: some run, some have run, some wait."""
    table = PrintedTable()
    table.capacity = Capacity(*draw(st.sampled_from([(0, 0, 0), (16_000, 48, 8), (5000, 0, 0)])))
    for number in range(draw(st.integers(0, count_max))):
        job_id = f"job{number}"
        arrival = draw(st.sampled_from([0.0, 1.0, 50.5, now - 1]))
        table.add(
            JobRow(
                job_id,
                arrival,
                sequence=number,
                gpu_milli=draw(st.sampled_from([0, 500, 1000, 2000, 8000])),
                cores=draw(st.integers(0, 8)),
                memory_bytes=draw(st.integers(0, 4)),
                priority=draw(st.integers(-1, 1)),
                tenant=(tenant := draw(st.integers(0, 3))),
                tenant_weight=(1.0, 1.0, 2.0, 0.25)[tenant],
                deadline_seconds=draw(st.sampled_from([math.inf, math.inf, 0.0, now - 5, now, now + 50, now + 1e4])),
                preemptible=draw(st.booleans()),
            )
        )
        rest = draw(st.sampled_from([math.nan, math.inf, 0.0, 7.5, 50.0, 3600.0]))
        table.update(job_id, remaining_seconds=rest, confidence=float(math.isfinite(rest)))
        table.attain(job_id, draw(st.sampled_from([0.0, 0.0, 3.0, 3250.0, 5000.0, 1e6])))
        if draw(st.booleans()):
            table.start(job_id, draw(st.floats(arrival, now)))
        elif draw(st.booleans()):
            table.stop(job_id, draw(st.floats(arrival, now)))
    return table


ended_jobs = st.builds(
    lambda gpus, cores, seconds: EndedJob(1000 * gpus, cores, max(1, gpus), seconds, gpus * seconds),
    st.integers(0, 8),
    st.integers(0, 16),
    st.floats(0, 1e7),
)
histories = st.lists(ended_jobs, max_size=8) | st.lists(ended_jobs, min_size=1, max_size=4).map(lambda few: few * 100)


def rng(seed: int = 0) -> np.random.Generator:
    """Return a generator of chance."""
    return np.random.default_rng(seed)
