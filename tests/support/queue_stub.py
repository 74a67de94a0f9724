"""A client's stub of the queue: the calls for jobs and those for arrays on one object."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from cotenant.v1 import array_service_pb2 as arrays_pb
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as jobs_pb
from cotenant.v1.array_service_pb2_grpc import ArrayServiceStub
from cotenant.v1.job_service_pb2_grpc import JobServiceStub


def queue_stub(channel: Any) -> Any:
    """Return an object with the methods of JobService and ArrayService."""
    stub: Any = JobServiceStub(channel)
    vars(stub).update(vars(ArrayServiceStub(channel)))
    return stub


def creation_of(stub: Any, spec: job_pb2.JobSpec, request_id: str) -> tuple[Any, Message]:
    """Return the method and the request that create a job, or an array if the spec has indices."""
    if spec.HasField("array"):
        return stub.CreateArray, arrays_pb.CreateArrayRequest(spec=spec, request_id=request_id)
    return stub.CreateJob, jobs_pb.CreateJobRequest(spec=spec, request_id=request_id)


def change_of(stub: Any, wish: str, thing_id: str, *, array: bool, request_id: str = "") -> tuple[Any, Message]:
    """Return the method and the request that cancel, suspend or resume a job or an array.

    `wish` is "Cancel", "Suspend" or "Resume".
    """
    kind, messages = ("Array", arrays_pb) if array else ("Job", jobs_pb)
    request: Message = getattr(messages, f"{wish}{kind}Request")(id=thing_id, request_id=request_id)
    return getattr(stub, f"{wish}{kind}"), request
