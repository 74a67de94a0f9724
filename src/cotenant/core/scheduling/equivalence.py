"""Equivalence classes of gangs: one gang of a class is tried, and its refusal answers for the others.

Theory of operation. Gangs of one class get the same answer from the same free resources, so under load, when most
answers are refusals, the cost of scheduling is per class and not per job. Policies define the classes
(`policy.protocols.DefinesEquivalence`). A remembered refusal holds until one of three things changes:

- the wait of the gang in question. A refusal tells for how much longer and shorter waits it holds
  (`Refusal.holds_seconds`, `held_seconds`), so a class may have several refusals side by side. Callers whose classes
  are split by wait say so with `add_uniform`.
- the reservations that the gang must respect. A refusal because of reservations answers only for gangs that are bound
  alike, and only until a gang starts, which may take the room that was left.
- more is free. A cycle begins without refusals. Callers that keep them from cycle to cycle forget them when something
  is released: all of them, or those of classes that have `room_on` the nodes where it was released.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.gang import Demand, Gang
from cotenant.core.model.job import WHOLE_GPU_MILLI
from cotenant.core.model.refusal import Code, Refusal
from cotenant.core.scheduling.reservations import has_reservation

Key = TypeVar("Key", bound=Hashable)
UNAFFECTED_BY_ROOM = frozenset(
    {Code.NEVER_FITS, Code.NO_NODES, Code.NODES_HELD, Code.POLICY_FAILED}
)  # freeing resources would not help
SHARED = frozenset({Code.CAPACITY, Code.FRAGMENTED, Code.NO_NODES, Code.RESERVED})  # may apply to a whole class


class ClassRefusals(Generic[Key]):
    """The refusals of equivalence classes. `uniform` are those that hold for all gangs of their class.

    >>> refusals = ClassRefusals[str]()
    >>> refusals.add("8 GPUs", Refusal(Code.FRAGMENTED, "best server has 6", holds_seconds=60, held_seconds=100), 100)
    >>> [refusals.get("8 GPUs", waited).holds_seconds for waited in (0, 100, 159)]
    [160, 60, 1]
    >>> refusals.get("8 GPUs", 160), refusals.get("4 GPUs", 100)
    (None, None)
    """

    def __init__(self) -> None:
        self.uniform: dict[Key, Refusal] = {}
        # in the order in which they were added, each with the fragmented wait of the gang that got it, in seconds
        self._by_wait: dict[Key, list[tuple[Refusal, float]]] = {}
        self._reserved: dict[tuple[Key, Hashable], list[tuple[Refusal, float]]] = {}

    @property
    def any_reserved(self) -> bool:
        """Whether any refusal is because of reservations; only then does `get` need `bound`."""
        return bool(self._reserved)

    @property
    def divided(self) -> set[Key]:
        """The classes with refusals that hold for some of their gangs only: by their waits or by reservations."""
        return {*self._by_wait, *(key for key, _ in self._reserved)} - self.uniform.keys()

    def get(self, key: Key, fragmented_seconds: float, bound: Hashable = None) -> Refusal | None:
        """Return the refusal of a gang with this wait, adjusted to that; None if it has to be tried.

        `bound` is what decides which reservations a gang must respect.
        """
        if (refusal := self.uniform.get(key)) is not None:
            return refusal
        if self._by_wait and (found := _holding(self._by_wait.get(key, ()), fragmented_seconds)):
            return found
        return _holding(self._reserved.get((key, bound), ()), fragmented_seconds) if self._reserved else None

    def add(self, key: Key, refusal: Refusal, fragmented_seconds: float, bound: Hashable = None) -> None:
        """Remember the refusal that a gang with this wait got, unless one is known that holds for its whole class."""
        if refusal.code is not Code.RESERVED and not self._by_wait and _at_any_wait(refusal):
            self.uniform.setdefault(key, refusal)  # hot path: a key is hashed once
        elif key in self.uniform:
            return
        elif refusal.code is Code.RESERVED:
            self._reserved.setdefault((key, bound), []).append((refusal, fragmented_seconds))
        elif key in self._by_wait or not _at_any_wait(refusal):
            self._by_wait.setdefault(key, []).append((refusal, fragmented_seconds))
        else:
            self.uniform[key] = refusal

    def add_uniform(self, key: Key, refusal: Refusal) -> None:
        """Remember a refusal for all gangs of a class, whose waits are known to make no difference."""
        self.uniform[key] = refusal

    def forget_reserved(self) -> None:
        """Forget the refusals because of reservations, because a gang started."""
        self._reserved.clear()

    def forget_helped(self, helped: Callable[[Key], bool]) -> None:
        """Forget the uniform refusals that more free resources could change, of classes that would be `helped`."""
        for key in [key for key, one in self.uniform.items() if one.code not in UNAFFECTED_BY_ROOM and helped(key)]:
            del self.uniform[key]

    def clear(self) -> None:
        """Forget all refusals."""
        self.uniform.clear()
        self._by_wait.clear()
        self._reserved.clear()


def answers_for_class(refusal: Refusal) -> bool:
    """Return whether a refusal answers for all gangs of its class, whatever their waits and reservations."""
    shared = refusal.code in SHARED and refusal.code is not Code.RESERVED
    return shared and _at_any_wait(refusal) and not has_reservation(refusal)


def _at_any_wait(refusal: Refusal) -> bool:
    return math.isinf(min(refusal.holds_seconds, refusal.held_seconds))


def _holding(some: Collection[tuple[Refusal, float]], fragmented_seconds: float) -> Refusal | None:
    """Return the first refusal that holds for a wait, adjusted to it."""
    for refusal, then in some:
        longer = fragmented_seconds - then
        if -refusal.held_seconds <= longer < refusal.holds_seconds:
            return refusal.after(longer)
    return None


def room_on(nodes: Collection[int], gang: Gang, ledger: Ledger) -> bool:
    """Return whether some nodes have room for one replica of a gang, whatever the type of their GPUs.

    If they have not, what was released there changes no refusal of its class.
    """
    return any(_has_room(ledger, node, part.demand) for node in nodes for part in gang.parts)


def _has_room(ledger: Ledger, node: int, demand: Demand) -> bool:
    if ledger.lacks_beside_gpus(node, demand):
        return False
    if demand.gpu_milli % WHOLE_GPU_MILLI:
        return any(free >= demand.gpu_milli for free in ledger.parts_of(node))
    return bool(demand.gpu_milli <= ledger.free_gpus[node] * WHOLE_GPU_MILLI)
