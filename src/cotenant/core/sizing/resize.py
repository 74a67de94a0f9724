"""Changing the cores of running jobs: what an allocator sees of one, and what it may answer.

The live mesh and the simulator ask alike: at most every `interval_seconds`, when a window was measured after a change,
and when neighbours came or went. Cores change in lock-step on all nodes of a gang, and only those of its leading role:
the first with GPUs, else the first. An answer is a wish. Up to its GPUs' share of the node a job holds what it wishes
for good; beyond that the cores are lent: they are handed out by marginal gain (see `dealing`), and whoever starts takes
them back at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

from cotenant.core.capacity.ledger import Holding, Share
from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, JobSpec
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.protocols import Sizing
from cotenant.core.prediction.core_curve import Point, merged

PATIENCE_SECONDS = 1800.0  # while nothing changes jobs are looked at ever less often, but at least that often
DRIFT = 0.1  # rates that far from what was measured before are those of another phase, or of another job (CODA [R])


@dataclass(frozen=True, slots=True)
class Running:
    """A running job whose cores may change.

    `cores` are held per replica by role, in the roles' order; `spare` could be given to each replica of each role
    beside them, for nobody holds them for good on the nodes that it runs on. `points` are rates measured at core counts
    per replica of the leading role in the present attempt, `known` those of jobs of its kind before it; `rate` is that
    of the last window and `settled_seconds` the time since its cores or its neighbours last changed.
    """

    job_id: str
    spec: JobSpec
    estimate: Estimate
    cores: tuple[int, ...]
    spare: tuple[int, ...]
    points: tuple[Point, ...] = ()
    rate_per_second: float | None = None
    settled_seconds: float = 0.0
    node_share: tuple[int, ...] = ()  # by role: a replica's GPUs' share of its node's cores
    lent: tuple[int, ...] = ()  # by role: of `cores`, those that were spare and can be asked back at once
    known: tuple[Point, ...] = ()
    lead: int = field(init=False, compare=False)  # the number of the role whose cores change

    def __post_init__(self) -> None:
        object.__setattr__(self, "lead", leading_role(self.spec))

    @property
    def gpus(self) -> int:
        """GPUs of each replica of the leading role, rounded up; 1 at least."""
        return max(1, -(-self.spec.roles[self.lead].request.gpu_milli // 1000))

    @property
    def share(self) -> int:
        """Cores of its GPUs' share, for each replica of the leading role; 1 at least."""
        return max(1, self.node_share[self.lead]) if self.node_share else self.cores[self.lead]

    @property
    def own(self) -> int:
        """Cores that each replica of the leading role has for good."""
        return self.cores[self.lead] - (self.lent[self.lead] if self.lent else 0)

    @property
    def most(self) -> int:
        """Cores that each replica of the leading role could have."""
        return self.cores[self.lead] + self.spare[self.lead]

    @property
    def measured(self) -> tuple[Point, ...]:
        """All that was measured of it and of its kind, one point for each core count."""
        return together(self.points, self.known)

    def wish(self, cores: int, reason: str) -> Sizing:
        """Wish for cores for each replica of the leading role, within what there could be; the others keep theirs."""
        within = max(1, min(cores, self.most))
        return Sizing((*self.cores[: self.lead], within, *self.cores[self.lead + 1 :]), reason)


@runtime_checkable
class Resizes(Protocol):
    """A CPU allocator that changes its mind while a job runs.

    Rates are measured `measure_seconds` long, once `warm_up_seconds` have passed since a change.
    """

    interval_seconds: float
    warm_up_seconds: float
    measure_seconds: float

    def resize(self, running: Running, now: float) -> Sizing | None:
        """Say what a running job should hold; None: what it wished for last, or holds.

        Never more than `cores` + `spare`.
        """

    def weight(self, running: Running) -> float:
        """Say how much a gain of this job counts beside equal gains of others where spare cores are handed out."""


def leading_role(spec: JobSpec) -> int:
    """Find the role whose cores change: the first with GPUs, else the first."""
    for number, role in enumerate(spec.roles):
        if role.request.gpu_milli:
            return number
    return 0


def resizable(spec: JobSpec) -> bool:
    """Tell whether a job's cores may change: its user left them open, and it has GPUs to be kept busy."""
    if not spec.roles or spec.kind is JobKind.CPU:
        return False
    request = spec.roles[leading_role(spec)].request
    return request.cores is None and request.gpu_milli > 0


def together(points: Sequence[Point], known: Sequence[Point]) -> tuple[Point, ...]:
    """Put what is known of a job's kind beside what was measured of itself.

    Where the job goes at another pace than its kind did on the same cores, the kind's rates are scaled to its own.

    >>> together([Point(3, 20.0)], [Point(3, 10.0), Point(4, 12.0)])
    (Point(cores=3, rate=20.0, windows=1, spread=0.0), Point(cores=4, rate=24.0, windows=1, spread=0.0))
    """
    return _together(tuple(points), tuple(known))


@lru_cache(maxsize=1024)
def _together(points: tuple[Point, ...], known: tuple[Point, ...]) -> tuple[Point, ...]:
    if not (points and known):
        return merged(points or known) if points or known else ()
    own, kind = merged(points), {point.cores: point for point in merged(known)}
    pace = next((point.rate / kind[point.cores].rate for point in own if point.cores in kind), 1.0)
    if abs(pace - 1) <= DRIFT:
        return merged([*own, *kind.values()])
    seen = {point.cores for point in own}
    scaled = [Point(one.cores, one.rate * pace, one.windows, one.spread) for one in kind.values()]
    return merged([*own, *(one for one in scaled if one.cores not in seen)])


def later_seconds(gap_seconds: float, interval_seconds: float) -> float:
    """Say how long to wait for the next look at a job that was not changed by one that was so long after the last.

    >>> later_seconds(90.0, 90.0), later_seconds(90.0, 1200.0), later_seconds(1200.0, 90.0)
    (180.0, 1200.0, 1800.0)
    """
    return max(interval_seconds, min(2 * gap_seconds, PATIENCE_SECONDS))


class BadSizing(Exception):
    """An allocator wants what it may not: a bug in the allocator. The job keeps what it holds."""


def changeable(spec: JobSpec) -> tuple[bool, ...]:
    """Tell by role whether its cores may change: where the user left them to the allocator (`auto`)."""
    return tuple(role.request.cores is None for role in spec.roles)


def node_share_of(spec: JobSpec, places: Sequence[Share], shapes: Mapping[int, NodeShape]) -> tuple[int, ...]:
    """Count by role a replica's GPUs' share of its node's cores, the least over its nodes; 0 for roles without GPUs.

    >>> from cotenant.core.model.job import Request, Role
    >>> spec = JobSpec(roles=(Role("worker", request=Request(gpu_milli=2000)),))
    >>> node_share_of(spec, [Share(0, 0, 1)], {0: NodeShape(gpus=8, cores=24)})
    (6,)
    """
    shares: list[int] = []
    for number, role in enumerate(spec.roles):
        on = [shapes[share.node] for share in places if share.part == number]
        each = [shape.cores * role.request.gpu_milli // (shape.gpus * WHOLE_GPU_MILLI) for shape in on if shape.gpus]
        shares.append(min(each, default=0))
    return tuple(shares)


def agreed(running: Running, sizing: Sizing | None) -> tuple[int, ...] | None:
    """Give the cores per replica by role that a job is to hold from now on; None where nothing changes.

    Raises:
        BadSizing: the allocator wants more than is spare, fewer than 1 core, or changes what the user asked for.
    """
    if sizing is None or sizing.cores == running.cores:
        return None
    said = f"{running.job_id} holds {running.cores} cores per replica and was to hold {sizing.cores}"
    if len(sizing.cores) != len(running.cores):
        raise BadSizing(f"{said}, which are not its roles")
    for wanted, cores, spare, may in zip(
        sizing.cores, running.cores, running.spare, changeable(running.spec), strict=True
    ):
        if wanted != cores and not may:
            raise BadSizing(f"{said}, but its user asked for a number of cores")
        if wanted > cores + spare:
            raise BadSizing(f"{said}, but no more than {running.spare} are spare")
        if wanted < min(1, cores):
            raise BadSizing(f"{said}, and a process needs a core")
    return tuple(sizing.cores)


def resized(places: Sequence[Share], holdings: Sequence[Holding], cores: Sequence[int]) -> tuple[Holding, ...]:
    """Count what a gang holds once its replicas have other cores; `holdings` are those of `places`, one for one."""
    return tuple(
        replace(holding, cores=cores[share.part] * share.replicas)
        for share, holding in zip(places, holdings, strict=True)
    )
