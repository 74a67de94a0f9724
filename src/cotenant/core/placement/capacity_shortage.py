"""Whether too little is free in sum, and the reason that follows: what most gangs of a full cluster wait for.

A cycle with many that wait gives this reason more often than all others together, so it is told from sums by kind of
node (`core.tallies`) and from nothing else: no node is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cotenant.core.capacity.free_totals import Tally, known_tally, open_by_kind, tally_of
from cotenant.core.capacity.ledger import Ledger, Sums
from cotenant.core.model.gang import Gang, Part
from cotenant.core.model.node import type_in_words
from cotenant.core.model.refusal import Code, Refusal, gib, gpus, plural

RESOURCES = ("gpu_milli", "cores", "memory_bytes")
TOLD_MAX = 4096  # reasons that are remembered while nothing changes: who lacks as much is told the same
WELL_AGAIN = "GPUs get well or are released (`cotenant nodes`)"


@dataclass(frozen=True, slots=True)
class Shortage:
    """What some parts of a gang need together; what is free on the nodes that could hold any of it, and what they have.

    GPUs in thousandths, cores and memory, as in all sums.
    """

    parts: Sequence[Part]
    wanted: Sums
    free: Sums
    total: Sums


def shortage(gang: Gang, ledger: Ledger) -> Shortage | None:
    """Find what is too little in sum, for one role or for all together."""
    tally = tally_of(ledger)
    if len(gang.parts) > 1:
        for part in gang.parts:
            if found := _shortage([part], [ledger.room_by_kind(part.demand)], tally):
                return found
    return _shortage(gang.parts, [ledger.room_by_kind(part.demand) for part in gang.parts], tally)


def waits_for_more(gang: Gang, ledger: Ledger, *, alone: bool) -> Refusal | None:
    """Give the reason of a gang of one role for which too little is free in sum, where the sums are known.

    None: it is not known to be so, or even empty nodes could not hold the gang, or none of them `alone`.
    """
    (part,) = gang.parts
    if (tally := known_tally(ledger)) is None:
        return None
    room = ledger.room_by_kind(part.demand)
    found = _shortage(gang.parts, (room,), tally)
    if found is None or not _holds(part, tally.counts, room, alone=alone):
        return None
    lacking = tuple([wanted if wanted > free else None for wanted, free in zip(found.wanted, found.free, strict=True)])
    key = lacking, found.free, found.total, part.demand.gpu_type
    if (told := tally.told.get(key)) is None:
        if len(tally.told) >= TOLD_MAX:
            tally.told.clear()
        told = tally.told[key] = too_little(found, ledger)
    return told


def _shortage(parts: Sequence[Part], rooms: Sequence[tuple[int, ...]], tally: Tally) -> Shortage | None:
    milli = cores = memory = 0
    for part in parts:
        demand, replicas = part.demand, part.replicas
        milli += replicas * demand.gpu_milli
        cores += replicas * demand.cores
        memory += replicas * demand.memory_bytes
    free, total = tally.sums(tuple([any(each) for each in zip(*rooms, strict=True)]))
    if milli <= free[0] and cores <= free[1] and memory <= free[2]:
        return None
    return Shortage(parts, (milli, cores, memory), free, total)


def could_hold(part: Part, ledger: Ledger, *, alone: bool) -> bool:
    """Tell whether nodes that take work could hold a part if they were empty, or one of them `alone`."""
    return _holds(part, open_by_kind(ledger), ledger.room_by_kind(part.demand), alone=alone)


def _holds(part: Part, counts: Sequence[int], room: Sequence[int], *, alone: bool) -> bool:
    there = 0
    for count, each in zip(counts, room, strict=True):
        if count and each >= part.replicas:
            return True
        there += count * each
    return not alone and there >= part.replicas


def too_little(found: Shortage, ledger: Ledger) -> Refusal:
    """Say what is too little."""
    told: list[str] = []
    asked: dict[str, float] = {}
    there: dict[str, float] = {}
    for name, wanted, free, total in zip(RESOURCES, found.wanted, found.free, found.total, strict=True):
        if wanted > free:
            told.append(f"needs {_in_words(name, wanted, free, total, found.parts)} free")
            asked[f"wanted_{name}"], there[f"free_{name}"] = float(wanted), float(free)
    numbers = asked | there
    if found.wanted[0] > found.free[0] and (ill := ill_gpus(found.parts, ledger)):
        numbers["unhealthy_gpus"] = float(ill)
        return Refusal(
            Code.CAPACITY,
            f"{'; '.join(told)}; {ill_in_words(ill)} and not counted",
            f"running jobs finish, nodes join, or {WELL_AGAIN}",
            numbers,
        )
    return Refusal(Code.CAPACITY, "; ".join(told), "running jobs finish, or nodes join", numbers)


def _in_words(name: str, wanted: int, free: int, total: int, parts: Sequence[Part]) -> str:
    if name == "cores":
        return f"{plural(wanted, 'core')}, {free} of {total}"
    if name == "memory_bytes":
        return f"{gib(wanted)} of memory, {gib(free)}"
    kinds = {part.demand.gpu_type for part in parts if part.demand.gpu_type}
    kind = f" ({', '.join(map(type_in_words, sorted(kinds)))})" if kinds else ""
    return f"{gpus(wanted)}{kind}, {free / 1000:g} of {total / 1000:g}"


def ill_gpus(parts: Sequence[Part], ledger: Ledger) -> int:
    """Count the GPUs of the types that parts want, and that are not well."""
    if not ledger.illness.gpus:
        return 0
    return ledger.illness.gpus_of([part.demand.gpu_type for part in parts if part.demand.gpu_milli], ledger.shapes)


def ill_in_words(count: int) -> str:
    """Write how many GPUs are not well."""
    return f"{plural(count, 'GPU')} {'is' if count == 1 else 'are'} not well"
