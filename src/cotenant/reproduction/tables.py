"""Functions shared by the papers' tables and cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from cotenant.reproduction.model import Case, Cell, Done, Table, Work

MEANS = "Means over the seeds."
Columns = Mapping[str, tuple[str, str]]  # by figure: the column's title, and its number format


class Named(Protocol):
    """A workload, or an arm."""

    @property
    def name(self) -> str:
        """Its name for users."""


Load = TypeVar("Load", bound=Named)
Way = TypeVar("Way", bound=Named)


def each(
    workloads: Sequence[Load], seeds: Sequence[int], arms: Sequence[Way], work: Callable[[Load, Way, int], Work]
) -> Iterator[Case]:
    """Yield each arm on each workload, seed by seed, so that arms stay comparable if the run is stopped."""
    for workload in workloads:
        for seed in seeds:
            for arm in arms:
                yield Case(workload.name, arm.name, seed, work(workload, arm, seed))


def means(done: Done, workload: str, arm: str, columns: Columns) -> tuple[float, ...]:
    """Return the means of an arm's figures on a workload."""
    return tuple(done.mean(workload, arm, figure) for figure in columns)


def by_arm(
    done: Done, workload: str, arms: Sequence[str], columns: Columns, *, title: str, name: str = "arms"
) -> Table:
    """Return a table of the figures of each arm on a workload."""
    titles, formats = zip(*columns.values(), strict=True)
    rows: tuple[tuple[Cell, ...], ...] = tuple((arm, *means(done, workload, arm, columns)) for arm in arms)
    return Table(f"{name}-{slug(workload)}", title, ("arm", *titles), ("", *formats), rows, MEANS)


def slug(name: str) -> str:
    """Return a name for a file.

    >>> slug("Philly 2869ce, 40 GPUs")
    'philly-2869ce-40-gpus'
    """
    return "-".join("".join(char if char.isalnum() else " " for char in name.lower()).split())
