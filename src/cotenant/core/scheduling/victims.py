"""The running jobs that may be stopped for the gangs of a cycle, as the queue's order passes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator

from cotenant.core.placement.gang_allocation import Victim


class Victims:
    """Victims that may still be stopped, `left`, and those that are stopped so far, `evicted`.

    Invariant: a victim is in at most one of them. `left` are those that the present gang outranks; one that the order
    has passed stays, or if it was evicted, it returned unless its resources are used. `left` is in the reverse order:
    the first to go is the last.
    """

    def __init__(self, victims: Iterable[Victim]) -> None:
        self.left: list[Victim] = []
        self.evicted: list[Victim] = []
        self.next_turn = math.inf  # the number of the gang at which the first of them is passed
        self._unread: Iterable[Victim] | None = victims
        self._number: float = 0
        self._rank: dict[str, int] = {}

    def load(self) -> None:
        """Read the victims, which most cycles do not need."""
        if self._unread is None:
            return
        self.left = [victim for victim in self._unread if _turn_of(victim) > self._number]
        self.left.reverse()
        self._unread = None
        self._rank = {victim.job_id: number for number, victim in enumerate(self.left)}
        self.next_turn = min(map(_turn_of, self.left), default=math.inf)

    def advance_to(self, number: float, restore: Callable[[Victim], bool]) -> None:
        """Advance to the gang of this number; `restore` lets an evicted victim stay if it still can."""
        self._number = number
        if number < self.next_turn:
            return
        self.left = [victim for victim in self.left if _turn_of(victim) > number]
        due = [victim for victim in self.evicted if _turn_of(victim) <= number]
        back = {victim.job_id for victim in due if restore(victim)}
        self.evicted = [victim for victim in self.evicted if victim.job_id not in back]
        turns = map(_turn_of, (*self.left, *self.evicted))
        self.next_turn = min((turn for turn in turns if turn > number), default=math.inf)

    def of_tenant(self, tenant: str) -> Iterator[Victim]:
        """Yield those of a tenant that may be stopped, first to go first."""
        return (victim for victim in reversed(self.left) if victim.tenant == tenant)

    def remove(self, job_ids: Collection[str]) -> None:
        """Remove jobs that may no longer be stopped, or are."""
        self.left = [victim for victim in self.left if victim.job_id not in job_ids]

    def evict(self, victims: Iterable[Victim]) -> None:
        """Move victims to the evicted ones."""
        self.evicted += victims
        self.remove({victim.job_id for victim in self.evicted})
        self.evicted.sort(key=lambda victim: self._rank[victim.job_id])


def _turn_of(victim: Victim) -> float:
    return math.inf if victim.ahead is None else victim.ahead
