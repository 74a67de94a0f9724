"""Resizing the cores of running jobs: what an allocator sees of a job, and what it may answer.

The live mesh and the simulator ask in the same way: at most every `interval_seconds`, when a window was measured after
a change, and when neighbors came or went. Cores change in lock-step on all nodes of a gang, and only those of its
leading role: the first with GPUs, else the first. An answer is a claim. Up to its GPUs' share of the node a job owns
what it claims; cores beyond that are lent: they are distributed by marginal gain (see `core_rebalance`), and reclaimed
as soon as a starting job needs them.
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

PATIENCE_SECONDS = 1800.0  # while nothing changes, jobs are checked less and less often, but at least this often
DRIFT = 0.1  # rates this far from earlier ones belong to another phase, or to another job (CODA [R])


@dataclass(frozen=True, slots=True)
class ResizableJob:
    """A running job whose cores may change.

    `cores` are held per replica by role, in the order of the roles; `spare` could be added to each replica of each
    role, because no job owns them on its nodes. `points` are rates measured at core counts per replica of the leading
    role in the present attempt, `known` those of its job class before; `rate_per_second` is that of the last window and
    `settled_seconds` the time since its cores or its neighbors last changed.
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
    lent: tuple[int, ...] = ()  # by role: of `cores`, those that are lent and can be reclaimed at once
    known: tuple[Point, ...] = ()
    lead: int = field(init=False, compare=False)  # the number of the role whose cores change

    def __post_init__(self) -> None:
        object.__setattr__(self, "lead", leading_role(self.spec))

    @property
    def gpus(self) -> int:
        """GPUs of each replica of the leading role, rounded up; at least 1."""
        return max(1, -(-self.spec.roles[self.lead].request.gpu_milli // 1000))

    @property
    def share(self) -> int:
        """Cores of its GPUs' share, per replica of the leading role; at least 1."""
        return max(1, self.node_share[self.lead]) if self.node_share else self.cores[self.lead]

    @property
    def own(self) -> int:
        """Cores that each replica of the leading role owns."""
        return self.cores[self.lead] - (self.lent[self.lead] if self.lent else 0)

    @property
    def most(self) -> int:
        """Cores that each replica of the leading role could have."""
        return self.cores[self.lead] + self.spare[self.lead]

    @property
    def measured(self) -> tuple[Point, ...]:
        """All measurements of the job and its class, one point per core count."""
        return with_class_points(self.points, self.known)

    def wish(self, cores: int, reason: str) -> Sizing:
        """Return a claim for cores per replica of the leading role, within what is available; others keep theirs."""
        within = max(1, min(cores, self.most))
        return Sizing((*self.cores[: self.lead], within, *self.cores[self.lead + 1 :]), reason)


@runtime_checkable
class Resizes(Protocol):
    """A CPU allocator that changes cores while a job runs.

    Rates are measured over `measure_seconds`, after `warm_up_seconds` since the last change.
    """

    interval_seconds: float
    warm_up_seconds: float
    measure_seconds: float

    def resize(self, running: ResizableJob, now: float) -> Sizing | None:
        """Return what a running job should hold; None: its last claim, or what it holds.

        Never more than `cores` + `spare`.
        """

    def weight(self, running: ResizableJob) -> float:
        """Return the weight of this job's gains relative to equal gains of others when spare cores are distributed."""


def leading_role(spec: JobSpec) -> int:
    """Return the role whose cores change: the first with GPUs, else the first."""
    for number, role in enumerate(spec.roles):
        if role.request.gpu_milli:
            return number
    return 0


def resizable(spec: JobSpec) -> bool:
    """Return whether a job's cores may change: its user left them open, and it has GPUs to keep busy."""
    if not spec.roles or spec.kind is JobKind.CPU:
        return False
    request = spec.roles[leading_role(spec)].request
    return request.cores is None and request.gpu_milli > 0


def with_class_points(points: Sequence[Point], known: Sequence[Point]) -> tuple[Point, ...]:
    """Return the measurements of a job together with those of its class.

    If the job runs at a different pace than its class did on the same cores, the rates of the class are scaled to it.

    >>> with_class_points([Point(3, 20.0)], [Point(3, 10.0), Point(4, 12.0)])
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


def next_look_seconds(gap_seconds: float, interval_seconds: float) -> float:
    """Return the time until the next check of a job, `gap_seconds` after a check that changed nothing.

    >>> next_look_seconds(90.0, 90.0), next_look_seconds(90.0, 1200.0), next_look_seconds(1200.0, 90.0)
    (180.0, 1200.0, 1800.0)
    """
    return max(interval_seconds, min(2 * gap_seconds, PATIENCE_SECONDS))


class BadSizing(Exception):
    """An allocator's answer is invalid: a bug in the allocator. The job keeps what it holds."""


def changeable(spec: JobSpec) -> tuple[bool, ...]:
    """Return by role whether its cores may change: whether the user left them to the allocator (`auto`)."""
    return tuple(role.request.cores is None for role in spec.roles)


def node_share_of(spec: JobSpec, places: Sequence[Share], shapes: Mapping[int, NodeShape]) -> tuple[int, ...]:
    """Return by role a replica's GPUs' share of its node's cores, the least over its nodes; 0 for roles without GPUs.

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


def validated_cores(running: ResizableJob, sizing: Sizing | None) -> tuple[int, ...] | None:
    """Return the cores per replica by role that a job must hold from now on; None if nothing changes.

    Raises:
        BadSizing: the allocator wants more than is spare, fewer than 1 core, or changes what the user asked for.
    """
    if sizing is None or sizing.cores == running.cores:
        return None
    problem = f"{running.job_id} holds {running.cores} cores per replica and should get {sizing.cores}"
    if len(sizing.cores) != len(running.cores):
        raise BadSizing(f"{problem}, which does not match its roles")
    for wanted, cores, spare, may in zip(
        sizing.cores, running.cores, running.spare, changeable(running.spec), strict=True
    ):
        if wanted != cores and not may:
            raise BadSizing(f"{problem}, but its user asked for a number of cores")
        if wanted > cores + spare:
            raise BadSizing(f"{problem}, but no more than {running.spare} are spare")
        if wanted < min(1, cores):
            raise BadSizing(f"{problem}, and a process needs a core")
    return tuple(sizing.cores)


def resized(places: Sequence[Share], holdings: Sequence[Holding], cores: Sequence[int]) -> tuple[Holding, ...]:
    """Return what a gang holds after a resize; `holdings` are those of `places`, one for one."""
    return tuple(
        replace(holding, cores=cores[share.part] * share.replicas)
        for share, holding in zip(places, holdings, strict=True)
    )
