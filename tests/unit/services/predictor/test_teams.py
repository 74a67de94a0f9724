"""Parameter servers through the API: from the job's role `ps`, or from a candidate."""

from __future__ import annotations

import pytest
from tests.unit.services.predictor.conftest import window

from cotenant.core.model.estimate import Candidate
from cotenant.services.predictor.codec import observation_of, query_of
from cotenant.v1 import job_pb2, resources_pb2
from cotenant.v1 import predictor_service_pb2 as pb


def spec() -> job_pb2.JobSpec:
    worker = job_pb2.Role(
        name="worker", replicas=4, resources=resources_pb2.ResourceRequest(gpu_milli=1000, cores=4, gpu_type="A100")
    )
    server = job_pb2.Role(name="ps", replicas=2, resources=resources_pb2.ResourceRequest(cores=3))
    return job_pb2.JobSpec(model="dnn", roles=[worker, server])


def test_a_window_has_the_jobs_server_layout() -> None:
    assert observation_of(window(spec=spec())).allocation == Candidate(4, 1000, 1, "", 4, 2, 3)


def test_a_query_without_candidates_is_about_the_jobs_request() -> None:
    assert query_of(pb.EstimateQuery(spec=spec())).candidates == (Candidate(4, 1000, 1, "A100", 4, 2, 3),)


def test_a_candidate_may_have_another_server_layout() -> None:
    asked = [
        pb.CandidateAllocation(cores=2, servers=3),
        pb.CandidateAllocation(cores=2, workers=5, servers=1, server_cores=8),
    ]
    told = query_of(pb.EstimateQuery(spec=spec(), candidates=asked)).candidates
    assert told == (Candidate(2, 0, 1, "", 4, 3, 3), Candidate(2, 0, 1, "", 5, 1, 8))


def test_a_job_without_parameter_servers_has_no_server_layout() -> None:
    assert observation_of(window()).allocation == Candidate(4, 1000)


@pytest.mark.parametrize("field", ["workers", "servers", "server_cores"])
def test_an_invalid_server_layout_is_rejected(field: str) -> None:
    wrong = pb.CandidateAllocation(cores=2)
    setattr(wrong, field, -1)
    with pytest.raises(ValueError, match=f"{field} is -1"):
        query_of(pb.EstimateQuery(spec=spec(), candidates=[wrong]))
