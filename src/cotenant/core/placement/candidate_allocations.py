"""Which allocations of a job are worth judging: those that a placement, an allocator or an operator might choose.

A predictor judges what it is asked about and nothing else, so whoever asks decides what can be known later. A job's own
request comes first. Beside it a training is asked about on more nodes (a gang that is spread talks over the network),
and on more and fewer cores around those that it has; a job with parameter servers with one worker or server more or
less, as AITurbo would change it (Zhao et al., HPDC 2021 [P]); a service with other numbers of replicas, for its latency
hangs on its share of the requests. Which counts are tried is ours [R].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from cotenant.core.model.estimate import Candidate
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, JobSpec, Role
from cotenant.core.model.node import NodeShape
from cotenant.core.placement.unschedulable import room_on

CANDIDATES_MAX = 8
KEPT_MAX = 1_024  # answers
SERVER_ROLE = "ps"  # parameter servers; all other replicas are their workers
SPREADS = (2, 4, 8)  # times the fewest nodes
CORE_STEPS = (2.0, 0.5, 4.0, 0.25)  # times the job's cores
REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16)
TEAM_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1))  # workers and servers more


def standard(spec: JobSpec, shapes: Sequence[NodeShape] = (), cores_useful: int | None = None) -> tuple[Candidate, ...]:
    """Name at most 8 allocations to judge for a job, the one it asks for first; `cores_useful` is θ where it is known.

    Where a job leaves its cores open, the ladder of cores stands around θ, else around its GPUs' share of a node's
    cores; without either nothing is known to choose from, and cores stay 0, not decided yet. Only what a cluster of
    these shapes could hold is named; without shapes, whatever the job could be.

    >>> from cotenant.core.model.job import Request
    >>> spec = JobSpec(roles=(Role("worker", replicas=4, request=Request(gpu_milli=1000, cores=4)),))
    >>> [(one.nodes, one.cores) for one in standard(spec, [NodeShape(gpus=4, cores=32, count=4)])]
    [(1, 4), (2, 4), (4, 4), (1, 8), (1, 2), (1, 16), (1, 1)]
    """
    serves = spec.kind is JobKind.INFERENCE or bool(spec.qos.arrivals_per_second)
    roles = tuple([replace(role, command=()) if role.command else role for role in spec.roles])  # up to 128 KiB each
    return _standard(roles, serves, tuple(shapes), cores_useful)


@lru_cache(KEPT_MAX)  # of many jobs with equal roles the same is asked again and again
def _standard(
    roles: tuple[Role, ...], serves: bool, shapes: tuple[NodeShape, ...], cores_useful: int | None
) -> tuple[Candidate, ...]:
    if not roles:
        return ()
    role, replicas = _chief(roles), sum(one.replicas for one in roles)
    own = replace(_own(roles, role), cores=role.request.cores or cores_useful or _share(role, shapes))
    own = replace(own, nodes=_nodes_min(role, shapes))
    if serves:
        worth = [*_by_replicas(replicas, own, role, shapes)]
    elif shapes and not _able(role, shapes):
        worth = [own]
    elif own.servers:
        worth = [own, *_by_team(own), *_by_cores(own, role, shapes, cores_useful)]
    else:
        worth = [own, *_by_nodes(replicas, own, shapes), *_by_cores(own, role, shapes, cores_useful)]
    return tuple(dict.fromkeys(worth))[:CANDIDATES_MAX]


def chief(spec: JobSpec) -> Role:
    """Give the role that a candidate's cores and GPUs are about: the first of those with the most GPUs a replica."""
    return _chief(spec.roles)


def _chief(roles: tuple[Role, ...]) -> Role:
    return max(roles, key=lambda role: role.request.gpu_milli)


def _own(roles: tuple[Role, ...], role: Role) -> Candidate:
    servers = [one for one in roles if one.name == SERVER_ROLE] if len(roles) > 1 else []
    count = sum(one.replicas for one in servers)
    workers = sum(one.replicas for one in roles) - count
    team = (workers, count, servers[0].request.cores or 0) if count else (0, 0, 0)
    return Candidate(role.request.cores or 0, role.request.gpu_milli, 1, role.request.gpu_type, *team)


def _able(role: Role, shapes: Sequence[NodeShape]) -> list[NodeShape]:
    return [shape for shape in shapes if room_on(shape, role.request)]


def _share(role: Role, shapes: Sequence[NodeShape]) -> int:
    """A replica's GPUs' share of a node's cores, on the least generous node that could hold it."""
    shares = [
        max(1, shape.cores * role.request.gpu_milli // (shape.gpus * WHOLE_GPU_MILLI))
        for shape in _able(role, shapes)
        if shape.gpus and role.request.gpu_milli
    ]
    return min(shares, default=0)


def _nodes_min(role: Role, shapes: Sequence[NodeShape]) -> int:
    """The fewest nodes that the replicas of the chief role need."""
    return min((ceil(role.replicas / room_on(shape, role.request)) for shape in _able(role, shapes)), default=1)


def _by_nodes(replicas: int, own: Candidate, shapes: Sequence[NodeShape]) -> Iterator[Candidate]:
    """The same on more nodes, each of which has one replica at least."""
    most = min(replicas, sum(shape.count for shape in shapes) or replicas)
    return (replace(own, nodes=own.nodes * times) for times in SPREADS if own.nodes * times <= most)


def _by_cores(own: Candidate, role: Role, shapes: Sequence[NodeShape], cores_useful: int | None) -> Iterator[Candidate]:
    """The same on more and on fewer cores a replica, θ first, and one core last: no training has fewer."""
    if not own.cores:
        return
    most = max((shape.cores for shape in _able(role, shapes)), default=own.cores * 4)
    ladder = [cores_useful or own.cores, *(ceil(own.cores * times) for times in CORE_STEPS), 1]
    yield from (replace(own, cores=cores) for cores in ladder if 1 <= cores <= most)


def _by_replicas(wanted: int, own: Candidate, role: Role, shapes: Sequence[NodeShape]) -> Iterator[Candidate]:
    """Services by their replicas, first as many as asked for, on as many nodes as they need at least."""
    room = sum(shape.count * room_on(shape, role.request) for shape in shapes) or REPLICAS[-1]
    for replicas in (wanted, *REPLICAS):
        if replicas == wanted or replicas <= room:
            grown = replace(role, replicas=replicas)
            yield replace(own, workers=replicas, nodes=_nodes_min(grown, shapes))


def _by_team(own: Candidate) -> Iterator[Candidate]:
    """Teams with one worker or server more or less."""
    for workers, servers in TEAM_STEPS:
        if own.workers + workers >= 1 and own.servers + servers >= 1:
            yield replace(own, workers=own.workers + workers, servers=own.servers + servers)
