"""Keeps a job with a time limit off nodes that are available for less time, such as those in another system's jobs.

The limit is rounded up to a step of a geometric series, so that jobs with all kinds of limits are few equivalence
classes; a node's remaining time is exact. A job without a limit may start on any node, and is requeued when that ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cotenant.core.capacity.ledger import Ledger, Offer
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.refusal import Refusal, plural
from cotenant.core.placement.constraint import Constraint, Lacking, Marks

NUMBER = "servers_ending_too_soon"
REMEDY = "a server is added that is available for longer, or the job has a shorter time limit"
STEP = 1.25
SECONDS_MIN = 60.0


@dataclass(frozen=True)
class AvailableLongEnough(Constraint):
    """Keeps a gang on the nodes that are available for some time.

    >>> import numpy as np
    >>> from cotenant.core.model.node import NodeShape
    >>> ledger = Ledger([NodeShape(gpus=8, cores=8), NodeShape(gpus=8, cores=8)])
    >>> AvailableLongEnough(3600.0).usable(ledger) is None
    True
    >>> ledger.seconds_left = np.array([np.inf, 600.0])
    >>> AvailableLongEnough(3600.0).usable(ledger).tolist(), AvailableLongEnough(300.0).usable(ledger)
    ([True, False], None)
    """

    seconds: float

    @classmethod
    def of(cls, spec: JobSpec) -> AvailableLongEnough | None:
        """Return the constraint of a job; None if it has no time limit.

        >>> [AvailableLongEnough.of(JobSpec(time_limit_seconds=limit)).seconds for limit in (60.0, 61.0, 75.0)]
        [60.0, 75.0, 75.0]
        """
        limit = spec.time_limit_seconds
        if limit is None:
            return None
        steps = math.ceil(math.log(max(1.0, limit / SECONDS_MIN), STEP) - 1e-9)
        return cls(SECONDS_MIN * STEP**steps)

    def usable(self, ledger: Ledger) -> Marks | None:
        """Return the nodes that are available for long enough; None: all."""
        if ledger.seconds_left is None:
            return None
        enough = ledger.seconds_left >= self.seconds
        return None if enough.all() else enough

    def is_met(self, offer: Offer, ledger: Ledger) -> bool:
        """Return whether all places are on nodes that are available for long enough."""
        left = ledger.seconds_left
        return left is None or all(left[share.node] >= self.seconds for share in offer)

    def lacking(self, able: Marks, ledger: Ledger, *, empty: bool = False) -> Lacking | None:
        """Return how many nodes could hold a replica if they were available for longer, if no other could."""
        usable = self.usable(ledger)
        if usable is None or (able & usable).any() or not able.any():
            return None
        count = int(able.sum())
        verb = "ends" if count == 1 else "end"
        detail = f"has a time limit; {plural(count, 'server')} with room {verb} before it would be over"
        return Lacking(detail, REMEDY, {NUMBER: float(count)})

    def explain(self, refusal: Refusal, gang: Gang, ledger: Ledger) -> Refusal:
        """Return a refusal that says how many nodes end too soon."""
        usable = self.usable(ledger)
        if usable is None or NUMBER in refusal.numbers:
            return refusal
        count = int((~usable).sum())
        verb = "ends" if count == 1 else "end"
        detail = f"{refusal.detail}; {plural(count, 'server')} {verb} before its time limit"
        return replace(refusal, detail=detail, numbers={**refusal.numbers, NUMBER: float(count)})
