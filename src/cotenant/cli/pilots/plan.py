"""How many pilots the waiting jobs ask for, and what to do about it. Pure.

A job's replicas are packed into pilots of one shape, the largest first, each into the first pilot with room. Pilots
whose agents are not there yet count as room for them; the others are full, or the jobs would not wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MORE_NODES_MAY_HELP = frozenset(  # codes of refusals
    ("CAPACITY", "FRAGMENTED", "NEVER_FITS", "BEHIND", "OUTRANKED", "NO_NODES", "RESERVED", "QOS", "NODES_HELD")
)


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """GPUs in thousandths, cores, and memory in bytes."""

    gpu_milli: int = 0
    cores: int = 0
    memory_bytes: int = 0

    def fits(self, room: Size) -> bool:
        """Return whether it fits into some room."""
        less = self.gpu_milli <= room.gpu_milli and self.cores <= room.cores
        return less and self.memory_bytes <= room.memory_bytes

    def left_in(self, room: Size) -> Size:
        """Return what it leaves of some room."""
        return Size(room.gpu_milli - self.gpu_milli, room.cores - self.cores, room.memory_bytes - self.memory_bytes)


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that waits, with the size of each of its replicas."""

    id: str
    replicas: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Pilot:
    """A pilot: whether it is pending in Slurm, and whether its agent is connected."""

    id: str
    pending: bool
    serving: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The fewest and the most pilots."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How many pilots to submit, and the pending ones to cancel."""

    submit: int = 0
    cancel: tuple[str, ...] = ()


def pilots_needed(waiting: Iterable[WaitingJob], shape: Size, most: int) -> tuple[int, list[str]]:
    """Return how many pilots hold the jobs' replicas, `most` at the most, and the jobs that do not fit into a pilot.

    >>> two, four = Size(2000, 1), Size(4000, 1)
    >>> pilots_needed([WaitingJob("a", (two,) * 3), WaitingJob("b", (four,))], Size(4000, 8), 10)
    (3, [])
    >>> pilots_needed([WaitingJob("a", (Size(8000),))], Size(4000, 8), 10)
    (0, ['a'])
    """
    fitting: list[Size] = []
    too_large: list[str] = []
    for job in waiting:
        if all(replica.fits(shape) for replica in job.replicas):
            fitting += job.replicas
        else:
            too_large.append(job.id)
    rooms: list[Size] = []
    for replica in sorted(fitting, reverse=True):
        place = next((index for index, room in enumerate(rooms) if replica.fits(room)), len(rooms))
        if place < len(rooms):
            rooms[place] = replica.left_in(rooms[place])
        elif len(rooms) < most:
            rooms.append(replica.left_in(shape))
    return len(rooms), too_large


def make_plan(pilots: Sequence[Pilot], needed: int, limits: Limits) -> Plan:
    """Return what to do if the waiting jobs need some pilots beyond those that serve; the newest are cancelled.

    >>> one, two = Pilot("1", pending=False, serving=True), Pilot("2", pending=True)
    >>> make_plan([one, two], 3, Limits(0, 3)), make_plan([one, two], 0, Limits(0, 3))
    (Plan(submit=1, cancel=()), Plan(submit=0, cancel=('2',)))
    """
    serving = sum(pilot.serving for pilot in pilots)
    wanted = min(limits.most, max(limits.least, serving + needed))
    if wanted >= len(pilots):
        return Plan(submit=wanted - len(pilots))
    pending = [pilot.id for pilot in pilots if pilot.pending]
    return Plan(cancel=tuple(pending[max(0, len(pending) - (len(pilots) - wanted)) :]))
