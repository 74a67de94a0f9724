"""Runs one seed in this process: its simulated world, with all sources of nondeterminism replaced."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import structlog
from tests.verification.control_plane.virtual_time import current_process, virtual_time
from tests.verification.control_plane.world import REPLICAS, SETTLE_SECONDS_MAX, World, size_of

from cotenant import fail_points, plugins
from cotenant.core.model.resources import NOTHING, Resources, added
from cotenant.core.policy.protocols import Sizing
from cotenant.core.sizing import resize as resize_module
from cotenant.core.sizing.elastic import ElasticJob
from cotenant.history.checker import RuleViolation
from cotenant.history.events import Event
from cotenant.leadership import forwarding
from cotenant.policies.proportional import Proportional
from cotenant.services.placement.api import server as placement
from cotenant.services.placement.cluster.committer import Fenced, Halted, Outdated
from cotenant.services.queue.jobs import array_recovery, job_arrays
from cotenant.store.port import StoreUnavailable

CHANGE_SHARE, CHANGES_MAX = 0.3, 4  # of questions that change a job's replicas, and changes of one job
CHUNK_MAX = 2  # jobs of an array in one transaction, so that arrays take several
INSTALLED = cache(entry_points)  # each new leader would read them from disk
EXAMINE, LOAD = plugins._examined, plugins.load
EXPECTED_ERRORS = (StoreUnavailable, Fenced, Halted, Outdated)  # errors that background work may end with

InjectFaults = Callable[[World], Awaitable[None]]


@dataclass
class Outcome:
    """The outcome of a seed."""

    seed: int
    broken: list[RuleViolation]
    failures: list[str]  # internal errors of a part, or that it did not settle
    events: list[Event] = field(default_factory=list, repr=False)
    faults: list[str] = field(default_factory=list, repr=False)
    reached: Counter[str] = field(default_factory=Counter, repr=False)  # fail points, and how often each was reached
    counted: Counter[str] = field(default_factory=Counter, repr=False)  # events by kind
    virtual_seconds: float = 0.0
    digest: str = ""  # differs if histories do; "" if it was not requested

    @property
    def wrong(self) -> list[str]:
        """Return all errors as text."""
        return [*map(str, self.broken), *self.failures]


def digest_of(events: list[Event]) -> str:
    """Return a digest of a history."""
    return hashlib.sha256("\n".join(map(repr, events)).encode()).hexdigest()[:16]


def run_seed(seed: int, inject: InjectFaults) -> Outcome:
    """Run one seed; `inject` injects faults while jobs are submitted."""
    errors: list[str] = []

    def note(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        error, process = event.get("exc_info"), current_process()
        if error and not isinstance(error if isinstance(error, BaseException) else sys.exc_info()[1], EXPECTED_ERRORS):
            where = f"{time.monotonic():.3f} {process.name if process else 'nobody'}"
            errors.append(f"{where}: {event['event']}: {_describe_error(error)}")
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[note],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    gc_was_enabled = gc.isenabled()
    gc.disable()  # the time of finalizers is not deterministic
    try:
        with virtual_time(seed) as loop:
            outcome = loop.run_until_complete(_run_world(seed, inject, errors))
            outcome.virtual_seconds = loop.time()
            return outcome
    finally:
        if gc_was_enabled:
            gc.enable()
        structlog.configure(**before)


async def _run_world(seed: int, inject: InjectFaults, errors: list[str]) -> Outcome:
    size = size_of(seed)
    world = World(seed, size)
    with (
        fail_points.armed(world.reach),
        mock.patch.object(forwarding, "forwarding_channel", lambda address: _passage(world, address)),
        mock.patch.object(plugins, "entry_points", INSTALLED),
        mock.patch.object(plugins, "_places", tuple),  # nothing is installed in between
        mock.patch.object(plugins, "_examined", _examined),
        mock.patch.object(plugins, "load", partial(_loaded, Restless(Random(f"cores {seed}")))),
        mock.patch.object(resize_module, "PATIENCE_SECONDS", Restless.interval_seconds),
        mock.patch.object(job_arrays, "CHUNK_MAX", CHUNK_MAX),
        mock.patch.object(array_recovery, "CHUNK_MAX", CHUNK_MAX),
    ):
        for names in REPLICAS.values():
            for name in names:
                world.start(name)
        for number in range(world.rng.randint(size.nodes_min, size.nodes_max)):
            world.add_node(f"n{number}")
        await asyncio.sleep(0.5 + world.rng.random())
        jobs = range(world.rng.randint(size.jobs_min, size.jobs_max))
        callers = asyncio.gather(*(world.clients.submit(number, size.submit_seconds) for number in jobs))
        world.start_watchers()
        await inject(world)
        world.heal()
        try:
            async with asyncio.timeout(SETTLE_SECONDS_MAX):
                await callers
            await world.settle()
        except TimeoutError:
            world.failures.append(f"a client was never answered: {world.clients.unanswered}")
        await world.close()
    broken = world.checked().finish(settled=not world.failures)
    counted = Counter(type(event).__name__ for event in world.events)
    return Outcome(seed, broken, [*world.failures, *errors], world.events, world.faults, world.reached, counted)


class Restless(Proportional):
    """Sizes jobs as `proportional` does, and resizes running ones at random, their cores and a few times replicas."""

    name = "restless"
    interval_seconds = resize_interval_seconds = 1.0
    warm_up_seconds = measure_seconds = 0.0

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._changes: Counter[str] = Counter()  # of replicas, by job

    def resize(self, running: resize_module.ResizableJob, now: float) -> Sizing | None:
        """Request another number of cores at times."""
        if self._rng.random() < 0.5:
            return None
        cores = self._rng.randint(1, 4)
        return Sizing((cores,), f"{cores} cores at random")

    def targets(self, jobs: Sequence[ElasticJob], room: Resources, now: float) -> Mapping[str, int]:
        """Give each job its minimum or what it has, and some of them another number that fits."""
        found = {job.job_id: job.replicas or job.range.least for job in jobs}
        for job in jobs:
            count, change = self._rng.randint(job.range.least, job.range.most), self._rng.random() < CHANGE_SHARE
            others = added([NOTHING, *(one.needs * found[one.job_id] for one in jobs if one is not job)])
            if not change or self._changes[job.job_id] >= CHANGES_MAX or not (others + job.needs * count).fits(room):
                continue
            self._changes[job.job_id] += count != found[job.job_id]
            found[job.job_id] = count
        waiting = [job for job in jobs if not job.replicas]
        while waiting and not added([NOTHING, *(job.needs * found[job.job_id] for job in jobs)]).fits(room):
            found[waiting.pop().job_id] = 0
        return found

    def weight(self, running: resize_module.ResizableJob) -> float:
        """Return the same weight for all."""
        return 1.0


def _loaded(allocator: Restless, group: str, name: str, options: Mapping[str, str]) -> Any:
    return allocator if group == placement.ALLOCATORS else LOAD(group, name, options)


@cache
def _examined_once(group: str, points: tuple[Any, ...]) -> list[plugins.Plugin]:
    return EXAMINE(group, list(points))


def _examined(group: str, points: list[Any]) -> list[plugins.Plugin]:
    return _examined_once(group, tuple(points))


def _passage(world: World, address: str) -> Any:
    source = current_process()
    assert source
    return world.network.forwarding_channel(source, address)


def _describe_error(exc_info: Any) -> str:
    """Describe an exception and its place."""
    error = exc_info if isinstance(exc_info, BaseException) else sys.exc_info()[1]
    where = traceback.extract_tb(error.__traceback__)[-9:] if error else []
    return f"{error!r} at {' < '.join(f'{Path(one.filename).name}:{one.lineno}' for one in reversed(where))}"
