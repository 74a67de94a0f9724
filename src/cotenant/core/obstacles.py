"""What stands in a gang's way, by counting: the reasons that hold for every placement policy."""

from __future__ import annotations

from collections.abc import Sequence

from cotenant.core.jobs import WHOLE_GPU_MILLI, Demand, Gang, JobSpec, Request
from cotenant.core.ledger import Counts, Ledger
from cotenant.core.nodes import NodeShape
from cotenant.core.refusals import Code, Refusal, gpus, plural


def no_place(gang: Gang, ledger: Ledger, *, one_node: bool = False) -> Refusal:
    """Say why a gang has no place now. `one_node`: the policy wants all of it on one node.

    The reason is the first that holds: no node takes work; what is free does not suffice in sum; it suffices but
    lies in fragments.
    """
    if not bool(ledger.open.any()):
        return Refusal(Code.NO_NODES, "no node takes work", "a node joins, or is uncordoned")
    short = _short(gang, ledger)
    if short:
        return short
    return _fragmented(gang, ledger, one_node=one_node)


def _short(gang: Gang, ledger: Ledger) -> Refusal | None:
    wanted = {"gpu_milli": gang.gpu_milli, "cores": gang.cores, "memory_bytes": gang.memory_bytes}
    free = {
        "gpu_milli": ledger.free_gpu_milli,
        "cores": int(ledger.free_cores[ledger.open].sum()),
        "memory_bytes": int(ledger.free_memory[ledger.open].sum()),
    }
    words = {
        "gpu_milli": (f"{gpus(gang.gpu_milli)}", f"{free['gpu_milli'] / 1000:g} of {ledger.total_gpu_milli / 1000:g}"),
        "cores": (plural(gang.cores, "core"), f"{free['cores']} of {int(ledger.total_cores[ledger.open].sum())}"),
        "memory_bytes": (f"{_gib(gang.memory_bytes)} of memory", f"{_gib(free['memory_bytes'])}"),
    }
    lacking = [name for name in wanted if wanted[name] > free[name]]
    if not lacking:
        return None
    told = "; ".join(f"needs {words[name][0]}, {words[name][1]} free" for name in lacking)
    numbers = {f"wanted_{name}": float(wanted[name]) for name in lacking}
    numbers |= {f"free_{name}": float(free[name]) for name in lacking}
    return Refusal(Code.CAPACITY, told, "running jobs finish, or nodes join", numbers)


def _fragmented(gang: Gang, ledger: Ledger, *, one_node: bool) -> Refusal:
    part = max(gang.parts, key=lambda part: (part.demand.gpu_milli, part.demand.cores, part.role))
    room = ledger.room(part.demand)
    best = int(room.max(initial=0))
    holders = int((room > 0).sum())
    each = in_words(part.demand)
    if one_node:
        told = (
            f"needs {plural(part.replicas, 'replica')} of {each} on one server; the best server has room for {best}; "
            f"{plural(int(room.sum()), 'replica')} would fit over {plural(holders, 'server')}"
        )
        remedy = "jobs on one server finish, or the job is content with several servers"
    else:
        told = f"needs {plural(part.replicas, 'replica')} of {each}; what is free has room for {int(room.sum())}"
        remedy = "running jobs finish, or smaller replicas are asked for"
    numbers = {"wanted_replicas": part.replicas, "best_node_replicas": best, "nodes_with_room": holders}
    return Refusal(Code.FRAGMENTED, told, remedy, {name: float(value) for name, value in numbers.items()})


def never_fits(spec: JobSpec, shapes: Sequence[NodeShape], *, elastic: bool) -> Refusal | None:
    """Say whether a job could never run on nodes of these shapes, even if all of them were empty.

    `elastic`: any number of nodes of these shapes could join, so only single replicas can be too large.
    """
    if not shapes:
        return None
    lacking: list[str] = []
    for role in spec.roles:
        room = [room_on(shape, role.request) for shape in shapes]
        if not any(room):
            lacking.append(f"a replica of role {role.name!r} needs {_request_in_words(role.request)}")
        elif not elastic and role.replicas > (
            fits := sum(each * s.count for each, s in zip(room, shapes, strict=True))
        ):
            lacking.append(
                f"{role.replicas} replicas of role {role.name!r} need {_request_in_words(role.request)} each; "
                f"the whole cluster, empty, has room for {fits}"
            )
    if not lacking and not elastic:
        total_gpus = sum(shape.gpus * shape.count for shape in shapes) * WHOLE_GPU_MILLI
        total_cores = sum(shape.cores * shape.count for shape in shapes)
        cores = sum(role.replicas * (role.request.cores or 1) for role in spec.roles)
        if spec.gpu_milli > total_gpus:
            lacking.append(f"the job needs {gpus(spec.gpu_milli)}; the whole cluster has {total_gpus // 1000}")
        if cores > total_cores:
            lacking.append(f"the job needs {plural(cores, 'core')} at least; the whole cluster has {total_cores}")
    if not lacking:
        return None
    largest = max(shapes, key=lambda shape: (shape.gpus, shape.cores, shape.memory_bytes))
    return Refusal(
        Code.NEVER_FITS,
        f"{'; '.join(lacking)}; the largest node has {largest}",
        "ask for less per replica, spread the job over more replicas, or add nodes",
        {"largest_gpus": largest.gpus, "largest_cores": largest.cores, "largest_memory_bytes": largest.memory_bytes},
    )


def room_on(shape: NodeShape, request: Request) -> int:
    """Count how many replicas of a request an empty node of this shape could take; `auto` counts as one core."""
    limits: list[int] = []
    if request.gpu_milli >= WHOLE_GPU_MILLI:
        limits.append(shape.gpus // (request.gpu_milli // WHOLE_GPU_MILLI))
    elif request.gpu_milli:
        limits.append(shape.gpus * (WHOLE_GPU_MILLI // request.gpu_milli) if shape.shareable else 0)
    if request.gpu_milli and request.gpu_type and request.gpu_type.lower() not in shape.gpu_type.lower():
        return 0
    limits.append(shape.cores // (request.cores or 1))
    if request.memory_bytes:
        limits.append(shape.memory_bytes // request.memory_bytes)
    return min(limits)


def shapes_of(ledger: Ledger) -> tuple[NodeShape, ...]:
    """Group a ledger's nodes by shape, in the order in which shapes first appear."""
    counts: dict[NodeShape, int] = {}
    for shape in ledger.shapes:
        key = NodeShape(shape.gpus, shape.cores, shape.memory_bytes, shape.gpu_type, shape.shareable, 1)
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        NodeShape(s.gpus, s.cores, s.memory_bytes, s.gpu_type, s.shareable, count) for s, count in counts.items()
    )


def in_words(demand: Demand) -> str:
    """Write what one replica needs.

    >>> in_words(Demand(gpu_milli=2000, cores=6))
    '2 GPUs and 6 cores'
    """
    words = [gpus(demand.gpu_milli) + (f" ({demand.gpu_type})" if demand.gpu_type else "")] if demand.gpu_milli else []
    words += [plural(demand.cores, "core")] if demand.cores else []
    words += [f"{_gib(demand.memory_bytes)} of memory"] if demand.memory_bytes else []
    return " and ".join(words) or "nothing"


def _request_in_words(request: Request) -> str:
    return in_words(Demand(request.gpu_milli, request.cores or 0, request.memory_bytes, request.gpu_type))


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


def fill(room: Counts, nodes: Sequence[int] | Counts, replicas: int) -> list[tuple[int, int]] | None:
    """Put replicas on nodes in the given order, as many on each as it has room for; None where they do not all fit.

    >>> import numpy as np
    >>> fill(np.array([2, 0, 3]), [0, 1, 2], 4)
    [(0, 2), (2, 2)]
    """
    placed: list[tuple[int, int]] = []
    for node in nodes:
        if replicas == 0:
            break
        here = min(replicas, int(room[node]))
        if here:
            placed.append((int(node), here))
            replicas -= here
    return None if replicas else placed
