"""Cases: what a policy of each group is asked, in order, for the laws that hold in every group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cotenant import plugins
from cotenant.conformance import worlds
from cotenant.conformance.estimate_worlds import estimates, observations, queries, running
from cotenant.conformance.node_windows import nodes_seen, stories
from cotenant.core.capacity.ledger import Ledger
from cotenant.core.model.estimate import Estimate, Observation, Query
from cotenant.core.model.gang import Gang
from cotenant.core.model.job import JobSpec
from cotenant.core.model.job_table import JobTable
from cotenant.core.model.node import NodeShape
from cotenant.core.policy.capabilities import capability_of
from cotenant.core.policy.cluster_view import EmptyClusterView, UsesClusterView
from cotenant.core.policy.protocols import EndedJob, Learns, NodeWindow, QueuePolicy
from cotenant.core.sizing.resize import ResizableJob, Resizes

Call = tuple[str, tuple[Any, ...]]  # a method, and its arguments


@dataclass(frozen=True)
class QueueCase:
    """A queue that is ordered twice, after jobs that ended."""

    table: JobTable
    history: list[EndedJob]

    def calls(self, policy: object) -> Iterator[Call]:
        """Yield what the policy is asked."""
        if capability_of(policy, Learns):
            yield from (("learn", (ended,)) for ended in self.history)
        for now in (worlds.NOW, worlds.NOW + 30.0):
            yield "order", (self.table.jobs(now), now)


@dataclass(frozen=True)
class PlacementCase:
    """Gangs, each of which is placed in the same cluster."""

    world: worlds.World
    gangs: list[Gang]
    seed: int

    def calls(self, policy: object) -> Iterator[Call]:
        """Yield what the policy is asked."""
        if capability_of(policy, UsesClusterView):
            yield "begin_cycle", (EmptyClusterView(),)
        yield from (("place", (gang, self.world.ledger, worlds.rng(self.seed))) for gang in self.gangs)


@dataclass(frozen=True)
class AllocatorCase:
    """A job before its start, and one that runs."""

    spec: JobSpec
    estimate: Estimate
    shapes: list[NodeShape]
    running: ResizableJob

    def calls(self, policy: object) -> Iterator[Call]:
        """Yield what the policy is asked."""
        yield "size", (self.spec, self.estimate, self.shapes)
        if capability_of(policy, Resizes):
            yield "weight", (self.running,)
            yield "resize", (self.running, worlds.NOW)


@dataclass(frozen=True)
class PredictorCase:
    """Observations, and a job to estimate."""

    observations: list[Observation]
    query: Query

    def calls(self, policy: object) -> Iterator[Call]:
        """Yield what the policy is asked."""
        yield from (("observe", (one,)) for one in self.observations)
        yield "estimate", (self.query,)
        yield "dump", ()
        yield "restore", ({"unreadable": b"?"},)
        yield "estimate", (self.query,)


@dataclass(frozen=True)
class ContentionCase:
    """Windows of nodes."""

    windows: list[NodeWindow]

    def calls(self, policy: object) -> Iterator[Call]:
        """Yield what the policy is asked."""
        yield from (("judge", (window,)) for window in self.windows)


Case = QueueCase | PlacementCase | AllocatorCase | PredictorCase | ContentionCase

CASES: Mapping[str, st.SearchStrategy[Case]] = {
    "cotenant.queue_policies": st.builds(QueueCase, worlds.tables(), worlds.histories),
    "cotenant.placement_policies": st.builds(
        PlacementCase, worlds.worlds(), st.lists(worlds.gangs(), min_size=1, max_size=3), st.integers(0, 2**32)
    ),
    "cotenant.cpu_allocators": st.builds(
        AllocatorCase, worlds.specs(), estimates, st.lists(worlds.shapes(), max_size=3), running()
    ),
    "cotenant.predictors": st.builds(PredictorCase, st.lists(observations, max_size=20), queries),
    "cotenant.contention_policies": st.builds(ContentionCase, st.lists(nodes_seen, max_size=6) | stories()),
}


def answers(policy: object, case: Case) -> list[Any]:
    """Return what a policy answers to a case, in plain values; it gets copies of the arguments."""
    return [plain(getattr(policy, method)(*fresh(arguments))) for method, arguments in case.calls(policy)]


def fresh(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of arguments, which a policy may change without harm to the case.

    A generator is made for one call: to copy it would draw entropy from the system.
    """

    def copied(one: Any) -> Any:
        if isinstance(one, np.random.Generator):
            return one
        return one.copy() if isinstance(one, Ledger) else deepcopy(one)

    return tuple(copied(one) for one in arguments)


def plain(value: Any) -> Any:
    """Return a value as tuples, texts and numbers that can be compared and printed.

    >>> plain({"a": np.array([1.0, np.nan])})
    (('a', ('float64', (1.0, 'nan'))),)
    """
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if value is None or isinstance(value, int | str | bytes | Enum):
        return value
    if isinstance(value, np.ndarray):
        return str(value.dtype), plain(value.tolist())
    if isinstance(value, np.random.Generator):
        return "Generator"
    if isinstance(value, Ledger):
        return plain(worlds.picture(value))
    if is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, plain(getattr(value, field.name))) for field in fields(value))
        return type(value).__name__, *named
    if isinstance(value, Mapping):
        return tuple((plain(key), plain(value[key])) for key in sorted(value, key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(plain, value), key=repr))
    if isinstance(value, Sequence):
        return tuple(plain(one) for one in value)
    return type(value).__name__


def taught(plugin: plugins.Plugin, history: list[EndedJob]) -> QueuePolicy:
    """Make a queue policy, with few or many past jobs if it learns."""
    policy: QueuePolicy = plugin.make()
    if isinstance(policy, Learns):
        for ended in history:
            policy.learn(ended)
    return policy
