"""What a job waits for of other jobs: that they have ended, or succeeded. Pure.

What cannot come true any more ends the wait too. Slurm leaves such a job in its queue as `DependencyNeverSatisfied`
until somebody cancels it, unless told to `kill_invalid_depend`; Airflow ends it at once as `upstream_failed` and Argo
as `Omitted`. Here it is cancelled at once, with the reason: a job that never ends is one that others wait for in vain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    """What is waited for."""

    AFTER = "after"  # its end, however
    AFTER_OK = "after_ok"  # its success


class Verdict(StrEnum):
    """What has become of a condition."""

    MET = "met"
    OPEN = "open"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Dependency:
    """A job, or a whole array of them, that has to come first. In a job file it may be a name."""

    job_id: str
    condition: Condition = Condition.AFTER_OK


def verdict(condition: Condition, *, left: int, failed: int) -> Verdict:
    """Judge a condition on jobs of which so many have not ended, and so many ended without success.

    >>> [verdict(condition, left=3, failed=1).value for condition in Condition]
    ['open', 'never']
    """
    if condition is Condition.AFTER_OK and failed:
        return Verdict.NEVER
    return Verdict.OPEN if left else Verdict.MET


def in_order(before: Mapping[int, Sequence[int]]) -> list[int]:
    """Order things so that each comes after those that must come before it; else they keep their order.

    >>> in_order({0: [2], 1: [], 2: [1]})
    [1, 2, 0]

    Raises:
        Circle: some come before themselves.
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
                raise Circle(path[path.index(following) :])
            else:
                path.append(following)
                on_path[following] = None
    return list(done)


class Circle(Exception):
    """Things that come before themselves: each waits for the next, the last for the first."""

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(f"{len(members)} wait for each other")
        self.members = tuple(members)
