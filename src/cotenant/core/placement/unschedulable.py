"""Why a gang is unschedulable, by counting: the reasons that hold for every placement policy.

A wrong reason is worse than none, so each is checked against what it claims: only nodes that could ever hold a replica
count as free, what an empty cluster could not hold is never said to wait for other jobs, and fragmentation is blamed on
cores or an amount only if the gang would fit without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cotenant.core.capacity.free_totals import cached_totals
from cotenant.core.capacity.ledger import UNLIMITED, Ledger
from cotenant.core.model.gang import Demand, Gang, Part
from cotenant.core.model.job import WHOLE_GPU_MILLI, JobSpec, Locality, Request
from cotenant.core.model.node import NodeShape, format_gpu_type, matches_gpu_type
from cotenant.core.model.refusal import Code, Refusal, nodes_held, plural
from cotenant.core.model.resources import KINDS, ResourceKind, Resources, added, amounts_of, counts_of, present
from cotenant.core.placement.capacity_shortage import (
    GPUS_RECOVER,
    cached_shortage,
    could_hold,
    describe_unhealthy_gpus,
    shortage,
    shortage_refusal,
    unhealthy_gpus,
)
from cotenant.core.placement.constraint import Lacking, constraints_of, first_lacking
from cotenant.core.placement.job_constraints import constraints_by
from cotenant.core.placement.packing import room_for_all


def no_place(gang: Gang, ledger: Ledger, *, within: Locality = Locality.ANYWHERE) -> Refusal:
    """Return why a gang has no place now, if the policy wants all of it `within` one server, or one rack.

    The reason is the first that holds: only held nodes could hold it; no node takes work; the whole cluster, empty,
    could not hold it, or only with GPUs that are unhealthy; the nodes that take work could not; too little is free in
    total; free resources are fragmented.
    """
    if held := held_for(gang, ledger, within=within):
        return held
    if not bool(ledger.open.any()) and (
        not len(ledger) or fits(gang, ledger, within=within, empty=True, everywhere=True)
    ):
        detail = "no other node takes work" if gang.avoided else "no node takes work"
        return Refusal(
            Code.NO_NODES, detail + _describe_unhealthy_nodes(ledger), _UNCORDONED, _unhealthy_numbers(ledger)
        )
    if not fits(gang, ledger, within=within, empty=True):
        if fits(gang, ledger, within=within, empty=True, everywhere=True):
            return _closed(gang, ledger, within=within)
        if unhealthy_gpus(gang.parts, ledger) and fits(gang, _when_healthy(ledger), within=within, empty=True):
            return _unhealthy(gang, ledger, within=within)
        return _never(gang, ledger, within=within)
    if found := shortage(gang, ledger):
        return shortage_refusal(found, ledger)
    return _fragmented(gang, ledger, within=within)


def held_for(gang: Gang, ledger: Ledger, *, within: Locality) -> Refusal | None:
    """Return the refusal if nodes that take work could not hold a gang, even empty, but could with the held nodes."""
    able = [one for one in ledger.unhealthy.held if one.node_id in ledger.numbers]
    if not able or fits(gang, ledger, within=within, empty=True):
        return None
    before = ledger.open.copy()
    ledger.open[[ledger.numbers[one.node_id] for one in able]] = True
    try:
        could = fits(gang, ledger, within=within, empty=True)
    finally:
        ledger.open[:] = before
    return nodes_held(able, _gang_in_words(gang)) if could else None


def quick_shortage(gang: Gang, ledger: Ledger, *, within: Locality) -> Refusal | None:
    """Return why a gang has no place, if too little is free in total and the totals are cached.

    No policy needs to search then; the answer is that of `no_place`.
    """
    simple = len(gang.parts) == 1 and within is not Locality.RACK and not gang.constraints
    if simple and (refusal := cached_shortage(gang, ledger, alone=within is Locality.SERVER)):
        return refusal
    short = cached_totals(ledger) is not None and shortage(gang, ledger) is not None
    return no_place(gang, ledger, within=within) if short else None


def fits(gang: Gang, ledger: Ledger, *, within: Locality, empty: bool = False, everywhere: bool = False) -> bool:
    """Return whether a gang fits, by counting: exact for one role, a necessary condition for several."""
    simple = len(gang.parts) == 1 and not gang.constraints
    if simple and empty and not everywhere and within is not Locality.RACK:
        return could_hold(gang.parts[0], ledger, alone=within is Locality.SERVER)
    if within is Locality.SERVER:
        return bool(len(room_for_all(gang, ledger, empty=empty, everywhere=everywhere)))
    racks = ledger.rack_numbers if within is Locality.RACK else np.zeros_like(ledger.rack_numbers)
    roomy = np.ones(int(racks.max(initial=0)) + 1, dtype=np.bool_)
    able = np.zeros(len(ledger), dtype=np.bool_)
    for part in gang.parts:
        room = np.minimum(ledger.room(part.demand, empty=empty, everywhere=everywhere), part.replicas)
        roomy &= np.bincount(racks, room, len(roomy)) >= part.replicas
        able |= room > 0
    if simple:
        return bool(roomy.any())
    return any(
        not _lacking(gang, ledger, here, empty=empty) and not first_lacking(gang, here, ledger)
        for here in (able & (racks == rack) for rack in np.flatnonzero(roomy))
    )


def _lacking(gang: Gang, ledger: Ledger, able: NDArray[np.bool_], *, empty: bool = False) -> list[str]:
    """Return the resources of which some nodes have too little in total."""
    return gang.needs.lacking(ledger.sums(able, empty=empty))


_UNCORDONED = "a node joins, or is uncordoned"
_HOLDERS = {Locality.SERVER: "any one server", Locality.RACK: "any one rack"}


def _closed(gang: Gang, ledger: Ledger, *, within: Locality) -> Refusal:
    holder = _HOLDERS.get(within, "the servers")
    closed = int((~ledger.open).sum()) - sum(node_id in ledger.numbers for node_id in gang.avoided)
    detail = f"; {plural(closed, 'server')} {'takes' if closed == 1 else 'take'} no work" if closed else ""
    return Refusal(
        Code.NO_NODES,
        f"needs {_gang_in_words(gang)}, more than {holder} now taking work could hold even if empty{detail}",
        "a node that is large enough joins, or is uncordoned",
        {"closed_nodes": float(closed)},
    )


def _when_healthy(ledger: Ledger) -> Ledger:
    return Ledger(ledger.unhealthy.healthy_shapes, ledger.racks)


def _unhealthy(gang: Gang, ledger: Ledger, *, within: Locality) -> Refusal:
    holder, ill = _HOLDERS.get(within, "the servers"), unhealthy_gpus(gang.parts, ledger)
    return Refusal(
        Code.NO_NODES,
        f"needs {_gang_in_words(gang)}, more than {holder} could hold even if empty "
        f"while {describe_unhealthy_gpus(ill)}",
        f"{GPUS_RECOVER}, or a node that is large enough joins",
        {"unhealthy_gpus": float(ill)},
    )


def _describe_unhealthy_nodes(ledger: Ledger) -> str:
    count = ledger.unhealthy.nodes
    return f"; {plural(count, 'server')} {'is' if count == 1 else 'are'} unhealthy" if count else ""


def _unhealthy_numbers(ledger: Ledger) -> dict[str, float]:
    return {"unhealthy_nodes": float(ledger.unhealthy.nodes)} if ledger.unhealthy.nodes else {}


def _never(gang: Gang, ledger: Ledger, *, within: Locality) -> Refusal:
    for part in gang.parts:
        request = Request(part.demand.gpu_milli, gpu_type=part.demand.gpu_type)
        if lacking := _no_such_gpus(request, ledger.shapes):
            return Refusal(Code.NEVER_FITS, f"needs {_gang_in_words(gang)}, and {lacking[0]}", lacking[1])
    if found := _unmet(gang, ledger, within=within, empty=True):
        detail = f"needs {_replicas_in_words(gang, within)}, and {found.detail}"
        return Refusal(Code.NEVER_FITS, detail, f"{found.remedy}, or nodes join", found.numbers)
    holder = _HOLDERS.get(within, "the whole cluster")
    return Refusal(
        Code.NEVER_FITS,
        f"needs {_gang_in_words(gang)}, more than {holder} could hold even if empty",
        "ask for less per replica, spread the job over more replicas or servers, or add nodes",
    )


def _unmet(gang: Gang, ledger: Ledger, *, within: Locality, empty: bool = False) -> Lacking | None:
    """Return what is missing for the constraints of a gang that has room, in the rack with room on the most nodes."""
    if not gang.constraints or within is Locality.SERVER:
        return None
    rooms = [ledger.room(part.demand, empty=empty, everywhere=empty) for part in gang.parts]
    able: NDArray[np.bool_] = np.logical_or.reduce([room > 0 for room in rooms])
    if within is Locality.RACK:
        able &= ledger.rack_numbers == int(np.bincount(ledger.rack_numbers, able).argmax())
    return first_lacking(gang, able, ledger, empty=empty) if able.any() else None


def _fragmented(gang: Gang, ledger: Ledger, *, within: Locality) -> Refusal:
    if found := _unmet(gang, ledger, within=within):
        detail = f"needs {_replicas_in_words(gang, within)}, and {found.detail}"
        return Refusal(Code.FRAGMENTED, detail, f"running jobs finish, or {found.remedy}", found.numbers, within)
    part = _tightest(gang, ledger, within=within)
    room = np.minimum(ledger.room(part.demand), part.replicas)
    numbers = {"wanted_replicas": part.replicas, "room_replicas": int(room.sum())}
    each = f"{plural(part.replicas, 'replica')} of {in_words(part.demand)}"
    together = {1: "", 2: " beside its other role"}.get(len(gang.parts), " beside its other roles")
    if within is Locality.ANYWHERE:
        detail = f"needs {each}{together}; free resources are fragmented, with room for {_or_more(room, part)}"
        remedy = "running jobs finish, or the job asks for smaller replicas"
    else:
        detail = f"needs {each} {_ON_ONE[within]}{together}; {_best(room, part, within, ledger)}"
        remedy = f"jobs {_ON_ONE[within]} finish, or the job accepts several {within}s"
    if within is Locality.RACK:
        by_rack = np.bincount(ledger.rack_numbers, room)
        numbers |= {"best_rack_replicas": int(by_rack.max()), "racks_with_room": int((by_rack > 0).sum())}
    numbers |= {"best_node_replicas": int(room.max(initial=0)), "nodes_with_room": int((room > 0).sum())}
    culprits = list(_culprits(gang, ledger, within=within))
    if culprits:
        detail += f"; {' or '.join(kind.noun for kind in culprits)} stand in its way"
    blamed = {f"fits_without_{kind.name}": 1.0 for kind in culprits}
    counts = {name: float(value) for name, value in numbers.items()} | blamed
    return Refusal(Code.FRAGMENTED, detail, remedy, counts, within)


_ON_ONE = {Locality.SERVER: "on one server", Locality.RACK: "in one rack"}


def _best(room: NDArray[np.int64], part: Part, within: Locality, ledger: Ledger) -> str:
    """Describe how much the best server or rack has room for, and all of them together."""
    rooms = room if within is Locality.SERVER else np.bincount(ledger.rack_numbers, room).astype(np.int64)
    able = int((rooms > 0).sum())
    if able < 2:
        return f"the best has room for {int(rooms.max(initial=0))}"
    return f"the best has room for {int(rooms.max())}, {able} {within}s together for {_or_more(rooms, part)}"


def _or_more(room: NDArray[np.int64], part: Part) -> str:
    return f"{int(room.sum())}" if int(room.sum()) < part.replicas else f"{part.replicas} or more"


def _tightest(gang: Gang, ledger: Ledger, *, within: Locality) -> Part:
    """Return the part to report: the first that does not fit alone, else the one that asks for the most."""
    for part in gang.parts:
        if not fits(Gang(gang.job_id, (part,)), ledger, within=within):
            return part
    return max(gang.parts, key=lambda part: (part.demand.gpu_milli, part.demand.cores, part.role))


def _culprits(gang: Gang, ledger: Ledger, *, within: Locality) -> Iterator[ResourceKind]:
    """Yield cores, or an amount, if a gang that asks for more than that would fit without it."""
    needs = gang.needs
    for kind, need in zip(KINDS[1:], needs[1:], strict=True):
        without: dict[str, Any] = {kind.name: 0}
        parts = tuple(replace(part, demand=replace(part.demand, **without)) for part in gang.parts)
        asks_for_more = any(needs._replace(**without))
        if need and asks_for_more and fits(Gang(gang.job_id, parts), ledger, within=within):
            yield kind


def never_fits(spec: JobSpec, shapes: Sequence[NodeShape], *, elastic: bool) -> Refusal | None:
    """Return why a job could never run on nodes of these shapes, even if all were empty; None if it could.

    `elastic`: any number of nodes of these shapes could join, so only what must be on one node can be too large.
    """
    shapes = [shape for shape in shapes if elastic or shape.count]
    if not shapes:
        return None
    lacking = list(_roles_too_large(spec, shapes, elastic=elastic))
    if not lacking and spec.locality is Locality.SERVER and not any(_holds_all(shape, spec) for shape in shapes):
        lacking.append("the job must run on one server, and no server could hold all of it")
    if not lacking and not elastic:
        lacking += [*_sums_too_large(spec, shapes), *_too_few_nodes(spec, shapes)]
    if not lacking:
        return None
    largest = max(shapes, key=counts_of)
    return Refusal(
        Code.NEVER_FITS,
        f"{'; '.join(lacking)}; the largest node has {largest}",
        "ask for less per replica, spread the job over more replicas, or add nodes",
        {"largest_gpus": largest.gpus, "largest_cores": largest.cores}
        | {f"largest_{kind.name}": amount for kind, amount in present(largest)},
    )


def _no_such_gpus(request: Request, shapes: Sequence[NodeShape]) -> tuple[str, str] | None:
    """Return that no node has, or shares, GPUs of the requested type, and the remedy; None if some do."""
    having = [shape for shape in shapes if shape.gpus and matches_gpu_type(shape.gpu_type, request.gpu_type)]
    if not request.gpu_milli or not any(shape.gpus for shape in shapes):
        return None
    kind = f" of type {format_gpu_type(request.gpu_type)}" if request.gpu_type else ""
    if not having:
        return f"no server has GPUs{kind}", "ask for another type, or add nodes that have it"
    if request.gpu_milli % WHOLE_GPU_MILLI and not any(shape.shareable for shape in having):
        return f"no server shares its GPUs{kind}", "ask for whole GPUs, or let nodes share theirs"
    return None


def _roles_too_large(spec: JobSpec, shapes: Sequence[NodeShape], *, elastic: bool) -> Iterator[str]:
    for role in spec.roles:
        room = [room_on(shape, role.request) for shape in shapes]
        fitting = sum(each * shape.count for each, shape in zip(room, shapes, strict=True))
        if not any(room):
            lacking = _no_such_gpus(role.request, shapes)
            why = f", and {lacking[0]}" if lacking else ""
            yield f"a replica of role {role.name!r} needs {request_in_words(role.request)}{why}"
        elif not elastic and role.replicas > fitting:
            yield (
                f"{role.replicas} replicas of role {role.name!r} need {request_in_words(role.request)} each; "
                f"the whole cluster, empty, has room for {fitting}"
            )


def _sums_too_large(spec: JobSpec, shapes: Sequence[NodeShape]) -> Iterator[str]:
    wanted = spec.resources(auto=1)
    there = added(shape.resources * shape.count for shape in shapes)
    for kind, need, have in zip(KINDS, wanted, there, strict=True):
        if need > have:
            least = " at least" if kind.name == "cores" else ""  # `auto` counts as one
            yield f"the job needs {kind.describe(need)}{least}; the whole cluster has {kind.write(have)}"


def _too_few_nodes(spec: JobSpec, shapes: Sequence[NodeShape]) -> Iterator[str]:
    able = sum(shape.count for shape in shapes if any(room_on(shape, role.request) for role in spec.roles))
    for constraint in constraints_by(spec):
        if able < constraint.nodes_min:
            yield f"the job must be {constraint.in_words}; {plural(able, 'server')} could hold a replica"


def _holds_all(shape: NodeShape, spec: JobSpec) -> bool:
    holds_each = all(room_on(shape, role.request) >= role.replicas for role in spec.roles)
    return holds_each and spec.resources(auto=1).fits(shape.resources)


def room_on(shape: NodeShape, request: Request) -> int:
    """Return how many replicas of a request an empty node of this shape could take; `auto` counts as one core."""
    limits = [int(UNLIMITED)]
    if request.gpu_milli >= WHOLE_GPU_MILLI:
        limits.append(shape.gpus // (request.gpu_milli // WHOLE_GPU_MILLI))
    elif request.gpu_milli:
        limits.append(shape.gpus * (WHOLE_GPU_MILLI // request.gpu_milli) if shape.shareable else 0)
    if request.gpu_milli and request.gpu_type and not matches_gpu_type(shape.gpu_type, request.gpu_type):
        return 0
    least = request.resources(auto=1)
    limits += [have // need for have, need in zip(shape.resources[1:], least[1:], strict=True) if need]
    return min(limits)


def shapes_of(ledger: Ledger) -> tuple[NodeShape, ...]:
    """Return a ledger's nodes grouped by shape, in the order in which shapes first appear."""
    counts: dict[NodeShape, int] = {}
    for shape in ledger.shapes:
        key = replace(shape, count=1)
        counts[key] = counts.get(key, 0) + 1
    return tuple(replace(shape, count=count) for shape, count in counts.items())


def in_words(demand: Demand) -> str:
    """Describe what one replica needs.

    >>> in_words(Demand(gpu_milli=2000, cores=6))
    '2 GPUs and 6 cores'
    """
    words = [kind.describe(need) for kind, need in zip(KINDS, Resources.of(demand), strict=True) if need]
    if demand.gpu_type and demand.gpu_milli:
        words[0] += f" ({format_gpu_type(demand.gpu_type)})"
    return " and ".join(words) or "nothing"


def _gang_in_words(gang: Gang) -> str:
    """Describe what a gang needs, with the constraints that its job sets."""
    return ", ".join(filter(None, (_replicas_in_words(gang), *(one.in_words for one in constraints_of(gang)))))


def _replicas_in_words(gang: Gang, within: Locality = Locality.ANYWHERE) -> str:
    each = " with ".join(f"{plural(part.replicas, 'replica')} of {in_words(part.demand)}" for part in gang.parts)
    return " ".join(filter(None, (each, _ON_ONE.get(within))))


def request_in_words(request: Request) -> str:
    """Describe what one replica asks for; `auto` cores are left out."""
    return in_words(Demand(request.gpu_milli, request.cores or 0, request.gpu_type, **amounts_of(request)))
