"""Start forecasts in explanations and what-if answers; asking for them changes nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.unit.services.mesh import BACKFILL, Mesh, eventually, running, spec, until

from cotenant.codec.specs import duration, seconds
from cotenant.core.prediction.earned_trust import JudgedPrediction
from cotenant.services.queue.api.server import QueueConfig
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1 import tenant_service_pb2 as tenant_pb2

STRICT = QueueConfig()


async def explained(mesh: Mesh, job_id: str) -> pb.ExplainJobResponse:
    told: pb.ExplainJobResponse = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=job_id))
    return told


async def has_forecast(mesh: Mesh, job_id: str) -> bool:
    return (await explained(mesh, job_id)).HasField("forecast")


async def running_job(mesh: Mesh, **fields: Any) -> str:
    job_id = await mesh.submit(**fields)
    await mesh.reach(job_id, "RUNNING")
    return job_id


def lasting(seconds: float) -> dict[str, Any]:
    return {"expected_duration": duration(seconds)}


def within(left_seconds: float) -> Timestamp:
    made = Timestamp()
    made.FromNanoseconds(int((time.time() + left_seconds) * 1e9))
    return made


async def kept(mesh: Mesh) -> list[tuple[str, bytes, int]]:
    """Return the whole store."""
    return [(one.key, one.value, one.mod_revision) for one in (await mesh.store.list("")).entries]


@pytest.mark.parametrize("config", [BACKFILL, STRICT], ids=["backfill", "strict"])
async def test_a_waiting_job_gets_a_start_forecast_and_the_jobs_it_waits_for(config: QueueConfig) -> None:
    async with running(queue_config=config) as mesh:
        await mesh.agent("a", gpus=4)
        first = await running_job(mesh, gpus=4, name="first", **lasting(600))
        second = await mesh.submit(gpus=4, name="second", cores=1, **lasting(120))
        third = await mesh.submit(gpus=2, replicas=2, cores=1, name="third")
        await mesh.refused(third, "BEHIND" if config is STRICT else "CAPACITY")
        await eventually(lambda: has_forecast(mesh, third))  # it is behind the head even before a cycle has seen it
        told = await explained(mesh, second)
        assert seconds(told.forecast.start) == pytest.approx(600, abs=10)
        assert seconds(told.forecast.finish) == pytest.approx(720, abs=10)
        assert told.outlook == f"starts in about 10 min, once {first} (first) has ended"
        assert [one.job_id for one in told.ending] == [first]
        told = await explained(mesh, third)
        assert seconds(told.forecast.start) == pytest.approx(720, abs=10)
        last = f"{second} (second), itself waiting, and 1 other job"
        assert told.outlook == f"starts in about 12 min, once {last} have ended"
        assert [(one.job_id, one.needs, one.running) for one in told.ahead] == [(second, "4 GPUs and 1 core", False)]
        assert told.ahead_count == 1


async def test_a_job_of_unknown_length_is_expected_to_end_at_its_time_limit_at_the_latest() -> None:
    async with running() as mesh:
        await mesh.agent("a", gpus=4)
        await running_job(mesh, gpus=4, **lasting(600))
        await mesh.submit(gpus=4, cores=1, time_limit=duration(120))
        third = await mesh.submit(gpus=4, cores=1)
        await mesh.refused(third, "CAPACITY")
        await eventually(lambda: has_forecast(mesh, third))
        told = (await explained(mesh, third)).forecast
        assert seconds(told.start) == pytest.approx(720, abs=10)
        assert seconds(told.start_p90) < 740


async def test_a_job_at_its_tenants_limit_waits_for_a_job_of_that_tenant() -> None:
    async with running() as mesh:
        await mesh.agent("a", gpus=4)
        limited = tenant_pb2.Tenant(id="vision", limit_gpu_milli=2000)
        await mesh.tenants.CreateTenant(tenant_pb2.CreateTenantRequest(tenant=limited))
        own = await running_job(mesh, gpus=2, tenant="vision", name="own", **lasting(300))
        job_id = await mesh.submit(gpus=1, tenant="vision")
        await mesh.refused(job_id, "QUOTA")
        told = await explained(mesh, job_id)
        assert seconds(told.forecast.start) == pytest.approx(300, abs=10)
        assert [one.job_id for one in told.ending] == [own]


async def test_a_start_that_depends_only_on_jobs_of_unknown_length_is_unknown() -> None:
    async with running() as mesh:
        await mesh.agent("a", gpus=1)
        held = await running_job(mesh, name="held")
        waits = await mesh.submit(**lasting(60))
        await mesh.refused(waits, "CAPACITY")
        await eventually(lambda: has_forecast(mesh, waits))
        told = await explained(mesh, waits)
        assert told.forecast.of_unknown
        assert told.forecast.draws == 21
        assert not any(told.forecast.HasField(field) for field in ("start", "start_p10", "start_p90", "finish"))
        assert told.outlook == (
            f"start time unknown: it depends on jobs of unknown length, once {held} (held) has ended"
        )
        assert [job.job_id for job in told.ending] == [held]
        answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(priority=5)))
        assert answer.forecast.of_unknown
        assert answer.outlook.startswith("start time unknown: it depends on jobs of unknown length")


async def test_no_forecast_for_started_jobs_or_without_placement() -> None:
    async with running() as mesh:
        await mesh.agent("a", gpus=1)
        job_id = await running_job(mesh)
        told = await explained(mesh, job_id)
        assert not told.HasField("forecast")
        assert not told.outlook
        waits = await mesh.submit()
        await mesh.refused(waits, "CAPACITY")
        await mesh.kill("placement")
        told = await explained(mesh, waits)
        assert told.summary.startswith("waits")
        assert not told.HasField("forecast")


async def test_what_if_with_several_jobs_changes_nothing() -> None:
    async with running() as mesh:
        await mesh.agent("a", gpus=4)
        held = await running_job(mesh, gpus=3, name="held", **lasting(600))
        waits = await mesh.submit(gpus=4, **lasting(60))
        await mesh.refused(waits, "CAPACITY")
        state = mesh.parts["queue"].service.state
        cluster = mesh.parts["placement"].service.cluster
        await until(lambda: not state.unestimated)

        def stands() -> Any:
            return (
                sorted(state.records),
                list(state.table.ids),
                list(state.ranked),
                sorted(cluster.attempts),
                cluster.ledger.free_gpus.tolist(),
                cluster.ledger.free_cores.tolist(),
            )

        before, here = await kept(mesh), stands()
        more = [spec(gpus=1, cores=1, name="large"), spec(gpus=5)]
        one = spec(gpus=1, cores=1, priority=5, **lasting(3600))
        with pytest.raises(Exception, match="the largest node has"):
            await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=one, more=more))
        answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=one, more=more[:1]))
        assert (await kept(mesh), stands()) == (before, here)
        assert answer.starts_now
        assert answer.outlook == "starts now; finishes in about 60 min"
        assert [job.job_id for job in answer.delayed] == [waits]
        assert seconds(answer.delayed[0].later) == pytest.approx(3000, abs=20)
        (large,) = answer.more
        assert not large.starts_now, "the other one has the room"
        assert large.refusal.code == "CAPACITY"
        assert [job.job_id for job in large.ending][:1] == [held]


async def test_what_if_names_preempted_jobs_without_stopping_them() -> None:
    config = QueueConfig(policy="srsf", options={})
    async with running(queue_config=config) as mesh:
        await mesh.agent("a", gpus=1)
        long = await running_job(mesh, **lasting(36_000))
        answer = await mesh.jobs.SimulateJob(pb.SimulateJobRequest(spec=spec(**lasting(1))))
        assert answer.refusal.code == "MAKING_ROOM"
        assert list(answer.preempted_job_ids) == [long]
        assert answer.outlook.startswith("starts as soon as its resources are freed")
        assert (await mesh.job(long)).attempt.number == 1


async def test_forecasts_and_objectives_believe_a_predictor_as_far_as_its_record_goes() -> None:
    async with running() as mesh:
        await mesh.agent("a", gpus=4)
        first = await running_job(mesh, gpus=4, deadline=within(1200), **lasting(600))
        second = await mesh.submit(gpus=4, cores=1, **lasting(120))
        await mesh.refused(second, "CAPACITY")
        await eventually(lambda: has_forecast(mesh, second))
        before = (await explained(mesh, second)).forecast
        assert seconds(before.start_p90) < 1000
        [status] = (await mesh.job(first)).objectives
        assert "after" not in status.detail
        state = mesh.parts["queue"].service.state
        for number in range(20):  # half of them ran three times as long as predicted
            ran = 100.0 * (1 + number % 2 * 2)
            tenant = state.records[first].spec.tenant
            state.judged.add(JudgedPrediction(float(number), str(number), "history", tenant, 100.0, ran))
        after = (await explained(mesh, second)).forecast
        assert seconds(after.start_p90) > 1500
        [status] = (await mesh.job(first)).objectives
        assert "10 min after" in status.detail
