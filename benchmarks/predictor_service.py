"""The predictor as a separate process, with 100,000 finished jobs in its store.

Latency of calls while it restores, duration of training during calls, latency of estimates during training, and memory.
Training runs in a separate process whose memory is not counted.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402 - the root of the checkout has to be on the path first
from benchmarks import harness  # noqa: E402 - likewise
from benchmarks.predictor import JOBS, questions  # noqa: E402 - likewise
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402 - likewise

from cotenant.core.model.estimate import Candidate, Observation, Submission  # noqa: E402 - likewise
from cotenant.policies.lightgbm_duration.policy import HISTORY, LightgbmDuration  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.services.predictor.api.server import SERVICE  # noqa: E402 - likewise
from cotenant.store.port import Put, Store  # noqa: E402 - likewise
from cotenant.store.sqlite import SqliteStore  # noqa: E402 - likewise
from cotenant.v1 import predictor_service_pb2 as pb  # noqa: E402 - likewise
from cotenant.v1 import predictor_service_pb2_grpc as pb_grpc  # noqa: E402 - likewise

if TYPE_CHECKING:
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub

ENDS, ENDS_QUICK = 100_000, 10_000
RECORDS = 100  # in one transaction
COTENANT = str(Path(sys.executable).with_name("cotenant"))


def trained_model(ends: int) -> LightgbmDuration:
    """Return a model that has observed `ends` finished jobs of a thousand kinds."""
    durations = LightgbmDuration()
    for number in range(ends):
        kind, begin = number % JOBS, 1_000_000.0 + 100 * number
        seconds = 60 + 10 * kind * (0.8 + 0.4 * (number * 7919 % 1000) / 1000)
        durations.observe(
            Observation(
                "default",
                f"model-{kind}",
                "",
                2000,
                2,
                Candidate(4, 1000),
                run_seconds=seconds,
                succeeded=True,
                submission=Submission(f"user-{kind % 50}", begin, "training"),
                seen_seconds=begin + seconds,
            )
        )
    return durations


async def fill(store: Store, ends: int) -> None:
    """Write its records into a store as the service would."""
    records = trained_model(ends).dump()
    keys = [(f"predictor/lightgbm-duration/{name}", value) for name, value in records.items()]
    past = [(name, value) for name, value in records.items() if name.startswith(HISTORY)]
    keys += [(f"predictor/history/{name.removeprefix(HISTORY)}", value) for name, value in past]
    for begin in range(0, len(keys), RECORDS):
        await store.transact((), [Put(key, value) for key, value in keys[begin : begin + RECORDS]])


async def until_restored(stub: PredictorServiceAsyncStub, health: health_pb2_grpc.HealthStub) -> tuple[float, float]:
    """Poll until the predictor has restored; return the seconds and the longest wait in ms."""
    began, longest, serving = time.perf_counter(), 0.0, False
    while not serving:
        begin = time.perf_counter()
        await stub.Estimate(pb.EstimateRequest(queries=questions(1).queries))
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        longest = max(longest, time.perf_counter() - begin)
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.sleep(0.01)
    return time.perf_counter() - began, longest * 1000


async def _measure(quick: bool) -> Sequence[harness.Row]:
    ends = ENDS_QUICK if quick else ENDS
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        store = SqliteStore(home / "store.sqlite")
        await fill(store, ends)
        await store.close()
        (home / "settings.toml").write_text('predictor = "xiao-piecewise,lightgbm-duration,history"\n')
        started = await asyncio.create_subprocess_exec(
            *(COTENANT, "serve", "predictor", "--listen", "127.0.0.1:0", "--store", f"sqlite:{home / 'store.sqlite'}"),
            *("--config", str(home / "settings.toml")),
            env={"COTENANT_TOKEN": "secret", "COTENANT_STATE_DIR": directory, "HOME": directory, "PATH": "/usr/bin"},
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            return await _measure_process(started, ends)
        finally:
            started.kill()
            await started.wait()


async def _line_with(stream: asyncio.StreamReader | None, words: str) -> str:
    """Return the next line of a stream that contains some words."""
    assert stream
    while words not in (line := (await stream.readline()).decode()):
        if not line:
            raise RuntimeError("the predictor exited early")
    return line


async def _measure_process(started: asyncio.subprocess.Process, ends: int) -> Sequence[harness.Row]:
    address = (await _line_with(started.stderr, "serves at")).split()[-1]
    process = psutil.Process(started.pid)
    async with connect(address, "secret") as channel:
        stub = cast("PredictorServiceAsyncStub", pb_grpc.PredictorServiceStub(channel))
        restoring_s, longest_ms = await until_restored(stub, health_pb2_grpc.HealthStub(channel))
        restored_mib = process.memory_info().rss / 2**20
        asked = questions(JOBS)
        for query in asked.queries:
            query.spec.steps_total = 0
        trained = asyncio.create_task(_line_with(started.stderr, "trained"))
        while not process.children():
            if trained.done():
                raise RuntimeError("training ended before it could be observed")
            await asyncio.sleep(0.01)
        begin, busy = time.perf_counter(), []
        while not trained.done():
            busy.append(await _ms(stub, asked))
        training_s = time.perf_counter() - begin
        rest = [await _ms(stub, asked) for _ in range(50)]
        resting, held = harness.percentile(rest, 99), harness.percentile(busy, 99)
        rss_mib = process.memory_info().rss / 2**20
    name = f"{ends:,} finished jobs"
    return [
        harness.Row(
            f"{name}: a call while it restores, the longest",
            longest_ms,
            "ms",
            restoring_s * 1000,
            "restoring",
            "at most 100 ms",
            longest_ms <= 100,
        ),
        harness.Row(f"{name}: learning, beside estimates", training_s, "s", None, "", "at most 60 s", training_s <= 60),
        harness.Row(
            f"{name}: Estimate of {JOBS:,} jobs while learning, p99",
            held,
            "ms",
            resting,
            "at rest",
            "at most twice",
            held <= 2 * resting,
        ),
        harness.Row(
            f"{name}: memory", rss_mib, "MiB", restored_mib, "before the model", "at most 400 MiB", rss_mib <= 400
        ),
    ]


async def _ms(stub: PredictorServiceAsyncStub, asked: pb.EstimateRequest) -> float:
    begin = time.perf_counter()
    await stub.Estimate(asked)
    return (time.perf_counter() - begin) * 1000


if __name__ == "__main__":
    harness.main(lambda quick: asyncio.run(_measure(quick)), __doc__ or "")
