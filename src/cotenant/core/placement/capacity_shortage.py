"""Whether too little is free in total, and the reason that follows: what most gangs of a full cluster wait for.

A cycle with many waiting jobs gives this reason more often than all others together, so it is computed from totals by
node class (`capacity.free_totals`) alone: no node is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.core.capacity.free_totals import FreeTotals, cached_totals, current_totals, open_nodes_by_kind
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Gang, Part, needs_of
from cotenant.core.model.node import format_gpu_type
from cotenant.core.model.refusal import Code, Refusal, plural
from cotenant.core.model.resources import AMOUNT_KINDS, KINDS, ResourceKind, Resources

REFUSALS_MAX = 4096  # cached reasons: gangs that lack the same get the same one
GPUS_RECOVER = "GPUs recover or are released (`cotenant nodes`)"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What parts of a gang need, what is free on nodes that could hold any of it, and what those nodes have."""

    parts: Sequence[Part]
    wanted: Resources
    free: Resources
    total: Resources


def shortage(gang: Gang, ledger: Ledger) -> Shortage | None:
    """Return what is too little in total, for one role or for all together; None if nothing is."""
    totals = current_totals(ledger)
    if len(gang.parts) > 1:
        for part in gang.parts:
            if found := _shortage([part], [ledger.room_by_kind(part.demand)], totals):
                return found
    return _shortage(gang.parts, [ledger.room_by_kind(part.demand) for part in gang.parts], totals)


def cached_shortage(gang: Gang, ledger: Ledger, *, alone: bool) -> Refusal | None:
    """Return the refusal of a gang of one role for which too little is free in total, if the totals are cached.

    None: this is not known, or even empty nodes could not hold the gang, or none of them `alone`.
    """
    (part,) = gang.parts
    if (totals := cached_totals(ledger)) is None:
        return None
    room = ledger.room_by_kind(part.demand)
    found = _shortage(gang.parts, (room,), totals)
    if found is None or not _holds(part, totals.counts, room, alone=alone):
        return None
    free = found.free
    lacking = tuple([one if one > free[at] else None for at, one in enumerate(found.wanted)])
    key = lacking, free, found.total, part.demand.gpu_type
    if (refusal := totals.refusals.get(key)) is None:
        if len(totals.refusals) >= REFUSALS_MAX:
            totals.refusals.clear()
        refusal = totals.refusals[key] = shortage_refusal(found, ledger)
    return refusal


def _shortage(parts: Sequence[Part], rooms: Sequence[tuple[int, ...]], totals: FreeTotals) -> Shortage | None:
    wanted = needs_of(parts)
    free, total = totals.sums(tuple([any(each) for each in zip(*rooms, strict=True)]))
    return None if wanted.fits(free) else Shortage(parts, wanted, free, total)


def could_hold(part: Part, ledger: Ledger, *, alone: bool) -> bool:
    """Return whether nodes that take work could hold a part if they were empty, or one of them `alone`."""
    return _holds(part, open_nodes_by_kind(ledger), ledger.room_by_kind(part.demand), alone=alone)


def _holds(part: Part, counts: Sequence[int], room: Sequence[int], *, alone: bool) -> bool:
    there = 0
    for count, each in zip(counts, room, strict=True):
        if count and each >= part.replicas:
            return True
        there += count * each
    return not alone and there >= part.replicas


def shortage_refusal(found: Shortage, ledger: Ledger) -> Refusal:
    """Return the refusal for a shortage."""
    lacking: list[str] = []
    asked: dict[str, float] = {}
    there: dict[str, float] = {}
    for kind, wanted, free, total in zip(KINDS, found.wanted, found.free, found.total, strict=True):
        if wanted > free:
            lacking.append(f"needs {_in_words(kind, wanted, free, total, found.parts)} free")
            asked[f"wanted_{kind.name}"], there[f"free_{kind.name}"] = float(wanted), float(free)
    numbers = asked | there
    if found.wanted.gpu_milli > found.free.gpu_milli and (ill := unhealthy_gpus(found.parts, ledger)):
        numbers["unhealthy_gpus"] = float(ill)
        return Refusal(
            Code.CAPACITY,
            f"{'; '.join(lacking)}; {describe_unhealthy_gpus(ill)} and not counted",
            f"running jobs finish, nodes join, or {GPUS_RECOVER}",
            numbers,
        )
    return Refusal(Code.CAPACITY, "; ".join(lacking), "running jobs finish, or nodes join", numbers)


def _in_words(kind: ResourceKind, wanted: int, free: int, total: int, parts: Sequence[Part]) -> str:
    if kind in AMOUNT_KINDS:
        return f"{kind.describe(wanted)}, {kind.write(free)}"
    types = {part.demand.gpu_type for part in parts if part.demand.gpu_type} if kind.name == "gpu_milli" else ()
    typed = f" ({', '.join(map(format_gpu_type, sorted(types)))})" if types else ""
    return f"{kind.describe(wanted)}{typed}, {kind.write(free)} of {kind.write(total)}"


def unhealthy_gpus(parts: Sequence[Part], ledger: Ledger) -> int:
    """Return the number of unhealthy GPUs of the types that parts request."""
    if not ledger.unhealthy.gpus:
        return 0
    return ledger.unhealthy.gpus_of([part.demand.gpu_type for part in parts if part.demand.gpu_milli], ledger.shapes)


def describe_unhealthy_gpus(count: int) -> str:
    """Describe how many GPUs are unhealthy."""
    return f"{plural(count, 'GPU')} {'is' if count == 1 else 'are'} unhealthy"
