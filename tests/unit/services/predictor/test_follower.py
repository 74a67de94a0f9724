"""Several predictors on one store: one takes observations, the others follow."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from tests.end_to_end.commands import COTENANT
from tests.support.etcd_server import EtcdServer
from tests.unit.services.predictor.conftest import QUICK, FickleStore, Served, query, run, serving, window

from cotenant.core.model.estimate import Candidate, Observation, Query
from cotenant.policies.history import History
from cotenant.policies.lightgbm_duration.policy import LightgbmDuration
from cotenant.rpc.channel import connect
from cotenant.services.predictor.models.model_store import ModelFollower, ModelStore, Persistent
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Store

READS = replace(QUICK, follow="10.0.0.5:7072")
SECONDS_MAX = 60.0


async def until(holds: Callable[[], object]) -> None:
    """Yield to other tasks until a condition holds."""
    async with asyncio.timeout(SECONDS_MAX):
        while not holds():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.005)


async def knows(predictor: Served) -> None:
    """Wait until a predictor has observed three runs of the class."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (await predictor.estimate(query()))[0].predictable:  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0.02)


RUNS = [run(f"j{seconds}", seconds=seconds) for seconds in (90, 100, 110)]


async def test_followers_answer_from_the_leaders_models_and_only_the_leader_takes_observations() -> None:
    store = MemoryStore()
    async with serving(store) as observes, serving(store, READS) as reads:
        await observes.until(serving=True)
        await reads.until(serving=True)
        await observes.observe(*RUNS)
        await knows(reads)
        assert (await reads.estimate(query()))[0] == (await observes.estimate(query()))[0]
        with pytest.raises(grpc.aio.AioRpcError, match=r"read-only.*10\.0\.0\.5:7072") as refused:
            await reads.observe(window())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_follower_writes_nothing() -> None:
    store = FickleStore()
    async with serving(store, READS) as reads:
        await reads.until(serving=True)
        await reads.estimate(query())
    assert store.transactions == []


def tells(reads: History, asked: list[Query], wanted: list[bool]) -> bool:
    return [reads.estimate(one).predictable for one in asked] == wanted


async def both(store: Store, writes: Persistent, reads: Persistent) -> tuple[ModelStore, ModelFollower]:
    model_store = ModelStore(store, {"p": writes}, lambda ready: None)
    follower = ModelFollower(store, {"p": reads}, lambda ready: None)
    await model_store.restore()
    await follower.restore()
    return model_store, follower


async def test_dropped_records_are_dropped_by_followers() -> None:
    store = MemoryStore()
    writes, reads = History(History.Options(kinds_max=1)), History()
    model_store, follower = (
        ModelStore(store, {"h": writes}, lambda ready: None),
        ModelFollower(store, {"h": reads}, lambda ready: None),
    )
    await model_store.restore()
    await follower.restore()
    following = asyncio.create_task(follower.follow())
    asked = [Query("ann", model, "", 1000, 1) for model in ("a", "b")]
    try:
        for model in ("a", "b"):
            for seconds in (90.0, 100.0, 110.0):
                writes.observe(
                    Observation("ann", model, "", 1000, 1, Candidate(4), run_seconds=seconds, succeeded=True)
                )
            await model_store.save()
            wanted = [one.model == model for one in asked]
            await until(partial(tells, reads, asked, wanted))
    finally:
        following.cancel()


def ended(number: int) -> Observation:
    model, seconds = ("short", 60.0) if number % 2 else ("long", 3600.0)
    took = seconds + number % 5
    return Observation("ann", model, "", 1000, 1, Candidate(4), run_seconds=took, succeeded=True)


async def test_followers_track_a_growing_model() -> None:
    store = MemoryStore()
    options = LightgbmDuration.Options(train_min=40)
    writes, reads = LightgbmDuration(options), LightgbmDuration(options)
    model_store, follower = (
        ModelStore(store, {"d": writes}, lambda ready: None),
        ModelFollower(store, {"d": reads}, lambda ready: None),
    )
    await model_store.restore()
    await follower.restore()
    following = asyncio.create_task(follower.follow())
    asked = [Query("ann", model, "", 1000, 1) for model in ("short", "long")]
    try:
        for number in range(300):
            writes.observe(ended(number))
            if number % 100 == 99:
                await model_store.save()
        training_task = writes.training_task()
        assert training_task
        writes.adopt(training_task.train())
        while await model_store.save():
            pass
        await until(lambda: reads.model is not None)
        await until(lambda: [reads.estimate(one) for one in asked] == [writes.estimate(one) for one in asked])
    finally:
        following.cancel()


@asynccontextmanager
async def process(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A predictor process as an operator starts it; yields it and its address."""
    environment = {
        "COTENANT_TOKEN": "secret",
        "COTENANT_STATE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        "PATH": "/usr/bin",
    }
    started = await asyncio.create_subprocess_exec(
        *(COTENANT, "serve", "predictor", "--listen", "127.0.0.1:0", *flags),
        env=environment,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert started.stderr
        async with asyncio.timeout(30):
            while "serves at" not in (line := (await started.stderr.readline()).decode()):
                assert line, "it ended before it served"
        yield started, line.rpartition(" ")[2].strip()
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_a_follower_process_catches_up_within_a_second_and_survives_the_leader(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    store = f"etcd://{etcd.endpoint}"
    async with process(tmp_path, "--store", store) as (first, at), connect(at, "secret") as channel:
        observes = Served(channel)
        async with (
            process(tmp_path, "--store", store, "--follow", at) as (_, beside),
            connect(beside, "secret") as other,
        ):
            reads = Served(other)
            await observes.until(serving=True)
            await reads.until(serving=True)
            await observes.observe(*RUNS)
            await knows(reads)
            first.send_signal(signal.SIGKILL)
            await first.wait()
            assert (await reads.estimate(query()))[0].predictable
