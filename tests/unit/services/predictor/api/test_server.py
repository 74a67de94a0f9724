from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from structlog.testing import capture_logs
from tests.unit.services.predictor.conftest import FickleStore, Restarts, Served, query, run, serving, spec, window

from cotenant import plugins
from cotenant.codec.errors import from_error
from cotenant.core.model.estimate import Candidate, Estimate, Observation, Query
from cotenant.policies.history import History
from cotenant.rpc.policy_service import serve_policies
from cotenant.rpc.server import Server
from cotenant.services.predictor.api.server import Config, start
from cotenant.services.predictor.codec import query_of
from cotenant.store.memory import MemoryStore
from cotenant.v1 import policy_service_pb2, policy_service_pb2_grpc
from cotenant.v1 import predictor_service_pb2 as pb

HUNDRED_SECONDS = [run(f"j{seconds}", seconds=seconds) for seconds in (90, 100, 110)]


async def test_estimates_are_remembered_across_a_restart(restarts: Restarts) -> None:
    async with serving(await restarts.store()) as predictor:
        await predictor.until(serving=True)
        assert (await predictor.observe(*HUNDRED_SECONDS)).accepted == 3
    async with serving(await restarts.store()) as predictor:
        await predictor.until(serving=True)
        (estimate,) = await predictor.estimate(query())
        assert estimate.predictable
        assert estimate.remaining == Duration(seconds=100)


async def test_models_are_saved_while_the_predictor_runs() -> None:
    store = MemoryStore()
    async with serving(store) as predictor:
        await predictor.until(serving=True)
        before = (await store.list("predictor/")).revision
        await predictor.observe(*HUNDRED_SECONDS)
        changes = await anext(store.watch("predictor/history/", after_revision=before))
        assert changes


async def test_an_unpredictable_job_gets_one_answer_per_candidate() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        (estimate,) = await predictor.estimate(query(cores=(1, 2, 4)))
        assert not estimate.predictable
        assert estimate.source == "history: no similar job has succeeded yet"
        assert [(one.rate_per_second, one.confidence) for one in estimate.candidates] == [(0, 0)] * 3


async def test_without_candidates_the_jobs_own_request_is_estimated() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(*(window(at=1000 + index, cores=4, rate=2.5) for index in range(4)))
        (estimate,) = await predictor.estimate(query())
        assert [one.rate_per_second for one in estimate.candidates] == [2.5]


async def test_a_running_job_has_less_remaining_time_than_a_waiting_one() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(*HUNDRED_SECONDS)
        waiting, running = await predictor.estimate(query(), query(attained_gpu_seconds=60))
        assert waiting.remaining == Duration(seconds=100)
        assert running.remaining == Duration(seconds=40)


HOSTILE = {
    "rate_per_second is nan": window(rate=math.nan),
    "rate_per_second is inf": window(rate=math.inf),
    "rate_per_second is -1": window(rate=-1),
    "rate_per_second is 1e-300; it must be 0, or from 1e-09": window(rate=1e-300),
    "time is 1e+15 s after 1970": window(time=Timestamp(seconds=10**15)),
    "window is -5 s": window(window=Duration(seconds=-5)),
    "needs the window over which it was measured": window(window=None),
    "it has no time": window(time=None),
    "it has neither a rate, nor a loss": window(rate=0),
    "run_time is -1 s": run("j1", seconds=-1),
    "run_time is 1e+11 s": run("j1", seconds=100_000_000_000),
    "its spec has 0 roles": window(spec=None),
    "its spec has a bad model: must be printable": window(spec=spec("no\nmodel")),
    "its spec has a bad name: at most 253 characters": window(spec=spec(name="x" * 254)),
    "cores is -4": window(cores=-4),
    "gpu_milli is 2147483647": window(allocation=pb.CandidateAllocation(gpu_milli=2**31 - 1)),
    "job_id must have 1 to 253 characters": window(""),
    "number is 0": window(number=0),
}


@pytest.mark.parametrize("sentence", HOSTILE)
async def test_an_invalid_observation_is_rejected_and_valid_ones_are_kept(sentence: str) -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        answer = await predictor.observe(*HUNDRED_SECONDS[:2], HOSTILE[sentence], HUNDRED_SECONDS[2])
        assert answer.accepted == 3
        (rejected,) = answer.rejected
        assert rejected.startswith("observation 2 (job ")
        assert sentence in rejected
        assert (await predictor.estimate(query()))[0].predictable


async def test_older_and_duplicate_observations_are_rejected() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        answer = await predictor.observe(window(at=1000), window(at=990), window(at=1000), window(at=1010))
        assert answer.accepted == 2
        assert [sentence.partition(": ")[2] for sentence in answer.rejected] == [
            "its time is 990.000, 10 s before the last observation",
            "its time is 1000.000, a duplicate",
        ]


async def test_the_end_of_a_job_may_have_the_time_of_its_last_window() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        assert (await predictor.observe(window("j1", at=1000), run("j1", seconds=50, at=1000))).accepted == 2


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (query(attained_gpu_seconds=math.nan), "attained_gpu_seconds is nan"),
        (query(spec=None), "its spec has 0 roles"),
        (query(cores=(-1,)), "cores is -1"),
        (query(cores=range(300)), "has 300 candidates"),
        (query(spec=spec(expected_duration=Duration(seconds=-1))), "spec.expected_duration is -1 s"),
        (query(spec=spec(steps_total=-1)), "spec.steps_total is -1"),
    ],
)
async def test_an_invalid_query_does_not_block_the_others(bad: pb.EstimateQuery, sentence: str) -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(*HUNDRED_SECONDS)
        first, second, third = await predictor.estimate(query("a"), bad, query("c"))
        assert (first.job_id, third.job_id) == ("a", "c")
        assert first.predictable
        assert third.predictable
        assert not second.predictable
        assert f"predictor: invalid query: {sentence}" in second.source
        assert len(second.candidates) == (len(bad.candidates) or 1)


async def test_a_thousand_jobs_with_eight_candidates_each_are_estimated_in_one_call() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(*HUNDRED_SECONDS)
        queries = [query(f"j{index}", cores=range(1, 9)) for index in range(1000)]
        began = time.process_time()  # other processes' load does not count
        estimates = await predictor.estimate(*queries)
        assert [estimate.job_id for estimate in estimates] == [one.job_id for one in queries]
        assert all(estimate.predictable and len(estimate.candidates) == 8 for estimate in estimates)
        assert time.process_time() - began < 2, "the benchmark tells how long it takes; this is far too long"


async def test_an_oversized_batch_is_refused() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await predictor.estimate(*[pb.EstimateQuery()] * 10_001)
        assert from_error(refused.value).message == "queries: has 10001 items; 10000 are allowed at most"


async def test_without_its_store_the_predictor_answers_but_is_not_serving() -> None:
    store = FickleStore()
    store.away = True
    async with serving(store) as predictor:
        await predictor.until(serving=False)
        (estimate,) = await predictor.estimate(query(cores=(1, 2)))
        assert estimate.source == "predictor: the saved models have not been read from the store yet"
        assert len(estimate.candidates) == 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await predictor.observe(*HUNDRED_SECONDS)
        assert from_error(refused.value).code is grpc.StatusCode.UNAVAILABLE
        store.away = False
        await predictor.until(serving=True)
        await predictor.observe(*HUNDRED_SECONDS)


async def test_learning_continues_during_a_store_outage_and_is_saved_later() -> None:
    store = FickleStore()
    async with serving(store) as predictor:
        await predictor.until(serving=True)
        with capture_logs() as logs:
            store.away = True
            await predictor.until(serving=False)
            await predictor.observe(*HUNDRED_SECONDS)
            assert (await predictor.estimate(query()))[0].predictable
            store.away = False
            await predictor.until(serving=True)
    assert [line["why"] for line in logs if line["event"] == "store_unavailable"] == ["gone fishing"]
    assert (await store.list("predictor/history/")).entries


async def test_records_not_saved_at_shutdown_are_logged() -> None:
    store = FickleStore()
    with capture_logs() as logs:
        async with serving(store, Config(save_seconds=3600)) as predictor:
            await predictor.until(serving=True)
            await predictor.observe(*HUNDRED_SECONDS)
            store.away = True
    assert [(line["event"], line["count"]) for line in logs if line["log_level"] == "warning" and "count" in line] == [
        ("records_not_saved", 2)  # what history learnt, and when its kind was seen
    ]


class Broken:
    """A predictor that always fails, with a known error."""

    name = "history"
    api_version = 1

    def observe(self, observation: Observation) -> None:
        raise RuntimeError("no eyes")

    def estimate(self, query: Query) -> Estimate:
        raise RuntimeError("no idea")

    def dump(self) -> dict[str, bytes]:
        raise RuntimeError("no pen")

    def restore(self, records: dict[str, bytes]) -> list[str]:
        raise RuntimeError("no memory")


async def test_a_failing_predictor_is_logged_and_its_jobs_are_unpredictable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "load", lambda group, name, options: Broken())
    with capture_logs() as logs:
        async with serving(MemoryStore()) as predictor:
            await predictor.until(serving=True)
            assert (await predictor.observe(*HUNDRED_SECONDS)).accepted == 3
            first, second = await predictor.estimate(query(), query())
            assert (first.predictable, second.predictable) == (False, False)
    told = {(line["predictor"], line["last_error"], line.get("count")) for line in logs if line["log_level"] == "error"}
    assert told == {
        ("history", "restore: RuntimeError: no memory", None),
        ("history", "observe: RuntimeError: no eyes", 3),
        ("history", "estimate: RuntimeError: no idea", 2),
        ("history", "dump: RuntimeError: no pen", None),
    }


async def plan(predictor: Served, **fields: Any) -> pb.PlanProfileResponse:
    given: dict[str, Any] = {"spec": spec(), "cores_max": 32}
    answer: pb.PlanProfileResponse = await predictor.stub.PlanProfile(pb.PlanProfileRequest(**(given | fields)))
    return answer


async def test_a_profile_is_planned_until_the_useful_cores_are_known(restarts: Restarts) -> None:
    async with serving(await restarts.store()) as predictor:
        await predictor.until(serving=True)
        first = await plan(predictor)
        assert list(first.cores[:2]) == [32, 1]
        assert first.steps > 0
        assert "known at 0 core counts" in first.reason
        profile_store: list[int] = []
        while left := list((await plan(predictor)).cores):
            profile_store.append(left[0])
            rate = min(left[0], 6) * 10.0
            await predictor.observe(window(at=1000 + len(profile_store), cores=left[0], rate_per_second=rate))
        assert len(profile_store) == len(set(profile_store)) <= 5
        assert "θ is known within a step of the ladder" in (await plan(predictor)).reason
        assert list((await plan(predictor, spec=spec("bert"))).cores[:2]) == [32, 1], "another kind of job"


async def test_validation_rates_do_not_count_as_training() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(window(cores=32, phase="validation"))
        assert "known at 0 core counts" in (await plan(predictor)).reason
        (answer,) = await predictor.estimate(query(cores=(32,)))
        assert not answer.candidates[0].rate_per_second
        assert (await predictor.observe(window(at=2000, cores=32, phase="a/b"))).rejected


async def test_measured_rates_survive_a_restart() -> None:
    store = MemoryStore()
    async with serving(store) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(window(cores=32))
    async with serving(store) as predictor:
        await predictor.until(serving=True)
        assert "known at 1 core count" in (await plan(predictor)).reason
        assert 32 not in (await plan(predictor)).cores


@pytest.mark.parametrize(
    ("fields", "violation"),
    [
        ({"cores_max": 0}, "cores_max: must be from 1 to 4096, not 0"),
        ({"spec": None}, "spec: has 0 roles, not 1 to 16"),
    ],
)
async def test_an_invalid_profile_request_is_refused(fields: dict[str, Any], violation: str) -> None:
    async with serving(MemoryStore()) as predictor:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plan(predictor, **fields)
        assert from_error(refused.value).message.startswith(violation)


async def test_a_predictor_that_is_not_installed_is_named_at_the_start() -> None:
    server = Server()
    with pytest.raises(plugins.UnknownPolicy, match="did you mean history"):
        await start(server, MemoryStore(), serve_policies(server), Config(predictors=("histroy",)))


async def test_options_reach_their_predictor_and_stray_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    with pytest.raises(ValueError, match="options for 'oracle', which is not among the predictors"):
        await start(server, MemoryStore(), serve_policies(server), Config(options={"oracle": {"a": "1"}}))
    async with serving(MemoryStore(), Config(options={"history": {"confidence_min": "0.99"}})) as predictor:
        await predictor.until(serving=True)
        await predictor.observe(*HUNDRED_SECONDS)
        assert not (await predictor.estimate(query()))[0].predictable


async def test_the_policy_service_lists_the_active_predictors() -> None:
    async with serving(MemoryStore()) as predictor:
        stub = policy_service_pb2_grpc.PolicyServiceStub(predictor.channel)
        listed = await stub.ListPolicies(policy_service_pb2.ListPoliciesRequest())
        assert {policy.group for policy in listed.policies} == {"cotenant.predictors"}
        assert [policy.name for policy in listed.policies if policy.active] == ["history"]


async def test_a_large_batch_lets_other_calls_through() -> None:
    async with serving(MemoryStore()) as predictor:
        await predictor.until(serving=True)
        large = asyncio.ensure_future(predictor.estimate(*[query(cores=range(1, 9))] * 5000))
        small = asyncio.ensure_future(predictor.estimate(query()))
        done, _ = await asyncio.wait({large, small}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {small}
        await large


def test_history_is_recorded_and_queried_by_the_same_name() -> None:
    learnt = History()
    for seconds in (90, 100, 110):
        four = Candidate(cores=4)
        learnt.observe(Observation("ann", "bert", "", 2000, 2, four, run_seconds=seconds, succeeded=True))
    worker = spec().roles[0]
    assert learnt.estimate(query_of(query(spec=spec("bert", tenant="ann", roles=[worker, worker])))).predictable
