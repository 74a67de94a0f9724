"""Which allocations of a job are worth estimating: those that placement, an allocator or an operator might choose.

A predictor estimates only what it is asked about, so the caller decides what can be known later. A job's own request
comes first. Besides it, a training is estimated on more nodes (a gang that is spread communicates over the network) and
on more and fewer cores; a job with parameter servers with one worker or server more or less, as AITurbo would change it
(Zhao et al., HPDC 2021 [P]); a service with other numbers of replicas, because its latency depends on its share of the
requests. Where a training may have several GPU types, it is estimated on each. The counts tried are ours [R].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from cotenant.core.model.estimate import Candidate
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobKind, JobSpec, Role
from cotenant.core.model.node import NodeShape, matches_gpu_type
from cotenant.core.placement.constraint import nodes_min
from cotenant.core.placement.job_constraints import constraints_by
from cotenant.core.placement.unschedulable import room_on

CANDIDATES_MAX = 8  # of the requested GPU types
TYPES_MAX = 4  # single GPU types beside them
KEPT_MAX = 1_024  # cached answers
SERVER_ROLE = "ps"  # parameter servers; all other replicas are their workers
SPREADS = (2, 4, 8)  # times the fewest nodes
CORE_STEPS = (2.0, 0.5, 4.0, 0.25)  # times the job's cores
REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16)
TEAM_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1))  # change in workers and servers


def standard_candidates(
    spec: JobSpec, shapes: Sequence[NodeShape] = (), cores_useful: int | None = None
) -> tuple[Candidate, ...]:
    """Return at most 8 allocations to estimate for a job, its own request first; `cores_useful` is θ if known.

    If a training may have several of the GPU types, its request follows on each of up to four: those with most GPUs.

    If a job leaves its cores open, the ladder of cores is around θ, else around its GPUs' share of a node's cores;
    without either, cores stay 0, undecided. Only allocations that a cluster of these shapes could hold are returned;
    without shapes, any that the job could have.

    >>> from cotenant.core.model.job import Request
    >>> spec = JobSpec(roles=(Role("worker", replicas=4, request=Request(gpu_milli=1000, cores=4)),))
    >>> [(one.nodes, one.cores) for one in standard_candidates(spec, [NodeShape(gpus=4, cores=32, count=4)])]
    [(1, 4), (2, 4), (4, 4), (1, 8), (1, 2), (1, 16), (1, 1)]
    """
    serves = spec.kind is JobKind.INFERENCE or bool(spec.qos.arrivals_per_second)
    roles = tuple([replace(role, command=()) if role.command else role for role in spec.roles])  # up to 128 KiB each
    return _standard(roles, serves, tuple(shapes), cores_useful, nodes_min(constraints_by(spec)))


@lru_cache(KEPT_MAX)  # jobs with equal roles ask the same question again and again
def _standard(
    roles: tuple[Role, ...], serves: bool, shapes: tuple[NodeShape, ...], cores_useful: int | None, least: int
) -> tuple[Candidate, ...]:
    if not roles:
        return ()
    role, replicas = _chief(roles), sum(one.replicas for one in roles)
    own = replace(_own(roles, role), cores=role.request.cores or cores_useful or _share(role, shapes))
    own = replace(own, nodes=max(least, _nodes_min(role, shapes)))
    if serves:
        worth = [*_by_replicas(replicas, own, role, shapes)]
    elif shapes and not _able(role, shapes):
        worth = [own]
    elif own.servers:
        worth = [own, *_by_team(own), *_by_cores(own, role, shapes, cores_useful)]
    else:
        worth = [own, *_by_nodes(replicas, own, shapes), *_by_cores(own, role, shapes, cores_useful)]
    types = () if serves else _by_type(own, role, shapes)
    return tuple(dict.fromkeys((*tuple(dict.fromkeys(worth))[:CANDIDATES_MAX], *types)))


def largest_role(spec: JobSpec) -> Role:
    """Return the role that a candidate's cores and GPUs refer to: the first with the most GPUs per replica."""
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
    """Return a replica's GPUs' share of a node's cores, on the node with the smallest share that could hold it."""
    shares = [
        max(1, shape.cores * role.request.gpu_milli // (shape.gpus * WHOLE_GPU_MILLI))
        for shape in _able(role, shapes)
        if shape.gpus and role.request.gpu_milli
    ]
    return min(shares, default=0)


def _nodes_min(role: Role, shapes: Sequence[NodeShape]) -> int:
    """Return the fewest nodes that the replicas of the largest role need."""
    return min((ceil(role.replicas / room_on(shape, role.request)) for shape in _able(role, shapes)), default=1)


def _by_nodes(replicas: int, own: Candidate, shapes: Sequence[NodeShape]) -> Iterator[Candidate]:
    """Return the same on more nodes, each with at least one replica."""
    most = min(replicas, sum(shape.count for shape in shapes) or replicas)
    return (replace(own, nodes=own.nodes * times) for times in SPREADS if own.nodes * times <= most)


def _by_cores(own: Candidate, role: Role, shapes: Sequence[NodeShape], cores_useful: int | None) -> Iterator[Candidate]:
    """Yield the same on more and fewer cores per replica, θ first, and one core last: no training has fewer."""
    if not own.cores:
        return
    most = max((shape.cores for shape in _able(role, shapes)), default=own.cores * 4)
    ladder = [cores_useful or own.cores, *(ceil(own.cores * times) for times in CORE_STEPS), 1]
    yield from (replace(own, cores=cores) for cores in ladder if 1 <= cores <= most)


def _by_type(own: Candidate, role: Role, shapes: Sequence[NodeShape]) -> list[Candidate]:
    """Return a request on each GPU type that it may have; none if that is one type.

    Cores that the job leaves open stay so, 0: a class may have been given another number on each type.
    """
    counts = Counter[str]()
    for shape in _able(role, shapes) if role.request.gpu_milli else ():
        if shape.gpu_type and matches_gpu_type(shape.gpu_type, role.request.gpu_type):
            counts[shape.gpu_type] += shape.gpus * max(1, shape.count)
    if len(counts) < 2:
        return []
    types = sorted(counts, key=lambda kind: (-counts[kind], kind))[:TYPES_MAX]
    return [replace(own, gpu_type=kind, cores=role.request.cores or 0) for kind in types]


def _by_replicas(wanted: int, own: Candidate, role: Role, shapes: Sequence[NodeShape]) -> Iterator[Candidate]:
    """Yield services by their replicas, the requested number first, on as few nodes as they need."""
    room = sum(shape.count * room_on(shape, role.request) for shape in shapes) or REPLICAS[-1]
    for replicas in (wanted, *REPLICAS):
        if replicas == wanted or replicas <= room:
            grown = replace(role, replicas=replicas)
            yield replace(own, workers=replicas, nodes=_nodes_min(grown, shapes))


def _by_team(own: Candidate) -> Iterator[Candidate]:
    """Yield teams with one worker or server more or less."""
    for workers, servers in TEAM_STEPS:
        if own.workers + workers >= 1 and own.servers + servers >= 1:
            yield replace(own, workers=own.workers + workers, servers=own.servers + servers)
