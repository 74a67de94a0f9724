"""Which field of a request is large."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from cotenant.codec import request_bytes, request_limits
from cotenant.codec.errors import Problem
from cotenant.codec.largest_fields import largest_fields
from cotenant.core.model import limits
from cotenant.v1 import job_pb2
from cotenant.v1 import job_service_pb2 as pb

CREATE = "/cotenant.v1.JobService/CreateJob"


def fields_of(message: Any) -> list[tuple[str, int]]:
    return [(one.path, one.size) for one in largest_fields(message.DESCRIPTOR, message.SerializeToString())]


def test_the_largest_fields_are_named_largest_first() -> None:
    request = pb.CreateJobRequest(request_id="r")
    for index in range(1_000):
        request.spec.environment[f"V{index:04}"] = "x" * 200
    request.spec.command.extend(["y" * 1_000] * 150)
    request.spec.name = "z" * 100
    assert fields_of(request) == [("spec.environment", 213_000), ("spec.command", 150_450)]


def test_an_error_names_the_field_and_the_limit() -> None:
    request = pb.CreateJobRequest(spec=job_pb2.JobSpec(environment={"A": "x" * limits.REQUEST_SPEC_BYTES_MAX}))
    with pytest.raises(Problem) as refused:
        request_bytes.check_bytes(CREATE, request.SerializeToString())
    assert [one.field for one in refused.value.violations] == ["request", "spec.environment"]
    assert refused.value.violations[1].description == "has 327,691 bytes, of 327,680 allowed for the whole request"


def test_a_spec_that_is_too_large_names_its_fields_too() -> None:
    spec = job_pb2.JobSpec(command=["true"], environment={"A": "x" * limits.SPEC_BYTES_MAX})
    assert [(one.field, one.description) for one in request_limits.spec_violations(spec)] == [
        ("spec", "has 262,161 bytes; 262,144 are allowed at most"),
        ("spec.environment", "has 262,155 bytes, of 262,144 allowed for the spec"),
    ]


def test_a_field_that_only_newer_clients_know_is_named_by_its_number() -> None:
    assert [one.path for one in largest_fields(pb.GetJobRequest.DESCRIPTOR, b"\xfa\x3f\x7f" + b"x" * 127)] == [
        "field 1023"
    ]


def test_no_message_takes_long() -> None:
    """4 MiB of the smallest fields, and of messages in messages; others are as large as a server reads."""
    nested = b"\x0a\x00" * 2**21
    for data in (b"\x08\x01" * 2**21, nested, b"\x0a" + b"\xfe\xff\xff\x01" + nested[: 2**22 - 130]):
        begin = time.thread_time()
        found = largest_fields(pb.CreateJobRequest.DESCRIPTOR, data)
        assert time.thread_time() - begin < 0.1
        assert all(not one.complete for one in found)


def test_damaged_messages_name_no_field() -> None:
    drawn = random.Random(7)
    for size in (1, 10, 1_000):
        for _ in range(2_000):
            largest_fields(pb.CreateJobRequest.DESCRIPTOR, drawn.randbytes(size))
    with pytest.raises(Problem) as refused:
        request_bytes.check_bytes(CREATE, b"\x07" * (limits.REQUEST_SPEC_BYTES_MAX + 1))
    assert [one.field for one in refused.value.violations] == ["request"]
