"""The result of admission: which jobs should start, and which may have to make room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Flags, Ints
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.order_explanation import Outrankers


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of admission: rows that should start, in order; rows that may have to make room, first victim first.

    `outranked` wait because of the order, `over_limit` because of their tenant's limit. `entitled` marks rows within
    their tenant's quota; None if there are no quotas. `turns` gives for each victim how many of the starts, the first
    ones, may have its resources; None: those that come before it in the order. `ranked` holds all rows in order; only
    the waiting ones if no job is stopped for others. If the order is enforced, `selected` marks the rows that should
    run, and `count_outrankers` counts what goes before the others. `standings` number groups of victims of equal
    standing, from which the cheapest are chosen; None: the order decides. `held_back` marks waiting rows that fair
    shares hold back, and `sharing` knows the shares; None if tenants do not share, or only one tenant has jobs.
    """

    ranked: Ints
    starts: Ints
    victims: Ints
    outranked: Ints
    over_limit: Ints
    turns: Ints | None = None
    entitled: Flags | None = None
    selected: Flags | None = None
    count_outrankers: Callable[[], Outrankers] | None = None
    standings: Ints | None = None
    held_back: Flags | None = None
    sharing: Sharing | None = None

    @property
    def outrankers(self) -> Outrankers | None:
        """The jobs before those that the order leaves out; counted on access, while the jobs have not changed."""
        return self.count_outrankers() if self.count_outrankers else None

    def ahead(self) -> Ints:
        """Return for each victim the number of starts that may have its resources, always the first ones."""
        if self.turns is not None or not len(self.victims):
            return self.victims if self.turns is None else self.turns
        place_of = np.empty_like(self.ranked)
        place_of[self.ranked] = np.arange(len(self.ranked))
        return np.searchsorted(place_of[self.starts], place_of[self.victims])
