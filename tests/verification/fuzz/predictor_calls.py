"""Observations and queries of predictors over the wire, in sequence: none fails, whatever came before.

In production the chain logs a failed predictor and skips it, so callers would receive neither an error nor an estimate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TypeVar

from google.protobuf.message import Message
from tests.unit.services.mesh import spec
from tests.verification.fuzz.messages import Drawer
from tests.verification.fuzz.targets import Prepared, Target

from cotenant import plugins
from cotenant.codec.errors import Problem
from cotenant.core.policy.protocols import Predictor
from cotenant.core.prediction.chain import Chain
from cotenant.internal.v1 import observation_service_pb2 as observation_pb2
from cotenant.services.predictor.api.server import GROUP, PredictorServicer
from cotenant.services.predictor.models.failure_log import FailureLog
from cotenant.services.predictor.models.job_classes import JobClasses
from cotenant.services.predictor.models.model_store import ModelStore
from cotenant.services.predictor.profiling.profile_store import ProfileStore
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2
from cotenant.v1 import predictor_service_pb2 as pb

M = TypeVar("M", bound=Message)

AT_ONCE = 8
RESTART_EVERY = 40  # inputs
NUMBERS = (1e-9, 1e-6, 0.5, 1.0, 2.0, 7.0, 1e3, 1e6, 1e9)
KNOWN = {"tenant": ["default"], "model": ["bert", ""], "role": ["worker", "ps"], "job_id": ["j"], "phase": ["", "v"]}


def targets() -> Iterator[Target]:
    """Yield the targets."""
    yield Target("observations", _observations, (Problem,))


class _FailureFindings(FailureLog):
    """Reports each failure of a predictor as a finding."""

    def add(self, predictor: Predictor, error: str) -> None:
        raise AssertionError(f"{predictor.name}: {error}")


def _servicer() -> PredictorServicer:
    failures, store = _FailureFindings(), MemoryStore()
    chain = Chain([plugin.make() for plugin in plugins.discover(GROUP)], failures.add)
    model_store = ModelStore(store, {}, lambda ready: None)
    model_store.restored = True
    return PredictorServicer(chain, ProfileStore(), model_store, failures, job_classes=JobClasses())


def observation(rng: Random, seconds: float) -> observation_pb2.Observation:
    """Return an observation as a queue sends it, with values many powers of ten apart."""
    seen = observation_pb2.Observation(job_id="j", number=1, spec=spec(gpus=rng.choice((0, 1, 4)), model="bert"))
    seen.time.FromMilliseconds(int(seconds * 1000))
    seen.allocation.cores, seen.allocation.gpu_milli = rng.choice((1, 2, 3, 8, 64, 4096)), 1000
    seen.allocation.nodes = rng.choice((1, 2))
    if rng.random() < 0.3:
        seen.spec.roles.add(name="ps", replicas=rng.choice((1, 3))).resources.cores = 2
    match rng.randrange(5):
        case 0:
            seen.run_time.FromMilliseconds(rng.choice((1, 60_000, 10**12)))
            seen.succeeded = rng.random() < 0.8
            seen.spec.expected_duration.FromSeconds(rng.choice((1, 10**9)))
        case 1:
            seen.batch_size = rng.choice((1, 2, 10**6))
            seen.batch_time.FromNanoseconds(rng.choice((1, 10**6, 10**15)))
        case 2:
            seen.loss = rng.choice((*NUMBERS, -1.0, 0.0, float("nan"), float("inf"), 1e308, -1e308, 1e-320))
            seen.step = rng.choice((0, 1, 5, 10**6, 10**15))
            seen.spec.loss_goal.target = rng.choice((0.1, -1.0, 1e300))
        case _:
            seen.rate_per_second = rng.choice(NUMBERS)
            seen.window.FromMilliseconds(rng.choice((1, 1000, 10**10)))
            seen.profiled = rng.random() < 0.2
    return seen


def query(rng: Random) -> pb.EstimateQuery:
    """Return a query as a queue sends it."""
    query = pb.EstimateQuery(job_id="j", spec=spec(gpus=rng.choice((0, 1, 4)), model="bert"))
    query.spec.steps_total = rng.choice((0, 5, 10**15))
    query.spec.loss_goal.target = 0.1
    if rng.random() < 0.5:
        query.spec.kind = job_pb2.JOB_KIND_INFERENCE
        query.spec.qos.arrivals_per_second, query.spec.qos.latency_seconds = rng.choice(NUMBERS), rng.choice(NUMBERS)
        query.spec.qos.latency_percentile = rng.choice((1e-9, 50.0, 99.999))
    for cores in (0, 1, 3, 4096):
        query.candidates.add(cores=cores, gpu_milli=rng.choice((0, 1000)), nodes=rng.choice((1, 2)))
    query.attained_gpu_seconds = rng.choice((0.0, 1.0, 1e12))
    return query


def _observations(directory: Path) -> Prepared:
    loop = asyncio.new_event_loop()
    state = {"inputs": 0, "seconds": 1_000_000}
    servicers = [_servicer()]

    def odd(rng: Random, message: M) -> M:
        if rng.random() < 0.2:
            Drawer(rng, KNOWN).change(message)
        return message

    async def run_one(data: bytes) -> None:
        rng = Random(data)
        seen = []
        for _ in range(AT_ONCE):
            state["seconds"] += 1
            seen.append(odd(rng, observation(rng, state["seconds"])))
        asked = [odd(rng, query(rng)) for _ in range(2)]
        await servicers[0].Observe(observation_pb2.ObserveRequest(observations=seen), None)
        answer = await servicers[0].Estimate(pb.EstimateRequest(queries=asked), None)
        answer.SerializeToString()
        profiles = await servicers[0].ListProfiles(pb.ListProfilesRequest(page_size=2), None)
        profiles.SerializeToString()

    def run(data: bytes) -> None:
        state["inputs"] += 1
        if state["inputs"] % RESTART_EVERY == 0:
            servicers[0] = _servicer()
        try:
            loop.run_until_complete(run_one(data))
        except AssertionError:
            servicers[0] = _servicer()  # the input that broke it is still in its state
            raise

    return Prepared(run, (b"0", b"1", b"abc"))
