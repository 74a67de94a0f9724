"""Changing the cores of running jobs: what an allocator sees of one, and what it may answer.

The live mesh and the simulator ask alike: at most every `interval_seconds`, and when something new is known of a job.
Cores change in lock-step on all nodes of a gang. What the allocator knows of a job's speed on other core counts comes
in `paces`, which holds the rates of its kind: its own, and those of the same (user, model, GPUs) before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cotenant.core.curves import Point
from cotenant.core.estimates import Estimate
from cotenant.core.jobs import JobSpec
from cotenant.core.policy import Sizing


@dataclass(frozen=True, slots=True)
class Running:
    """A running job whose cores may change.

    `cores` are held per replica by role, in the roles' order; `spare` could be given to each replica of each role
    beside them, for they are free on every node that it runs on. `points` are rates measured at core counts per replica
    of the first role with GPUs (else of the first role), in the present attempt, the latest for each count; `rate` is
    that of the last window and `settled_seconds` the time since its cores last changed.
    """

    job_id: str
    spec: JobSpec
    estimate: Estimate
    cores: tuple[int, ...]
    spare: tuple[int, ...]
    points: tuple[Point, ...] = ()
    rate_per_second: float | None = None
    settled_seconds: float = 0.0
    node_share: tuple[int, ...] = ()  # by role: a replica's GPUs' share of its node's cores
    lent: tuple[int, ...] = ()  # by role: of `cores`, those that were spare and can be asked back at once


@runtime_checkable
class Resizes(Protocol):
    """A CPU allocator that changes its mind while a job runs."""

    interval_seconds: float

    def resize(self, running: Running, now: float) -> Sizing | None:
        """Say what a running job should hold; None: what it holds. Never more than `cores` + `spare`."""
