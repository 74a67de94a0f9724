"""What a cycle's counting decides: who should start, and who may have to make room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cotenant.core.model.job_table import Flags, Ints
from cotenant.core.scheduling.fair_share import Sharing
from cotenant.core.scheduling.order_explanation import Outrankers


@dataclass(frozen=True, slots=True)
class Choice:
    """What the order says: rows that should start, in order; rows that may have to make room, the first to go first.

    `outranked` wait for the order's sake, `over_limit` for their tenant's limit. `entitled` marks rows
    within their tenant's guarantee; None where nobody has one. `turns` says for each victim how many of the starts,
    the first ones, may have its room; None: those that come before it in the order. `ranked` holds all rows in order;
    the waiting ones alone where nobody is stopped for others. Where the order is enforced, `selected` marks those that
    should run, and `tell_outrankers` counts who goes before the others. `standings` number groups of victims
    that stand alike, so that it is for their cost to say who goes; None: the order says so. `held_back` marks waiting
    rows that fair shares hold back, and `sharing` tells of the shares; None where tenants do not share, or only one
    tenant has jobs.
    """

    ranked: Ints
    starts: Ints
    victims: Ints
    outranked: Ints
    over_limit: Ints
    turns: Ints | None = None
    entitled: Flags | None = None
    selected: Flags | None = None
    tell_outrankers: Callable[[], Outrankers] | None = None
    standings: Ints | None = None
    held_back: Flags | None = None
    sharing: Sharing | None = None

    @property
    def outrankers(self) -> Outrankers | None:
        """Who goes before those that the order leaves out, counted when asked for, while the jobs are as they were."""
        return self.tell_outrankers() if self.tell_outrankers else None

    def ahead(self) -> Ints:
        """Count for each victim the starts that may have its room, always the first ones."""
        if self.turns is not None or not len(self.victims):
            return self.victims if self.turns is None else self.turns
        place_of = np.empty_like(self.ranked)
        place_of[self.ranked] = np.arange(len(self.ranked))
        return np.searchsorted(place_of[self.starts], place_of[self.victims])
