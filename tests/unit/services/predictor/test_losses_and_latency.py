"""Losses and batch times through the API: from observations to estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.unit.services.predictor.conftest import query, run, serving, spec, window

from cotenant.core.model.estimate import Candidate, CandidateEstimate, Estimate, Latency, Observation, Query
from cotenant.core.model.job import Qos
from cotenant.core.prediction.chain import Chain
from cotenant.core.prediction.estimate_validation import invalid_reason
from cotenant.internal.v1 import observation_service_pb2 as pb
from cotenant.services.predictor import codec
from cotenant.services.predictor.api.server import Config
from cotenant.store.memory import MemoryStore
from cotenant.v1 import job_pb2

CHAIN = Config(predictors=("loss-curve", "history", "latency"), save_seconds=0.02)
GOAL = job_pb2.LossGoal(target=1.0)


def losses(until: int = 1200) -> list[pb.Observation]:
    steps = range(20, until, 20)
    return [window(at=1000 + step, step=step, loss=2 / (1 + step / 1000) + 0.5) for step in steps]


def batches() -> list[pb.Observation]:
    return [
        window(
            "service", at=n, rate=0.0, window=None, batch_size=size, batch_time=Duration(nanos=(10 + size) * 1_000_000)
        )
        for n, size in enumerate((1, 4, 16, 64, 128) * 4, 1)
    ]


def serving_spec(**qos: float) -> job_pb2.JobSpec:
    promised = {"latency_seconds": 0.03, "latency_percentile": 99.0, "arrivals_per_second": 900.0}
    return spec(qos=job_pb2.Qos(**(promised | qos)))


async def test_a_jobs_own_losses_take_precedence_over_similar_jobs() -> None:
    async with serving(MemoryStore(), CHAIN) as predictor:
        await predictor.observe(*losses(), *[run(f"before-{n}", seconds=50) for n in range(9)])
        asked = query("j1", spec=spec(loss_goal=GOAL), progress=job_pb2.Progress(step=1200))
        told, other = await predictor.estimate(asked, query("j2", spec=spec(loss_goal=GOAL)))
    assert told.remaining.ToTimedelta().total_seconds() == pytest.approx(900, rel=0.02)
    assert told.source.startswith("loss-curve: the loss curve 1/(")
    assert other.source.startswith("history: the median of 9 similar runs")


async def test_losses_survive_a_restart() -> None:
    store = MemoryStore()
    asked = query("j1", spec=spec(loss_goal=GOAL), progress=job_pb2.Progress(step=1200))
    async with serving(store, CHAIN) as predictor:
        await predictor.observe(*losses())
        before = await predictor.estimate(asked)
    async with serving(store, CHAIN) as predictor:
        await predictor.until(serving=True)
        assert await predictor.estimate(asked) == before
    assert before[0].predictable


async def test_corrupt_losses_are_set_aside_and_estimates_continue() -> None:
    store = MemoryStore()
    async with serving(store, CHAIN) as predictor:
        await predictor.observe(*losses())
    (entry,) = (await store.list("predictor/loss-curve/")).entries
    from cotenant.store.port import Put  # here, where it is used once

    await store.transact((), [Put(entry.key, b'{"key":["j1"],"cells":7}')])
    async with serving(store, CHAIN) as predictor:
        await predictor.until(serving=True)
        (told,) = await predictor.estimate(query("j1", spec=spec(loss_goal=GOAL)))
        assert not told.predictable
        await predictor.observe(*losses())
        (told,) = await predictor.estimate(query("j1", spec=spec(loss_goal=GOAL)))
        assert told.predictable
    aside = (await store.list("unreadable/predictor/loss-curve/")).entries
    assert [one.value for one in aside] == [b'{"key":["j1"],"cells":7}']


async def test_a_services_latency_is_estimated_by_replicas() -> None:
    async with serving(MemoryStore(), CHAIN) as predictor:
        await predictor.observe(*batches())
        (told,) = await predictor.estimate(query("service", spec=serving_spec()))
    (judged,) = told.candidates
    assert judged.latency.replicas == 1
    assert judged.latency.p99_seconds == judged.latency.promised_seconds == pytest.approx(0.27957)
    assert 0 < judged.latency.mean_max_seconds < judged.latency.p95_seconds < judged.latency.p99_seconds
    assert judged.latency.replicas_needed == 5
    assert not told.predictable


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"step": -1, "loss": 1.0}, "step is -1"),
        ({"loss": 1.0}, "loss needs the step"),
        ({"batch_size": 3}, "batch_size and batch_time must be given together"),
        ({"batch_time": Duration(seconds=3)}, "batch_size and batch_time must be given together"),
        ({"batch_size": -3, "batch_time": Duration(seconds=3)}, "batch_size is -3"),
        ({"batch_size": 3, "batch_time": Duration(seconds=-3)}, "batch_time is -3 s"),
        ({"rate_per_second": 0.0, "step": 5}, "it has neither a rate, nor a loss, nor a batch, nor the end"),
    ],
)
async def test_an_invalid_observation_is_rejected_with_the_reason(fields: dict[str, Any], why: str) -> None:
    async with serving(MemoryStore(), CHAIN) as predictor:
        answer = await predictor.observe(window(**fields), window("j2"))
    assert answer.accepted == 1
    assert why in answer.rejected[0]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (spec(loss_goal=job_pb2.LossGoal(target=math.nan)), "loss_goal.target is nan"),
        (spec(loss_goal=job_pb2.LossGoal(fall_min=-1.0)), "loss_goal.fall_min is -1"),
        (spec(loss_goal=job_pb2.LossGoal(fall_steps=-1)), "loss_goal.fall_steps is -1"),
        (serving_spec(arrivals_per_second=math.inf), "qos.arrivals_per_second is inf"),
        (serving_spec(latency_seconds=-1.0), "qos.latency_seconds is -1"),
        (serving_spec(latency_percentile=100.0), "qos.latency_percentile is 100"),
    ],
)
async def test_an_invalid_query_is_answered_with_the_reason(given: job_pb2.JobSpec, why: str) -> None:
    async with serving(MemoryStore(), CHAIN) as predictor:
        wrong, sound = await predictor.estimate(query(spec=given), query())
    assert why in wrong.source
    assert "cannot be taken" not in sound.source


def test_a_nan_loss_is_accepted() -> None:
    assert math.isnan(codec.observation_of(window(step=5, loss=math.nan)).loss or 0.0)


class Says:
    """A predictor with one fixed estimate."""

    api_version = 1

    def __init__(self, name: str, estimate: Estimate) -> None:
        self.name, self._estimate = name, estimate

    def observe(self, observation: Observation) -> None:
        return None

    def estimate(self, query: Query) -> Estimate:
        return self._estimate

    def dump(self) -> dict[str, bytes]:
        return {}

    def restore(self, records: Any) -> list[str]:
        return []


def test_latency_is_added_to_another_predictors_estimate() -> None:
    latency = Latency(1, 0.1, 0.2, 0.3, confidence=0.9)
    runs = Says("runs", Estimate(True, 0.9, 60.0, candidates=(CandidateEstimate(2.0),), source="runs"))
    waits = Says("waits", Estimate(candidates=(CandidateEstimate(latency=latency),), source="waits"))
    service = Query("ann", "bert", "", 1000, 1, candidates=(Candidate(4),), qos=Qos(arrivals_per_second=9.0))
    for predictors in ([runs, waits], [waits, runs]):
        estimate = Chain(predictors).estimate(service)
        assert (estimate.source, estimate.remaining_seconds) == ("runs: runs; latency by waits", 60.0)
        assert estimate.candidates == (CandidateEstimate(2.0, latency=latency),)
    assert Chain([waits]).estimate(service) == replace(waits.estimate(service), source="waits: waits")


@pytest.mark.parametrize("wrong", [Latency(1, math.nan), Latency(1, p99_seconds=-1.0), Latency(1, confidence=2.0)])
def test_an_invalid_latency_is_not_returned(wrong: Latency) -> None:
    assert invalid_reason(Estimate(candidates=(CandidateEstimate(latency=wrong),)), 1).startswith(
        "a candidate's latency"
    )


@pytest.mark.parametrize(
    "loss",
    [lambda step: 0.0, lambda step: 1.0 + step / 100, lambda step: math.nan, lambda step: 10.0 ** (step / 40)],
    ids=["collapsed", "rising", "no number", "exploding"],
)
async def test_an_unfittable_loss_lowers_confidence_and_estimates_continue(
    loss: Callable[[int], float],
) -> None:
    async with serving(MemoryStore(), CHAIN) as predictor:
        seen = [window(at=1000 + step, step=step, loss=loss(step)) for step in range(20, 1200, 20)]
        assert (await predictor.observe(*seen)).rejected == []
        asked = query("j1", spec=spec(loss_goal=GOAL), progress=job_pb2.Progress(step=1200))
        (told,) = await predictor.estimate(asked)
    assert not told.predictable
    assert told.confidence < 0.5
