"""How long a job has run and at which rate, as a query tells the predictor."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cotenant.codec.specs import duration
from cotenant.core.model.estimate import OwnRate
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


def own_rate(**fields: Any) -> pb.EstimateQuery:
    own = job_pb2.OwnRate(**{"rate_per_second": 2.0, "windows": 3, "spread": 0.1} | fields)
    return pb.EstimateQuery(spec=spec(500), progress=job_pb2.Progress(step=7, own_rate=own))


def test_a_jobs_own_rate_is_read_and_may_be_unknown() -> None:
    assert query_of(own_rate(gap=duration(4), silence=duration(9))).own_rate == OwnRate(2.0, 3, 0.1, 4.0, 9.0)
    assert query_of(own_rate(rate_per_second=0.0)).own_rate == OwnRate(0.0, 3, 0.1)
    assert query_of(pb.EstimateQuery(spec=spec(500))).own_rate is None


@pytest.mark.parametrize("figure", [math.nan, math.inf, -1.0, 1e-12])
def test_an_impossible_rate_is_refused(figure: float) -> None:
    with pytest.raises(ValueError, match=r"progress\.own_rate\.rate_per_second is"):
        query_of(own_rate(rate_per_second=figure))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"spread": math.nan}, "spread"),
        ({"spread": -1.0}, "spread"),
        ({"windows": -1}, "windows"),
        ({"gap": duration(-1)}, "gap"),
        ({"silence": duration(-1)}, "silence"),
    ],
)
def test_an_impossible_scatter_or_silence_is_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"progress\.own_rate\.{name} is"):
        query_of(own_rate(**fields))
