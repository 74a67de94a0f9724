"""Several predictors on one store: one observes, the others read what it keeps."""

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
from cotenant.services.predictor.models.model_store import Follower, Keeper, Kept
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Store

READS = replace(QUICK, follow="10.0.0.5:7072")
SECONDS_MAX = 10.0


async def until(holds: Callable[[], object]) -> None:
    """Let others run until something holds."""
    async with asyncio.timeout(SECONDS_MAX):
        while not holds():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.005)


async def knows(predictor: Served) -> None:
    """Return once a predictor has heard of three runs of the kind."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (await predictor.estimate(query()))[0].predictable:  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0.02)


RUNS = [run(f"j{seconds}", seconds=seconds) for seconds in (90, 100, 110)]


async def test_what_one_learns_the_other_tells_and_only_one_takes_observations() -> None:
    store = MemoryStore()
    async with serving(store) as observes, serving(store, READS) as reads:
        await observes.until(serving=True)
        await reads.until(serving=True)
        await observes.observe(*RUNS)
        await knows(reads)
        assert (await reads.estimate(query()))[0] == (await observes.estimate(query()))[0]
        with pytest.raises(grpc.aio.AioRpcError, match=r"only reads.*10\.0\.0\.5:7072") as refused:
            await reads.observe(window())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_replica_that_reads_writes_nothing() -> None:
    store = FickleStore()
    async with serving(store, READS) as reads:
        await reads.until(serving=True)
        await reads.estimate(query())
    assert store.transactions == []


def tells(reads: History, asked: list[Query], wanted: list[bool]) -> bool:
    return [reads.estimate(one).predictable for one in asked] == wanted


async def both(store: Store, writes: Kept, reads: Kept) -> tuple[Keeper, Follower]:
    keeper = Keeper(store, {"p": writes}, lambda ready: None)
    follower = Follower(store, {"p": reads}, lambda ready: None)
    await keeper.restore()
    await follower.restore()
    return keeper, follower


async def test_what_is_forgotten_there_is_forgotten_here() -> None:
    store = MemoryStore()
    writes, reads = History(History.Options(kinds_max=1)), History()
    keeper, follower = (
        Keeper(store, {"h": writes}, lambda ready: None),
        Follower(store, {"h": reads}, lambda ready: None),
    )
    await keeper.restore()
    await follower.restore()
    following = asyncio.create_task(follower.follow())
    asked = [Query("ann", model, "", 1000, 1) for model in ("a", "b")]
    try:
        for model in ("a", "b"):
            for seconds in (90.0, 100.0, 110.0):
                writes.observe(
                    Observation("ann", model, "", 1000, 1, Candidate(4), run_seconds=seconds, succeeded=True)
                )
            await keeper.keep()
            wanted = [one.model == model for one in asked]
            await until(partial(tells, reads, asked, wanted))
    finally:
        following.cancel()


def ended(number: int) -> Observation:
    model, seconds = ("short", 60.0) if number % 2 else ("long", 3600.0)
    took = seconds + number % 5
    return Observation("ann", model, "", 1000, 1, Candidate(4), run_seconds=took, succeeded=True)


async def test_a_model_and_the_ends_it_stands_on_are_followed_as_they_grow() -> None:
    store = MemoryStore()
    options = LightgbmDuration.Options(train_min=40)
    writes, reads = LightgbmDuration(options), LightgbmDuration(options)
    keeper, follower = (
        Keeper(store, {"d": writes}, lambda ready: None),
        Follower(store, {"d": reads}, lambda ready: None),
    )
    await keeper.restore()
    await follower.restore()
    following = asyncio.create_task(follower.follow())
    asked = [Query("ann", model, "", 1000, 1) for model in ("short", "long")]
    try:
        for number in range(300):
            writes.observe(ended(number))
            if number % 100 == 99:
                await keeper.keep()
        lesson = writes.lesson()
        assert lesson
        writes.adopt(lesson.train())
        while await keeper.keep():
            pass
        await until(lambda: reads.model is not None)
        await until(lambda: [reads.estimate(one) for one in asked] == [writes.estimate(one) for one in asked])
    finally:
        following.cancel()


@asynccontextmanager
async def process(tmp_path: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A predictor as an operator starts it; yields it and where it serves."""
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


async def test_one_process_learns_the_other_tells_it_within_a_second_and_goes_on_when_the_first_is_killed(
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
