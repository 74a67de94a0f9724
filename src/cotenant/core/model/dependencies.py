"""Dependencies: a job waits until other jobs have ended, succeeded, failed or started. Pure.

A dependency that can no longer be met ends the wait too. Slurm leaves such a job in its queue as
`DependencyNeverSatisfied` until a user cancels it, unless `kill_invalid_depend` is set; Airflow ends it at once as
`upstream_failed` and Argo as `Omitted`. Here it is cancelled at once, with the reason: other jobs would wait in vain
for a job that never ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Condition(StrEnum):
    """What a job waits for."""

    AFTER = "after"  # its end, in any phase
    AFTER_OK = "after_ok"  # its success
    AFTER_FAIL = "after_fail"  # its end without success
    AFTER_STARTED = "after_started"  # its first start


class Verdict(StrEnum):
    """Whether a condition is met."""

    MET = "met"
    OPEN = "open"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Dependency:
    """A job, or a whole array, that must come first. In a job file it may be given by name."""

    job_id: str
    condition: Condition = Condition.AFTER_OK


class Counts(NamedTuple):
    """Counts of the jobs that a condition is about: one job, or all of an array."""

    left: int = 0  # have not ended
    failed: int = 0  # ended without success
    unstarted: int = 0  # have not ended, and never ran so far
    never_ran: int = 0  # ended before they ever ran


def verdict(condition: Condition, counts: Counts) -> Verdict:
    """Return the verdict on a condition.

    >>> [verdict(condition, Counts(left=3, failed=1, unstarted=2)).value for condition in Condition]
    ['open', 'never', 'open', 'open']
    """
    if condition is Condition.AFTER_STARTED:
        never, waits = counts.never_ran > 0, counts.unstarted > 0
    else:
        never, waits = condition is Condition.AFTER_OK and counts.failed > 0, counts.left > 0
        never |= condition is Condition.AFTER_FAIL and not (waits or counts.failed)
    if never:
        return Verdict.NEVER
    return Verdict.OPEN if waits else Verdict.MET


def topological_order(before: Mapping[int, Sequence[int]]) -> list[int]:
    """Return items so that each follows those it depends on; otherwise their order is kept.

    >>> topological_order({0: [2], 1: [], 2: [1]})
    [1, 2, 0]

    Raises:
        DependencyCycle: an item depends on itself.
    """
    done: dict[int, None] = {}
    for first in before:
        path = [first] if first not in done else []
        on_path = dict.fromkeys(path)
        while path:
            following = next((one for one in before[path[-1]] if one not in done), None)
            if following is None:
                done[path[-1]] = None
                del on_path[path.pop()]
            elif following in on_path:
                raise DependencyCycle(path[path.index(following) :])
            else:
                path.append(following)
                on_path[following] = None
    return list(done)


class DependencyCycle(Exception):
    """A dependency cycle: each member waits for the next one, the last for the first."""

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(f"{len(members)} wait for each other")
        self.members = tuple(members)
