"""Learned models in the store: the records of predictors, measured rates, job classes and allocators.

A service starts even if it finds such a record damaged: it sets aside what it cannot decode, and whatever it has loaded
can be queried, updated, written and read again.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tests.verification.fuzz.targets import Prepared, Target

from cotenant import plugins
from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query, Submission
from cotenant.core.model.job import JobKind, JobSpec, Qos, Request, Role
from cotenant.core.model.loss_goal import LossGoal
from cotenant.core.policy.protocols import Follows, Predictor, Trains
from cotenant.core.prediction.chain import Chain
from cotenant.core.sizing.rate_history import RateHistories
from cotenant.core.sizing.rate_history import job_class_of as tracked
from cotenant.policies.lightgbm_duration import runtime_model
from cotenant.policies.lightgbm_duration.blending import Blend
from cotenant.policies.lightgbm_duration.policy import LightgbmDuration
from cotenant.services.predictor.api.profile_view import profile_of
from cotenant.services.predictor.api.server import GROUP
from cotenant.services.predictor.codec import JobClass
from cotenant.services.predictor.models.job_classes import JobClasses
from cotenant.services.predictor.models.model_store import ASIDE, PREFIX, ModelFollower, ModelStore, Persistent
from cotenant.services.predictor.profiling.profile_store import ProfileStore
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put

KIND: JobClass = ("ann", "bert", "nightly", 2000, 2)
CANDIDATES = (Candidate(0), Candidate(2, 1000), Candidate(8, 1000, 2, "V100"), Candidate(4, 1000, 1, "", 2, 1, 2))
GOAL = LossGoal(target=0.6)
COMPRESSED = b"\x78"  # the start of zlib streams
TREES = b'"trees"'


def targets() -> Iterator[Target]:
    """Yield the targets."""
    for plugin in plugins.discover(GROUP):
        yield Target(f"model of {plugin.name}", _of(plugin.make, plugin.name))
    yield Target("measured rates", _of(ProfileStore, "measured"))
    yield Target("job classes", _of(JobClasses, "kinds"))
    yield Target("allocator state", _tracks)
    yield Target("blend weights", _blends, (ValueError,))


def _observations() -> Iterator[Observation]:
    """Yield observations that every kind of predictor learns something from."""
    asked = Submission("ann", 5.0, JobKind.TRAINING.value, (Role("worker", 2, Request(1000, 4)),), 5000)
    for number in range(48):
        cores = 1 + number % 6
        stored = replace(asked, submitted_seconds=100.0 * number)
        seen = Observation(*KIND, Candidate(cores, 1000, 1 + number % 2, "V100"), 2.0 * min(cores, 4), 10.0, job_id="j")
        yield replace(seen, step=20 * number, loss=2 / (1 + number / 50) + 0.5, loss_goal=GOAL, submission=stored)
        team = replace(seen.allocation, workers=1 + number % 3, servers=1, server_cores=2)
        yield replace(seen, allocation=team, rate_per_second=1.0 + number % 3)
        yield replace(seen, rate_per_second=None, batch_size=1 + number, batch_seconds=0.01 + number / 1000)
        over = replace(seen, rate_per_second=None, run_seconds=60.0 + number, succeeded=True, job_id=f"j{number}")
        yield replace(over, submission=stored, seen_seconds=100.0 * number + 90)


FEW = tuple(_observations())[40:46]


def _queries() -> Sequence[Query]:
    asked = Query(*KIND, candidates=CANDIDATES, steps_total=5000, step=100, job_id="j", loss_goal=GOAL)
    service = replace(asked, qos=Qos(0.0, 0.5, 99.0, 3.0), steps_total=0)
    return asked, service, replace(asked, run_seconds=30.0, attained_gpu_seconds=60.0, gpu_type="V100", cores=8)


@cache
def _records(name: str) -> Mapping[str, bytes]:
    """Return the records for good observations, with a model if the predictor trains one."""
    if name in ("measured", "kinds"):
        kept: Persistent = ProfileStore() if name == "measured" else JobClasses()
        _see(kept)
        return dict(kept.dump())
    predictor = _made(name)
    for observation in _observations():
        predictor.observe(observation)
    if isinstance(predictor, Trains) and (training_task := predictor.training_task()):
        with patch.object(runtime_model, "ROUNDS", 2):  # few trees, so that the record fits into an input
            predictor.adopt(training_task.train())
    return dict(predictor.dump())


def _made(name: str) -> Predictor:
    if name == LightgbmDuration.name:
        return LightgbmDuration(LightgbmDuration.Options(train_min=40))
    made: Predictor = next(plugin for plugin in plugins.discover(GROUP) if plugin.name == name).make()
    return made


def _see(kept: Persistent, *, few: bool = False) -> None:
    """Feed measurements to learners that are not predictors."""
    for number, observation in enumerate(FEW if few else _observations()):
        if isinstance(kept, ProfileStore):
            kept.record(KIND, observation)
        elif isinstance(kept, JobClasses):
            kept.record(KIND, 100.0 * number)


def _of(make: Callable[[], Persistent], name: str) -> Callable[[Path], Prepared]:
    def prepare(directory: Path) -> Prepared:
        loop, good = asyncio.new_event_loop(), _records(name)
        keys = sorted(good)
        seeds = [_plain(good[key]) for key in keys]

        def pack(data: bytes) -> bytes:
            """Compress what was compressed, except every fifth; a leading byte selects the record to replace."""
            place = zlib.crc32(data) % len(keys)
            if good[keys[place]].startswith(COMPRESSED) and sum(data[:64]) % 5:
                data = zlib.compress(data, 1)
            return bytes([place]) + data

        async def kept(data: bytes) -> None:
            key = keys[data[0] % len(keys)] if data else keys[0]
            if TREES in _plain(data[1:]) and not _same_trees(_plain(good[key]), _plain(data[1:])):
                return  # LightGBM trusts its text; zlib's checksum detects damage there
            await _restored(make, name, {**good, key: data[1:]}, key)

        return Prepared(lambda data: loop.run_until_complete(kept(data)), seeds, pack=pack)

    return prepare


def _plain(content: bytes) -> bytes:
    with suppress(zlib.error):
        return zlib.decompress(content)
    return content


def _same_trees(good: bytes, other: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        stored = json.loads(other)
        return not isinstance(stored, dict) or stored.get("trees") == json.loads(good).get("trees")
    return True


async def _restored(make: Callable[[], Persistent], name: str, records: Mapping[str, bytes], key: str) -> None:
    """Start with records of which one is damaged, as a service does; then query, observe, write and read again."""
    store, kept = MemoryStore(), make()
    await store.transact([], [Put(f"{PREFIX}{name}/{one}", content) for one, content in records.items()])
    model_store = ModelStore(store, {name: kept}, lambda ready: None)
    await model_store.restore()
    left = {entry.key for entry in (await store.list("")).entries}
    if {one.removeprefix(ASIDE).removeprefix(PREFIX) for one in left} != {f"{name}/{one}" for one in records}:
        raise AssertionError(f"records are lost: {sorted(left)}")
    if any(one.startswith(ASIDE) and not one.endswith(f"/{key}") for one in left):
        together = isinstance(kept, Follows)  # the parts of a model belong together
        if not together:
            raise AssertionError(f"valid records were set aside: {sorted(left)}")
    _used(name, kept)
    while await model_store.save():
        pass
    again = make()
    prefix = f"{PREFIX}{name}/"
    stored = {entry.key.removeprefix(prefix): entry.value for entry in (await store.list(prefix)).entries}
    if unread := again.restore(stored):
        raise AssertionError(f"it cannot read what it wrote: {unread}")
    follower = ModelFollower(store, {name: (follows := make())}, lambda ready: None)
    follower._apply(name, follows, records)
    if not sum(records[key][:64]) % 4:  # it is as slow as everything else
        _used(name, follows)


def _failed(predictor: Predictor, error: str) -> None:
    raise AssertionError(f"{predictor.name} failed: {error}")


def _used(name: str, kept: Persistent) -> None:
    """Query what is known, and update it."""
    if isinstance(kept, ProfileStore | JobClasses):
        measured = kept if isinstance(kept, ProfileStore) else ProfileStore()
        kinds = kept if isinstance(kept, JobClasses) else JobClasses()
        for kind, seen in [(KIND, 5.0), *kinds.of(kinds.find())]:
            profile_of(kind, seen, measured, Chain([_made("history")], _failed), _failed).SerializeToString()
            for gpu_type in ("", "V100"):
                measured.at(kind, gpu_type)
                measured.stale(kind, gpu_type)
        _see(kept, few=True)
        return
    predictor: Predictor = kept  # type: ignore[assignment]  # one of the three
    chain = Chain([predictor], _failed)
    chain.estimate_many(_queries())
    for observation in FEW:
        chain.observe(observation)
    while chain.prepare(8):
        pass
    chain.estimate_many(_queries())


def _blends(directory: Path) -> Prepared:
    """The weights with which a predictor blends its models."""
    first = Blend(3)
    for number in range(9):
        first.learn("ann", np.full((3, 3), float(number)), 2.0)

    def run(data: bytes) -> None:
        blend = Blend(3)
        blend.restore(data)
        for name in ("ann", "bob"):
            blend.of([name], np.zeros((1, 3, 3)))
            blend.learn(name, np.zeros((3, 3)), 1.0)
        Blend(3).restore(blend.dump())

    return Prepared(run, (first.dump(),))


def _tracks(directory: Path) -> Prepared:
    """What placement stores about job classes for its allocators."""
    spec = JobSpec(name="nightly", tenant="ann", model="bert", roles=(Role("worker", 2, Request(1000, 4)),))

    def shown(tracks: RateHistories) -> None:
        tracks.informed(spec, Estimate(), ("", "V100"))
        for cores in (1, 2, 3, 4, 3, 2):
            tracks.add(tracked(spec), cores, 2.0 * min(cores, 3))

    first = RateHistories()
    shown(first)
    [(key, good)] = first.dump().items()

    def run(data: bytes) -> None:
        tracks = RateHistories()
        unread = tracks.restore({key: data, "fresh": good})
        if "fresh" in unread or set(unread) - {key}:
            raise AssertionError(f"not read: {unread}")
        shown(tracks)
        again = RateHistories()
        if unread := again.restore({name: content for name, content in tracks.dump().items() if content}):
            raise AssertionError(f"it cannot read what it wrote: {unread}")
        shown(again)

    return Prepared(run, (good,))
