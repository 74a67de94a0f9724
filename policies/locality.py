"""Gangs close together, for as long as that is worth waiting for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cotenant.core.gangs import Gang
from cotenant.core.jobs import WHOLE_GPU_MILLI, Locality
from cotenant.core.ledger import Ledger, Offer
from cotenant.core.obstacles import fits, no_place
from cotenant.core.packing import best_fit, could_hold_all, on_fewest, on_one, room_for_all
from cotenant.core.refusals import Code, Refusal
from cotenant.core.validate import Violation


@dataclass(frozen=True, slots=True)
class Stand:
    """At which level a gang waits: from and until which wait, in seconds, and at which level after that."""

    level: Locality
    since: float = 0.0
    until: float = math.inf
    then: Locality | None = None


class WaitsForLocality:
    """Keep a gang on one server, then in one rack, then anywhere: it waits at a level, and relaxes by time-outs.

    That is how Philly schedules (Jeon et al., ATC 2019, sections 2.3 and 5 [P]): a 16-GPU job used 43.7 % of its GPUs
    on 2 servers and 28.6 % on 8, so locality is worth a wait, but not any wait. A gang of several replicas with GPUs
    waits at each level for its time-out; one that a level could not hold even if it were empty begins at the next. A
    gang that wishes for `server` or `rack` never relaxes, one that wishes for `anywhere` does not wait, nor does one
    without GPUs. At each level the closer ones are tried first. Where all nodes are in one rack there are two levels.

    The server is the one with the fewest GPUs left, so that single GPUs come from servers that are in use and the empty
    ones are left to gangs. A gang of two GPUs or more that takes a large part of a server (`dedicated_share`) rather
    has an empty one, for neighbours cost a 2-GPU job a third of its speed (114.8 to 75.6 images/s [P]). The rack is the
    smallest that suffices, by free GPUs, and in it the fewest servers [R].

    >>> from cotenant.core.gangs import Demand, Part
    >>> from cotenant.core.nodes import NodeShape
    >>> ledger = Ledger([NodeShape(8, 24)] * 4, ["a", "a", "b", "b"])
    >>> for node, taken in enumerate((4, 4, 2, 3)):
    ...     _ = ledger.take(node, Demand(1000), taken)
    >>> gang = Gang("a", (Part("worker", 8, Demand(gpu_milli=1000)),), waited_seconds=60)
    >>> print(WaitsForLocality().place(gang, ledger, np.random.default_rng(0)))
    FRAGMENTED: needs 8 replicas of 1 GPU on one server; the best has room for 6, 4 servers together for 8 or more; \
relaxes to rack in 4 min
    >>> gang = replace(gang, waited_seconds=300)
    >>> [(share.node, share.replicas) for share in WaitsForLocality().place(gang, ledger, np.random.default_rng(0))]
    [(0, 4), (1, 4)]
    """

    name = "locality"
    api_version = 1

    @dataclass(frozen=True, slots=True)
    class Options:
        """How long gangs wait, and who has a server of its own.

        server_seconds: a gang waits so long for one server.
        rack_seconds: then it waits so long for one rack.
        dedicated_share: a gang that takes this share of a server's GPUs rather has an empty one; above 1: none does.
        """

        server_seconds: float = 300.0
        rack_seconds: float = 300.0
        dedicated_share: float = 0.5

        def check(self) -> Iterator[Violation]:
            """Name every option that makes no sense."""
            for name in ("server_seconds", "rack_seconds", "dedicated_share"):
                if getattr(self, name) < 0:
                    yield Violation(name, f"must be 0 or more, not {getattr(self, name):g}")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        server, rack = self.options.server_seconds, self.options.rack_seconds
        self._turns = sorted({server, rack, server + rack})  # the waits at which the level of a gang may change

    def place(self, gang: Gang, ledger: Ledger, rng: np.random.Generator) -> Offer | Refusal:
        """Offer one server, or what the gang's level allows; else say why not, and when it will relax."""
        if (gang.gpu_milli or gang.locality is Locality.SERVER) and (offer := self._on_server(gang, ledger)):
            return offer
        stand = self._stand(gang, ledger)
        apart = stand.level is not Locality.SERVER and (gang.gpu_milli or gang.locality is Locality.RACK)
        if apart and (offer := _in_rack(gang, ledger)):
            return offer
        if stand.level is Locality.ANYWHERE and (offer := on_fewest(gang, ledger)):
            return offer
        refusal = no_place(gang, ledger, within=stand.level)
        if refusal.code is not Code.FRAGMENTED:
            return refusal
        waited = gang.waited_seconds
        return replace(
            refusal, holds_seconds=stand.until - waited, held_seconds=waited - stand.since, relaxes_to=stand.then
        )

    def alike(self, gang: Gang) -> Hashable:
        """Gangs with the same needs whose waits lie between the same turns."""
        return gang.parts, gang.locality, bisect_right(self._turns, gang.waited_seconds) if _relaxes(gang) else 0

    def alike_seconds(self, gang: Gang) -> float:
        """The time until the next turn."""
        turn = bisect_right(self._turns, gang.waited_seconds)
        return self._turns[turn] - gang.waited_seconds if _relaxes(gang) and turn < len(self._turns) else math.inf

    def _stand(self, gang: Gang, ledger: Ledger) -> Stand:
        """Find the level at which a gang waits; those that could never hold it take no time."""
        if not _relaxes(gang):
            alone = gang.gpu_milli and gang.locality is None and could_hold_all(gang, ledger)
            return Stand(gang.locality or (Locality.SERVER if alone else Locality.ANYWHERE))
        levels = [Locality.SERVER] if could_hold_all(gang, ledger) else []
        if len(np.unique(ledger.rack_numbers[ledger.open])) > 1 and fits(
            gang, ledger, within=Locality.RACK, empty=True
        ):
            levels.append(Locality.RACK)
        since, waits = 0.0, {Locality.SERVER: self.options.server_seconds, Locality.RACK: self.options.rack_seconds}
        for level, then in pairwise([*levels, Locality.ANYWHERE]):
            until = since + waits[level]
            if gang.waited_seconds < until:
                return Stand(level, since, until, then)
            since = until
        return Stand(Locality.ANYWHERE, since)

    def _on_server(self, gang: Gang, ledger: Ledger) -> Offer | None:
        """Put a gang on the server that loses least."""
        nodes = room_for_all(gang, ledger)
        crowded = self._crowded(gang, ledger) if len(nodes) else None
        while len(nodes):
            best = best_fit(ledger, nodes, crowded)
            if (offer := on_one(gang, ledger, best)) is not None:
                return offer
            nodes = nodes[nodes != best]
        return None

    def _crowded(self, gang: Gang, ledger: Ledger) -> NDArray[np.bool_] | None:
        """Mark the servers on which a gang would rather not be, for others are there; None where it does not mind."""
        if gang.gpu_milli < 2 * WHOLE_GPU_MILLI:
            return None
        large = gang.gpu_milli >= self.options.dedicated_share * WHOLE_GPU_MILLI * ledger.total_gpus
        return large & (ledger.free_gpus < ledger.total_gpus)


def _relaxes(gang: Gang) -> bool:
    """Tell whether a gang waits to be together, and for how long is not its own wish to say."""
    return gang.locality is None and gang.gpu_milli > 0 and sum(part.replicas for part in gang.parts) > 1


def _in_rack(gang: Gang, ledger: Ledger) -> Offer | None:
    """Put a gang on the fewest servers of the rack with the least that is free, among those that suffice."""
    numbers = ledger.rack_numbers
    roomy = np.ones(int(numbers.max(initial=0)) + 1, dtype=np.bool_)
    for part in gang.parts:
        room = np.minimum(ledger.room(part.demand), part.replicas)
        roomy &= np.bincount(numbers, room, len(roomy)) >= part.replicas
    free = np.bincount(numbers, np.where(ledger.open, ledger.free_gpus if gang.gpu_milli else ledger.free_cores, 0))
    racks = np.flatnonzero(roomy)
    for rack in racks[np.argsort(free[racks], kind="stable")].tolist():
        if (offer := on_fewest(gang, ledger, numbers == rack)) is not None:
            return offer
    return None
