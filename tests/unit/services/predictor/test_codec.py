"""How long a job has run, as a query tells the predictor."""

from __future__ import annotations

import pytest

from cotenant.codec.specs import duration
from cotenant.services.predictor.codec import query_of
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb


def spec(gpu_milli: int) -> job_pb2.JobSpec:
    resources = resources_pb2.ResourceRequest(gpu_milli=gpu_milli, cores=2)
    return job_pb2.JobSpec(model="bert", roles=[job_pb2.Role(name="worker", replicas=2, resources=resources)])


@pytest.mark.parametrize("gpu_milli", [0, 500])
def test_the_run_time_is_as_told_with_and_without_gpus(gpu_milli: int) -> None:
    query = pb.EstimateQuery(spec=spec(gpu_milli), attained_gpu_seconds=7.0, run_time=duration(60))
    assert query_of(query).run_seconds == 60


def test_an_older_queue_tells_only_the_attained_gpu_seconds() -> None:
    assert query_of(pb.EstimateQuery(spec=spec(500), attained_gpu_seconds=40.0)).run_seconds == 40
    assert query_of(pb.EstimateQuery(spec=spec(0))).run_seconds == 0


def test_a_negative_run_time_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="run_time"):
        query_of(pb.EstimateQuery(spec=spec(500), run_time=duration(-1)))
