"""Changing the cores of running jobs: what an allocator sees of one, and what it may answer.

The live mesh and the simulator ask alike: at most every `interval_seconds`, and when something new is known of a job.
Cores change in lock-step on all nodes of a gang. What the allocator knows of a job's speed on other core counts comes
in `paces`, which holds the rates of its kind: its own, and those of the same (user, model, GPUs) before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from cotenant.core.curves import Point
from cotenant.core.estimates import Estimate
from cotenant.core.jobs import WHOLE_GPU_MILLI, JobSpec
from cotenant.core.ledger import Holding, Share
from cotenant.core.nodes import NodeShape
from cotenant.core.policy import Sizing


@dataclass(frozen=True, slots=True)
class Running:
    """A running job whose cores may change.

    `cores` are held per replica by role, in the roles' order; `spare` could be given to each replica of each role
    beside them, for they are free on every node that it runs on. `points` are rates measured at core counts per replica
    of the first role with GPUs (else of the first role), in the present attempt, the latest for each count; `rate` is
    that of the last window and `settled_seconds` the time since its cores last changed.
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


@runtime_checkable
class Resizes(Protocol):
    """A CPU allocator that changes its mind while a job runs."""

    interval_seconds: float

    def resize(self, running: Running, now: float) -> Sizing | None:
        """Say what a running job should hold; None: what it holds. Never more than `cores` + `spare`."""


class BadSizing(Exception):
    """An allocator wants what it may not: a bug in the allocator. The job keeps what it holds."""


def changeable(spec: JobSpec) -> tuple[bool, ...]:
    """Tell by role whether its cores may change: where the user left them to the allocator (`auto`)."""
    return tuple(role.request.cores is None for role in spec.roles)


def spare_of(spec: JobSpec, places: Sequence[Share], free_cores: Mapping[int, int]) -> tuple[int, ...]:
    """Count the cores that each replica could get beside its own, by role, all roles at once and in lock-step.

    `places` say where the gang's replicas are, `free_cores` what is free on those nodes. All roles that may change get
    the same; what is left then goes to the earlier roles.

    >>> from cotenant.core.jobs import Role
    >>> spec = JobSpec(roles=(Role("worker", 3), Role("ps", 1)))
    >>> spare_of(spec, [Share(0, 0, 2), Share(1, 0, 1), Share(1, 1, 1)], {0: 9, 1: 5})
    (3, 2)
    """
    left, may = dict(free_cores), changeable(spec)
    spare = [0] * len(spec.roles)
    for roles in ([role for role in range(len(may)) if may[role]], *([role] for role in range(len(may)) if may[role])):
        more = _room(roles, places, left)
        for role in roles:
            spare[role] += more
        for share in places:
            left[share.node] -= more * share.replicas if share.part in roles else 0
    return tuple(spare)


def _room(roles: Sequence[int], places: Sequence[Share], free_cores: Mapping[int, int]) -> int:
    """Count the cores that each replica of some roles could get."""
    replicas: dict[int, int] = {}
    for share in places:
        if share.part in roles:
            replicas[share.node] = replicas.get(share.node, 0) + share.replicas
    return max(0, min((free_cores[node] // count for node, count in replicas.items()), default=0))


def node_share_of(spec: JobSpec, places: Sequence[Share], shapes: Mapping[int, NodeShape]) -> tuple[int, ...]:
    """Count by role a replica's GPUs' share of its node's cores, the least over its nodes; 0 for roles without GPUs.

    >>> from cotenant.core.jobs import Request, Role
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


def lent_of(cores: Sequence[int], own: Sequence[int]) -> tuple[int, ...]:
    """Count by role the cores that were lent: those beyond the ones that the job was started with."""
    return tuple(max(0, have - begun) for have, begun in zip(cores, own, strict=True))


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
