"""Which phases of a job may follow each other in the store."""

from __future__ import annotations

from collections.abc import Mapping

from cotenant.core.model.lifecycle import HOLDING, JOB_NEXT, Phase


def reachable() -> Mapping[Phase, frozenset[Phase]]:
    """Return which stored phases may follow each other in one commit; phases that hold resources are not stored."""
    follows: dict[Phase, set[Phase]] = {phase: set() for phase in Phase}
    for (phase, _), after in JOB_NEXT.items():
        follows[phase].add(after)
    reached = {}
    for phase in Phase:
        found, unseen = {phase}, list(follows[phase])
        while unseen:
            after = unseen.pop()
            if after not in found:
                found.add(after)
                unseen += follows[after] if after in HOLDING else ()
        reached[phase] = frozenset(found)
    return reached


REACHABLE = reachable()
