"""The time of the predictor for the queries of a scheduling cycle: 1,000 jobs with 8 candidate allocations each.

Measured without any knowledge and with a known rate for every candidate of each job; inside the service, and as a
whole call with the client in the same process. The reference is an empty call to the same server. Each job is of a
unique kind; the same queries repeat, as they do for waiting jobs. The cost of a first query after new observations of
every job is measured separately, and also the part of it that is prepared before the query.
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

from cotenant.core.prediction.chain import Chain  # noqa: E402 - likewise
from cotenant.internal.v1 import observation_service_pb2 as observation  # noqa: E402 - likewise
from cotenant.policies.history import History  # noqa: E402 - likewise
from cotenant.policies.lightgbm_duration.policy import LightgbmDuration  # noqa: E402 - likewise
from cotenant.policies.loss_curve import LossCurve  # noqa: E402 - likewise
from cotenant.policies.xiao_piecewise import XiaoPiecewise  # noqa: E402 - likewise
from cotenant.rpc.channel import connect  # noqa: E402 - likewise
from cotenant.rpc.server import Server  # noqa: E402 - likewise
from cotenant.services.predictor.api.server import SERVICE, PredictorServicer  # noqa: E402 - likewise
from cotenant.services.predictor.models.failure_log import FailureLog  # noqa: E402 - likewise
from cotenant.services.predictor.models.model_store import ModelStore  # noqa: E402 - likewise
from cotenant.services.predictor.models.training import train_in_process  # noqa: E402 - likewise
from cotenant.services.predictor.profiling.profile_store import ProfileStore  # noqa: E402 - likewise
from cotenant.store.memory import MemoryStore  # noqa: E402 - likewise
from cotenant.v1 import job_pb2, predictor_service_pb2_grpc, resources_pb2  # noqa: E402 - likewise
from cotenant.v1 import predictor_service_pb2 as pb  # noqa: E402 - likewise

if TYPE_CHECKING:
    from cotenant.core.policy.protocols import Predictor
    from cotenant.v1.predictor_service_pb2_grpc import PredictorServiceAsyncStub

JOBS = 1000
SIZES = (100, JOBS, 4000)
CORES = (1, 2, 3, 4, 6, 8, 12, 16)
WINDOWS = 3  # observed for each job at each core count
BATCH = 8000
BAR_MS = 50.0
ENDS = 20_000  # ended jobs that run-time models are trained on


def spec(number: int) -> job_pb2.JobSpec:
    """Return a job of a unique kind, so that no look-up is shared between jobs."""
    worker = job_pb2.Role(name="worker", replicas=2, resources=resources_pb2.ResourceRequest(gpu_milli=1000, cores=4))
    return job_pb2.JobSpec(model=f"model-{number}", steps_total=10_000, roles=[worker])


def questions(size: int = JOBS) -> pb.EstimateRequest:
    """Return the queries of a cycle."""
    candidates = [pb.CandidateAllocation(cores=cores, gpu_milli=1000) for cores in CORES]
    return pb.EstimateRequest(
        queries=[
            pb.EstimateQuery(job_id=f"job-{number}", spec=spec(number), candidates=candidates) for number in range(size)
        ]
    )


def observations(size: int = JOBS, begin: int = 1_000_000) -> list[observation.Observation]:
    """Return a few windows of each job at each core count."""
    return [
        observation.Observation(
            job_id=f"job-{number}",
            number=1,
            spec=spec(number),
            allocation=pb.CandidateAllocation(cores=cores, gpu_milli=1000),
            rate_per_second=cores**0.5,
            window=Duration(seconds=10),
            time=Timestamp(seconds=begin + 100 * window + cores),
        )
        for number in range(size)
        for window in range(WINDOWS)
        for cores in CORES
    ]


async def timed(call: Callable[[], Awaitable[object]], rounds: int) -> tuple[list[float], float]:
    """Time a call `rounds` times, yielding in between; return the wall times and the median CPU time in ms."""
    took, cost = [], []
    for _ in range(rounds):
        begin, before = time.perf_counter(), time.process_time()
        await call()
        took.append((time.perf_counter() - begin) * 1000)
        cost.append((time.process_time() - before) * 1000)
        await asyncio.sleep(0)
    return took, statistics.median(cost)


async def servicer_of(*predictors: Predictor) -> PredictorServicer:
    """Return a servicer with an empty store."""
    chain = Chain(predictors)
    model_store = ModelStore(MemoryStore(), chain.predictors, lambda ready: None)
    await model_store.restore()
    return PredictorServicer(chain, ProfileStore(), model_store, FailureLog())


async def observe(servicer: PredictorServicer, seen: Sequence[observation.Observation]) -> None:
    """Send observations to a servicer."""
    for begin in range(0, len(seen), BATCH):
        await servicer.Observe(observation.ObserveRequest(observations=seen[begin : begin + BATCH]), None)


async def _measure_calls(quick: bool) -> Sequence[harness.Row]:
    """Measure the default chain at three sizes: nothing known, all rates known, and after a new window of each job."""
    return [row for size in SIZES for row in await _measure_size(size, 20 if quick else 200)]


async def _measure_size(size: int, rounds: int) -> Sequence[harness.Row]:
    rows: list[harness.Row] = []
    servicer = await servicer_of(History())
    server = Server()
    server.add(predictor_service_pb2_grpc.add_PredictorServiceServicer_to_server, servicer, SERVICE)
    port = await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        stub = cast("PredictorServiceAsyncStub", predictor_service_pb2_grpc.PredictorServiceStub(channel))
        empty = statistics.median((await timed(lambda: stub.Estimate(pb.EstimateRequest()), rounds))[0])
        asked = questions(size)
        for what in ("nothing known", "all rates known"):
            name = f"history, {size:,} jobs × {len(CORES)} candidates, {what}"
            took, cost = await timed(lambda: servicer.Estimate(asked, None), rounds)
            p99 = harness.percentile(took, 99)
            barred = size == JOBS
            rows += [
                harness.Row(
                    f"{name}: p99",
                    p99,
                    "ms",
                    empty,
                    "empty call",
                    f"at most {BAR_MS:g} ms" if barred else "",
                    p99 <= BAR_MS if barred else None,
                ),
                harness.Row(f"{name}: processor", cost, "ms", empty, "empty call"),
            ]
            await observe(servicer, observations(size))
        begin = time.process_time()
        await servicer.Estimate(asked, None)
        rows.append(
            harness.Row(
                f"{name}, once after a window of each", (time.process_time() - begin) * 1000, "ms", cost, "again"
            )
        )
        whole, _ = await timed(lambda: stub.Estimate(asked), rounds)
        rows.append(harness.Row(f"{name}: whole call, median", statistics.median(whole), "ms", empty, "empty call"))
    await server.stop(0)
    return rows


def ends() -> list[observation.Observation]:
    """Return ended jobs of each queried kind, with run times typical of the kind."""
    ended = []
    for number in range(ENDS):
        kind, begin = number % JOBS, 1_000_000 + 1_000 * number
        seconds = int(60 + 10 * kind * (0.8 + 0.4 * (number * 7919 % 1000) / 1000))
        ended.append(
            observation.Observation(
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


async def _measure_chain(quick: bool) -> Sequence[harness.Row]:
    """Measure core curves and run-time models before `history`, at rest and during training."""
    rounds = 20 if quick else 200
    curves, durations = XiaoPiecewise(), LightgbmDuration()
    plain, full = await servicer_of(History()), await servicer_of(curves, durations, History())
    for servicer in (plain, full):
        await observe(servicer, ends())
        await observe(servicer, observations(JOBS))
    training_task = durations.training_task()
    assert training_task
    durations.adopt(await train_in_process(training_task))
    asked = questions(JOBS)
    for query in asked.queries:
        query.spec.steps_total = 0  # otherwise rates take precedence
        query.submitter, query.submit_time.seconds = "user-1", 9_000_000
    before = time.process_time()
    await full.Estimate(asked, None)
    first = (time.process_time() - before) * 1000
    reference, _ = await timed(lambda: plain.Estimate(asked, None), rounds)
    resting, cost = await timed(lambda: full.Estimate(asked, None), rounds)
    training = asyncio.create_task(train_in_process(training_task))
    busy, _ = await timed(lambda: full.Estimate(asked, None), rounds)
    await training
    await observe(full, observations(JOBS, begin=2_000_000))
    begin = time.process_time()
    while full.chain.prepare(8):
        pass
    prepared = (time.process_time() - begin) * 1000
    ready, _ = await timed(lambda: full.Estimate(asked, None), 1)
    name, p99 = (
        f"xiao-piecewise, lightgbm-duration, history: {JOBS:,} jobs × {len(CORES)} candidates",
        harness.percentile(resting, 99),
    )
    beside, held = harness.percentile(reference, 99), harness.percentile(busy, 99)
    return [
        harness.Row(f"{name}: p99", p99, "ms", beside, "history alone", f"at most {BAR_MS:g} ms", p99 <= BAR_MS),
        harness.Row(f"{name}: processor", cost, "ms", statistics.median(reference), "history, median"),
        harness.Row(f"{name}: once, no curve fitted yet", first, "ms", cost, "again"),
        harness.Row(f"{name}: once, all curves fitted beforehand", ready[0], "ms", prepared, "fitting them"),
        harness.Row(f"{name}: p99 while training", held, "ms", p99, "at rest", "at most twice", held <= 2 * p99),
    ]


def losses(size: int, steps: range) -> list[observation.Observation]:
    """Return observations of jobs with loss goals, each with its own curve."""
    return [
        observation.Observation(
            job_id=f"loss-{number}",
            number=1,
            spec=goal_spec(number),
            allocation=pb.CandidateAllocation(cores=4, gpu_milli=1000),
            rate_per_second=2.0,
            window=Duration(seconds=10),
            time=Timestamp(seconds=1_000_000 + step),
            step=step,
            loss=2 / (1 + step / (800 + number % 400)) + 0.5,
        )
        for number in range(size)
        for step in steps
    ]


def goal_spec(number: int) -> job_pb2.JobSpec:
    """Return a job with a loss goal."""
    return job_pb2.JobSpec(model=f"model-{number}", roles=spec(number).roles, loss_goal=job_pb2.LossGoal(target=1.0))


async def _measure_losses(quick: bool) -> Sequence[harness.Row]:
    """Measure jobs with loss goals: a round that fits every curve, the next round, and the fits alone."""
    return [row for size in (SIZES[:2] if quick else SIZES) for row in await _measure_loss_size(size)]


async def _measure_loss_size(size: int) -> Sequence[harness.Row]:
    servicer = await servicer_of(LossCurve(), History())
    await observe(servicer, losses(size, range(20, 1220, 20)))
    candidates = [pb.CandidateAllocation(cores=cores, gpu_milli=1000) for cores in CORES]
    asked = pb.EstimateRequest(
        queries=[
            pb.EstimateQuery(job_id=f"loss-{number}", spec=goal_spec(number), candidates=candidates)
            for number in range(size)
        ]
    )
    before = time.process_time()
    await servicer.Estimate(asked, None)
    first = (time.process_time() - before) * 1000
    again, _ = await timed(lambda: servicer.Estimate(asked, None), 5)
    await observe(servicer, losses(size, range(1260, 1280, 20)))
    before = time.process_time()
    while servicer.chain.prepare(8):
        pass
    fits = (time.process_time() - before) * 1000
    ready, _ = await timed(lambda: servicer.Estimate(asked, None), 1)
    name = f"loss-curve, history: {size:,} jobs with loss goals"
    return [
        harness.Row(f"{name}: no curve fitted yet, processor", first, "ms", statistics.median(again), "again"),
        harness.Row(f"{name}: all curves fitted beforehand", ready[0], "ms", fits, "fitting them"),
    ]


async def _measure_all(quick: bool) -> Sequence[harness.Row]:
    return [*await _measure_calls(quick), *await _measure_chain(quick), *await _measure_losses(quick)]


if __name__ == "__main__":
    harness.main(lambda quick: asyncio.run(_measure_all(quick)), __doc__ or "")
