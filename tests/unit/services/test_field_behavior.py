"""The services do what google.api.field_behavior says about fields."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.api import field_behavior_pb2
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from tests.unit.services.mesh import Mesh, running, spec

from cotenant.codec.errors import from_error
from cotenant.v1 import job_pb2, job_service_pb2, node_service_pb2, predictor_service_pb2, tenant_service_pb2

SERVED_BY = {
    "queue": (job_service_pb2, tenant_service_pb2),
    "placement": (node_service_pb2,),
    "predictor": (predictor_service_pb2,),
}
METHODS = [
    (served_by, method)
    for served_by, files in SERVED_BY.items()
    for file in files
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if not method.client_streaming
]


def required(message: Descriptor) -> bool:
    behavior = field_behavior_pb2.field_behavior
    return any(field_behavior_pb2.REQUIRED in field.GetOptions().Extensions[behavior] for field in message.fields)


async def refused(mesh: Mesh, served_by: str, method: MethodDescriptor) -> bool:
    """Return whether a method refuses an empty request because of what is in it."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    request, answer = GetMessageClass(method.input_type)(), GetMessageClass(method.output_type)
    channel: Any = mesh.channel(served_by)
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = kind(path, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString)
    try:
        await (anext(aiter(call(request))) if method.server_streaming else call(request))
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
            return True
        raise
    return False


async def test_a_method_refuses_an_empty_request_if_a_field_is_required_and_only_then() -> None:
    async with running() as mesh:
        await mesh.agent("n1")
        found = {method.name: await refused(mesh, served_by, method) for served_by, method in METHODS}
    assert found == {method.name: required(method.input_type) for _, method in METHODS}
    assert sum(found.values()) > 15


async def test_a_job_needs_a_role_and_cannot_set_what_the_queue_sets() -> None:
    async with running() as mesh:
        for wrong, field in (
            (job_pb2.JobSpec(command=["true"]), "spec.roles"),
            (spec(dependencies=[job_pb2.Dependency()]), "spec.dependencies[0].id"),
            (spec(array=job_pb2.ArraySpec()), "spec.array"),
            (spec(array_task=job_pb2.ArrayTask(array_id="a")), "spec.array_task"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await mesh.jobs.CreateJob(job_service_pb2.CreateJobRequest(spec=wrong))
            assert any(one.field.startswith(field) for one in from_error(error.value).violations), str(error.value)
