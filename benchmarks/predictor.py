"""How long the predictor takes for a scheduling cycle's questions: 1,000 jobs, 8 candidate allocations each.

Once nothing is known of any job, once a rate is known for every candidate of each; inside the service, and as a whole
call, whose client shares the process. Beside each stands an empty call to the same server.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.core.chain import Chain  # noqa: E402 - likewise
from cotenant.policies.history import History  # noqa: E402 - likewise
from cotenant.policies.lightgbm_duration import LightgbmDuration  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.rpc.server import Server  # noqa: E402 - likewise
from cotenant.services.predictor.failures import Failures  # noqa: E402 - likewise
from cotenant.services.predictor.keeper import Keeper  # noqa: E402 - likewise
from cotenant.services.predictor.profiling import Measured  # noqa: E402 - likewise
from cotenant.services.predictor.server import SERVICE, PredictorServicer  # noqa: E402 - likewise
from cotenant.services.predictor.training import learnt  # noqa: E402 - likewise
from cotenant.store.memory import MemoryStore  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, predictor_service_pb2_grpc, resources_pb2  # noqa: E402 - likewise
from cotenant.v1 import predictor_service_pb2 as pb  # noqa: E402 - likewise

if TYPE_CHECKING:
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub

JOBS = 1000
CORES = (1, 2, 3, 4, 6, 8, 12, 16)
WINDOWS = 3  # seen of each job at each core count
BATCH = 8000
BAR_MS = 50.0
ENDS = 20_000  # jobs that models of run time are learnt from


def spec(number: int) -> job_pb2.JobSpec:
    """Each job is of a kind of its own, so that nothing is looked up twice."""
    worker = job_pb2.Role(name="worker", replicas=2, resources=resources_pb2.ResourceRequest(gpu_milli=1000, cores=4))
    return job_pb2.JobSpec(model=f"model-{number}", steps_total=10_000, roles=[worker])


def questions() -> pb.EstimateRequest:
    """What a cycle asks."""
    candidates = [pb.CandidateAllocation(cores=cores, gpu_milli=1000) for cores in CORES]
    return pb.EstimateRequest(
        queries=[
            pb.EstimateQuery(job_id=f"job-{number}", spec=spec(number), candidates=candidates) for number in range(JOBS)
        ]
    )


def observations() -> list[pb.Observation]:
    """A few windows of each job at each core count."""
    return [
        pb.Observation(
            job_id=f"job-{number}",
            number=1,
            spec=spec(number),
            allocation=pb.CandidateAllocation(cores=cores, gpu_milli=1000),
            rate_per_second=cores**0.5,
            window=Duration(seconds=10),
            time=Timestamp(seconds=1_000_000 + 100 * window + cores),
        )
        for number in range(JOBS)
        for window in range(WINDOWS)
        for cores in CORES
    ]


async def median_ms(call: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Time a call a number of times."""
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        await call()
        took.append((time.perf_counter() - begin) * 1000)
    return statistics.median(took)


async def _measure(quick: bool) -> Sequence[harness.Row]:
    rounds = 10 if quick else 100
    measured = Measured()
    chain = Chain([History()])
    keeper = Keeper(MemoryStore(), chain.predictors, lambda ready: None)
    await keeper.restore()
    servicer = PredictorServicer(chain, measured, keeper, Failures())
    server = Server()
    server.add(predictor_service_pb2_grpc.add_PredictorServiceServicer_to_server, servicer, SERVICE)
    port = await server.start()
    rows: list[harness.Row] = []
    async with connect(f"127.0.0.1:{port}") as channel:
        stub = cast("PredictorServiceAsyncStub", predictor_service_pb2_grpc.PredictorServiceStub(channel))
        empty_ms = await median_ms(lambda: stub.Estimate(pb.EstimateRequest()), rounds)
        asked, seen = questions(), observations()
        for what in ("nothing known", "all rates known"):
            name = f"{JOBS:,} jobs × {len(CORES)} candidates, {what}"
            inside_ms = await median_ms(lambda: servicer.Estimate(asked, None), rounds)
            bar = f"below {BAR_MS:g} ms"
            rows.append(
                harness.Row(f"{name}: inside", inside_ms, "ms", empty_ms, "empty call", bar, inside_ms < BAR_MS)
            )
            whole_ms = await median_ms(lambda: stub.Estimate(asked), rounds)
            rows.append(harness.Row(f"{name}: whole call", whole_ms, "ms", empty_ms, "empty call"))
            for begin in range(0, len(seen), BATCH):
                await stub.Observe(pb.ObserveRequest(observations=seen[begin : begin + BATCH]))
            seen = []
    await server.stop(0)
    return rows


def ends() -> list[pb.Observation]:
    """Jobs of each kind that has been asked about, which took as long as their kind does."""
    ended = []
    for number in range(ENDS):
        kind, begin = number % JOBS, 1_000_000 + 1_000 * number
        seconds = int(60 + 10 * kind * (0.8 + 0.4 * (number * 7919 % 1000) / 1000))
        ended.append(
            pb.Observation(
                job_id=f"ended-{number}",
                number=1,
                spec=job_pb2.JobSpec(model=f"model-{kind}", roles=spec(kind).roles),
                submitter=f"user-{kind % 50}",
                submit_time=Timestamp(seconds=begin),
                run_time=Duration(seconds=seconds),
                time=Timestamp(seconds=begin + seconds),
                succeeded=True,
            )
        )
    return ended


async def took_ms(call: Callable[[], Awaitable[object]], rounds: int) -> list[float]:
    """Time a call a number of times, leaving others their turn in between."""
    took = []
    for _ in range(rounds):
        begin = time.perf_counter()
        await call()
        took.append((time.perf_counter() - begin) * 1000)
        await asyncio.sleep(0)
    return took


async def _measure_durations(quick: bool) -> Sequence[harness.Row]:
    """The same questions with models of run time before `history`, at rest and while one is being learnt."""
    rounds = 20 if quick else 200
    durations, servicers = LightgbmDuration(), []
    for chain in (Chain([History()]), Chain([durations, History()])):
        keeper = Keeper(MemoryStore(), chain.predictors, lambda ready: None)
        await keeper.restore()
        servicers.append(PredictorServicer(chain, Measured(), keeper, Failures()))
        for begin in range(0, ENDS, BATCH):
            await servicers[-1].Observe(pb.ObserveRequest(observations=ends()[begin : begin + BATCH]), None)
    lesson = durations.lesson()
    assert lesson
    durations.adopt(await learnt(lesson))
    plain, asked = questions(), questions()
    for query in asked.queries:
        query.spec.steps_total = 0  # or rates would be asked for first
        query.submitter, query.submit_time.seconds = "user-1", 9_000_000
    reference = await took_ms(lambda: servicers[0].Estimate(plain, None), rounds)
    resting = await took_ms(lambda: servicers[1].Estimate(asked, None), rounds)
    training = asyncio.create_task(learnt(lesson))
    busy = await took_ms(lambda: servicers[1].Estimate(asked, None), rounds)
    await training
    name, p99 = f"{JOBS:,} jobs × {len(CORES)} candidates, lightgbm-duration", harness.percentile(resting, 99)
    beside, held = harness.percentile(reference, 99), harness.percentile(busy, 99)
    bar = f"below {BAR_MS:g} ms"
    return [
        harness.Row(f"{name}: p99 inside", p99, "ms", beside, "history alone", bar, p99 < BAR_MS),
        harness.Row(
            f"{name}: median inside", statistics.median(resting), "ms", statistics.median(reference), "history"
        ),
        harness.Row(f"{name}: p99 while training", held, "ms", p99, "at rest", "at most twice", held <= 2 * p99),
    ]


async def _measure_all(quick: bool) -> Sequence[harness.Row]:
    return [*await _measure(quick), *await _measure_durations(quick)]


if __name__ == "__main__":
    harness.main(lambda quick: asyncio.run(_measure_all(quick)), __doc__ or "")
