"""Records of services are decoded as events."""

from __future__ import annotations

import pytest

from cotenant.core.model.lifecycle import Phase
from cotenant.history.events import JobPut, NodePut
from cotenant.history.stored import commit_of
from cotenant.storage.v1 import records_pb2
from cotenant.store.port import Change, Changes
from cotenant.v1 import job_pb2, node_service_pb2


def read(key: str, record: records_pb2.StoredJob | records_pb2.StoredNode) -> object:
    (change,) = commit_of(Changes(7, (Change(key, record.SerializeToString(), 7),))).changes
    return change


def test_a_job_is_decoded_with_its_priority() -> None:
    job = job_pb2.Job(id="a", phase=job_pb2.JOB_PHASE_QUEUED, spec=job_pb2.JobSpec(priority=-3))
    stored = records_pb2.StoredJob(job=job, request_ids=["r"])
    assert read("queue/jobs/a", stored) == JobPut("a", Phase.QUEUED, ("r",), 0, -3)


@pytest.mark.parametrize(
    ("state", "takes_work"),
    [
        (node_service_pb2.NODE_STATE_READY, True),
        (node_service_pb2.NODE_STATE_UNSPECIFIED, True),
        (node_service_pb2.NODE_STATE_CORDONED, False),
        (node_service_pb2.NODE_STATE_DRAINING, False),
    ],
)
def test_a_node_accepts_work_unless_an_operator_forbids_it(
    state: node_service_pb2.NodeState.ValueType, takes_work: bool
) -> None:
    stored = records_pb2.StoredNode(node=node_service_pb2.Node(id="n", state=state))
    assert read("placement/nodes/n", stored) == NodePut("n", takes_work)
