"""Live profiles through the API: requested, learned from, stale, and repeated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.services.predictor.conftest import Served, query, serving, window
from tests.unit.services.predictor.profiling.test_profile_planner import auto, saturating

from cotenant.internal.v1 import observation_service_pb2 as observation
from cotenant.services.predictor.api.server import Config
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put
from cotenant.v1 import predictor_service_pb2 as pb

XIAO = Config(predictors=("xiao-piecewise", "history"), save_seconds=0.02)
A100 = "A100"


class Runs:
    """A job that runs on 16 cores and reports its rates to the predictor."""

    def __init__(self, predictor: Served, job_id: str = "j1") -> None:
        self._predictor, self._job_id, self._at = predictor, job_id, 1000

    async def told(self, rate: float, cores: int = 16, **fields: Any) -> observation.ObserveResponse:
        self._at += 10
        held = pb.CandidateAllocation(cores=cores, gpu_milli=1000, gpu_type=A100)
        given: dict[str, Any] = {"spec": auto(), "allocation": held, **fields}
        return await self._predictor.observe(window(self._job_id, at=self._at, rate=rate, **given))

    async def profiled(self, rate: Callable[[int], float]) -> list[int]:
        """Measure what is planned until nothing more is requested."""
        counts: list[int] = []
        while True:
            request = pb.PlanProfileRequest(spec=auto(), cores_max=16, gpu_type=A100)
            plan = await self._predictor.stub.PlanProfile(request)
            assert plan.cores
            assert 0 < plan.budget.seconds <= 300
            assert plan.steps == 50
            for cores in plan.cores[:2]:
                counts.append(cores)
                await self.told(rate(cores), cores, profiled=True)
            done = await self.told(0.0, profiled=True, profile_done=True, window=None)
            if not done.profile_wanted:
                return counts


async def test_a_class_is_profiled_once_and_the_next_job_gets_its_useful_cores() -> None:
    store = MemoryStore()
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        job = Runs(predictor)
        assert (await job.told(50.0)).profile_wanted == ["j1"]
        assert not (await Runs(predictor, "j2").told(50.0)).profile_wanted
        assert len(await job.profiled(saturating)) <= 4
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        assert not (await Runs(predictor, "j2").told(50.0)).profile_wanted
        (known,) = await predictor.estimate(query(spec=auto()))
        assert 4 <= known.cores_useful <= 5
        assert "stale" not in known.source


async def test_a_stale_profile_is_reported_and_measured_again_also_after_a_restart() -> None:
    store = MemoryStore()
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        job = Runs(predictor)
        await job.told(50.0)
        await job.profiled(saturating)
        before = (await predictor.estimate(query(spec=auto(steps_total=10_000))))[0]
        assert before.predictable
        answers = [await job.told(20.0) for _ in range(3)]
        assert [list(answer.profile_wanted) for answer in answers] == [[], [], ["j1"]]
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        (doubted,) = await predictor.estimate(query(spec=auto(steps_total=10_000), cores=(16,)))
        assert "its profile is stale: its last 3 windows ran at 0.40 of the measured rate" in doubted.source
        assert doubted.confidence < before.confidence
        assert doubted.cores_useful == 0, "what was measured before has given way"
        assert doubted.candidates[0].rate_per_second == pytest.approx(20.0)
        job = Runs(predictor, "j3")
        assert (await job.told(20.0)).profile_wanted == ["j3"]
        await job.profiled(lambda cores: 0.4 * saturating(cores))
        (after,) = await predictor.estimate(query(spec=auto(steps_total=10_000)))
        assert "stale" not in after.source
        assert 4 <= after.cores_useful <= 5


async def test_a_possibly_noisy_window_is_withheld_until_the_next() -> None:
    async with serving(MemoryStore(), Config(predictors=("xiao-piecewise",))) as predictor:
        await predictor.until(serving=True)
        job = Runs(predictor)
        for rate in (50.0, 50.0, 10.0):
            await job.told(rate, loss=0.5, step=7)
        (known,) = await predictor.estimate(query(spec=auto(), cores=(16,)))
        assert known.candidates[0].rate_per_second == pytest.approx(50.0)
        await job.told(50.0)
        (known,) = await predictor.estimate(query(spec=auto(), cores=(16,)))
        assert known.candidates[0].rate_per_second == pytest.approx(40.0)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
async def test_an_invalid_rate_requests_no_profile(rate: float) -> None:
    async with serving(MemoryStore(), XIAO) as predictor:
        await predictor.until(serving=True)
        for fields in ({}, {"profiled": True}):
            answer = await Runs(predictor).told(rate, **fields)
            assert (answer.accepted, len(answer.rejected), list(answer.profile_wanted)) == (0, 1, [])
        (known,) = await predictor.estimate(query(spec=auto(), cores=(16,)))
        assert (known.predictable, known.candidates[0].rate_per_second) == (False, 0.0)


async def test_one_point_gives_no_useful_cores() -> None:
    async with serving(MemoryStore(), XIAO) as predictor:
        await predictor.until(serving=True)
        await Runs(predictor).told(50.0)
        (known,) = await predictor.estimate(query(spec=auto()))
        assert known.cores_useful == 0


async def test_jobs_of_one_name_with_different_rates_lower_the_confidence() -> None:
    fast_and_slow = (50.0, 5.0)
    async with serving(MemoryStore(), XIAO) as predictor:
        await predictor.until(serving=True)
        jobs = [Runs(predictor, job_id) for job_id in ("j1", "j2")]
        for _ in range(8):
            answers = [await job.told(rate) for job, rate in zip(jobs, fast_and_slow, strict=True)]
            assert [answer.rejected for answer in answers] == [[], []]
        (known,) = await predictor.estimate(query(spec=auto(), cores=(16,)))
        assert 5.0 <= known.candidates[0].rate_per_second <= 50.0
        assert known.candidates[0].confidence < 0.5


async def test_a_backward_clock_yields_no_profile_window() -> None:
    async with serving(MemoryStore(), XIAO) as predictor:
        await predictor.until(serving=True)
        at = [window("j1", at=at, rate=50.0, spec=auto(), cores=16, profiled=True) for at in (1000, 990, 1000)]
        answer = await predictor.observe(*at)
        assert (answer.accepted, len(answer.rejected)) == (1, 2)


async def test_corrupt_rates_are_set_aside_and_measured_again() -> None:
    store = MemoryStore()
    await store.transact((), (Put("predictor/measured-cores/default/bert/1000/1", b'{"profiles": [{"sett'),))
    async with serving(store, XIAO) as predictor:
        await predictor.until(serving=True)
        assert (await Runs(predictor).told(50.0)).profile_wanted == ["j1"]
    (aside,) = (await store.list("unreadable/")).entries
    assert aside.key == "unreadable/predictor/measured-cores/default/bert/1000/1"
