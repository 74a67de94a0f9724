"""Rates by GPU type over the real mesh: what earlier runs taught decides where the next one runs, and is explained."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from benchmarks import agents
from google.protobuf.duration_pb2 import Duration
from tests.unit.services.mesh import QUICK, eventually, running

from cotenant.codec.specs import timestamp
from cotenant.internal.v1.observation_service_pb2 import Observation, ObserveRequest
from cotenant.internal.v1.observation_service_pb2_grpc import ObservationServiceStub
from cotenant.v1 import job_service_pb2 as pb
from cotenant.v1.predictor_service_pb2 import CandidateAllocation
from cotenant.v1.resources_pb2 import Inventory

BY_TYPE = replace(QUICK, placement="locality", options={"locality": {"gpu_types": "true"}})
RATES = {"T4": 2.0, "A100": 5.0}


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nodes GPUs of the type in their name."""
    plain = agents.inventory

    def inventory(gpus: int, cores: int, *, node_id: str = "") -> Inventory:
        found = plain(gpus, cores, node_id=node_id)
        for gpu in found.gpus:
            gpu.model = node_id.split("-")[1]
        return found

    monkeypatch.setattr(agents, "inventory", inventory)


@pytest.mark.usefixtures("typed")
async def test_a_job_runs_on_its_fastest_type_and_the_next_is_told_what_it_misses() -> None:
    async with running(placement_config=BY_TYPE) as mesh:
        await mesh.agent("a-T4", gpus=1, cores=8)
        await mesh.agent("b-A100", gpus=1, cores=8)
        taught = await mesh.submit(gpus=1, model="bert")
        ran = await mesh.reach(taught, "RUNNING")
        await mesh.jobs.CancelJob(pb.CancelJobRequest(id=taught))
        await mesh.reach(taught, "CANCELLED")
        cores = len(ran.attempt.allocations[0].tasks[0].core_ids)
        seen = [
            Observation(
                job_id=taught, number=1, spec=ran.spec, rate_per_second=rate, window=Duration(seconds=60),
                time=timestamp(time.time()),
                allocation=CandidateAllocation(cores=cores, gpu_milli=1000, nodes=1, gpu_type=kind),
            )
            for kind, rate in RATES.items()
        ]  # fmt: skip
        answer = await ObservationServiceStub(mesh.channel("predictor")).Observe(ObserveRequest(observations=seen))
        assert answer.accepted == len(seen)

        first = await mesh.submit(gpus=1, model="bert")
        placed = (await mesh.reach(first, "RUNNING")).attempt.allocations
        assert [(one.node_id, one.gpu_type) for one in placed] == [("b-A100", "A100")]
        second = await mesh.submit(gpus=1, model="bert")
        assert (await mesh.reach(second, "RUNNING")).attempt.allocations[0].node_id == "a-T4"

        async def explained() -> bool:
            told = await mesh.jobs.ExplainJob(pb.ExplainJobRequest(id=second))
            return "runs on T4: 0.4 of its speed on A100; all A100 are taken" in told.summary

        await eventually(explained)
