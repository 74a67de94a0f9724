"""Requests from HTTP, by protobuf's JSON mapping."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from cotenant.transcoding import shipped_protos
from cotenant.transcoding.answer_json import to_json
from cotenant.transcoding.http_errors import HttpError
from cotenant.transcoding.http_routes import Routes
from cotenant.transcoding.request_json import PARAMETERS_MAX, VALUES_MAX, body_bytes_max, read_json, read_request
from cotenant.v1.job_pb2 import JobPhase, JobSpec
from cotenant.v1.job_service_pb2 import CreateJobRequest, ListJobsRequest

ROUTES = Routes(shipped_protos.api())
SECONDS_MAX = 5.0  # of one processor; it takes a tenth of that


def read(verb: str, path: str, query: str = "", body: Any = None) -> Any:
    route, variables = ROUTES.find(verb, path)
    text = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(route, variables, query.encode(), text)


def refused(verb: str, path: str, query: str = "", body: Any = None) -> dict[str, str]:
    """Return what a refusal says of each field."""
    with pytest.raises(HttpError) as caught:
        read(verb, path, query, body)
    assert caught.value.status == 400
    return {violation.field: violation.description for violation in caught.value.problem.violations}


def test_a_body_is_the_request_with_the_variables_of_the_path() -> None:
    found = read("POST", "/v1/jobs/17:cancel", body={"requestId": "a", "etag": "7"})
    assert (found.id, found.request_id, found.etag) == ("17", "a", "7")
    assert read("POST", "/v1/jobs/17:cancel").id == "17"


def test_a_body_may_be_one_field_of_the_request() -> None:
    found = read("PATCH", "/v1/jobs/17", "updateMask=spec.priority,spec.labels", {"spec": {"priority": 3}})
    assert (found.job.id, found.job.spec.priority) == ("17", 3)
    assert list(found.update_mask.paths) == ["spec.priority", "spec.labels"]


def test_query_parameters_are_fields_by_either_name() -> None:
    found = read(
        "GET",
        "/v1/jobs",
        "filter.phases=JOB_PHASE_RUNNING&filter.phases=JOB_PHASE_QUEUED&filter.labels[team]=vision&page_size=7"
        "&filter.standaloneOnly=true&filter.created_since=2026-01-31T12:00:00Z",
    )
    wanted = ListJobsRequest(page_size=7)
    wanted.filter.phases.extend([JobPhase.JOB_PHASE_RUNNING, JobPhase.JOB_PHASE_QUEUED])
    wanted.filter.labels["team"] = "vision"
    wanted.filter.standalone_only = True
    wanted.filter.created_since.FromJsonString("2026-01-31T12:00:00Z")
    assert found == wanted


def test_each_bad_query_parameter_is_named() -> None:
    query = "filter.phases=RUNNING&filter.lab=b&pageSize=x&pageSize=4&filter=1&filter.ownOnly=1&filter.tenant.x=1"
    assert refused("GET", "/v1/jobs", query) == {
        "filter.lab": "unknown query parameter; did you mean labels?",
        "pageSize": "is given twice",
        "filter": "is an object; name one of its fields",
        "filter.ownOnly": "must be true or false, not '1'",
        "filter.tenant.x": "tenant has no fields",
    }
    assert "JOB_PHASE_RUNNING" in refused("GET", "/v1/jobs", "filter.phases=RUNNING")["filter.phases[0]"]
    assert "belongs into the body" in refused("POST", "/v1/jobs", "requestId=a")["requestId"]
    assert "UTF-8" in refused("GET", "/v1/jobs", "pageToken=%ff")["query"]
    assert f"{PARAMETERS_MAX:,}" in refused("GET", "/v1/jobs", "a&" * (PARAMETERS_MAX + 2))["query"]


def test_each_bad_field_of_a_body_is_named() -> None:
    spec = {
        "nam": "x",
        "command": "x",
        "labels": {"a": 1},
        "priority": "high",
        "preemptible": 1,
        "deadline": "noon",
        "grace": 5,
        "kind": "JOB_KIND_TRANING",
        "roles": [{"replicas": 1.5}, 7],
        "retriesMax": None,
    }
    assert refused("POST", "/v1/jobs", body={"spec": spec, "request_id": 5}) == {
        "spec.nam": "unknown field; did you mean name?",
        "spec.command": "must be a list, not 'x'",
        "spec.labels[a]": "must be a string of Unicode characters, not 1",
        "spec.priority": "must be a whole number of 32 bits, not 'high'",
        "spec.preemptible": "must be true or false, not 1",
        "spec.deadline": "must be a time such as 2026-01-31T12:00:00Z, not 'noon'",
        "spec.grace": "must be a duration in seconds, such as 90s, not 5",
        "spec.kind": refused("POST", "/v1/jobs", body={"spec": {"kind": "JOB_KIND_TRANING"}})["spec.kind"],
        "spec.roles[0].replicas": "must be a whole number of 32 bits, not 1.5",
        "spec.roles[1]": "must be an object, not 7",
        "request_id": "must be a string of Unicode characters, not 5",
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"spec":', "at line 1, column 9"),
        (b"[]", "a JSON object"),
        (b"7", "a JSON object"),
        (b"\xff", "UTF-8"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"spec": NaN}', "in quotes"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"spec":' * 100_001, "values"),
        (b"9" * 100_000, "digits"),
        (b'{"\\ud800": 1}', "surrogate"),
        (b'{"spec": {"name": "\\udfff"}}', "surrogate"),
    ],
    ids=["cut", "list", "number", "bytes", "twice", "NaN", "lists", "objects", "digits", "name", "text"],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        read("POST", "/v1/jobs", body=body)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert read("POST", "/v1/jobs", body=b'{"spec": {"name": "\\ud83d\\ude00"}}').spec.name == "\U0001f600"


def test_a_value_in_the_path_is_not_contradicted() -> None:
    assert refused("POST", "/v1/jobs/17:cancel", body={"id": "18"}) == {"id": "is '17' in the path, and '18' elsewhere"}
    assert read("POST", "/v1/jobs/17:cancel", body={"id": "17"}).id == "17"


def test_a_method_without_a_body_refuses_one() -> None:
    assert "takes none" in refused("GET", "/v1/jobs/17", body={"id": "17"})["body"]


def test_a_job_that_fits_its_limit_in_bytes_fits_as_json() -> None:
    spec = JobSpec(command=["\x01" * 20_000])
    route, _ = ROUTES.find("POST", "/v1/jobs")
    assert len(to_json(CreateJobRequest(spec=spec))) < body_bytes_max(route)


@pytest.mark.parametrize(
    "body",
    [
        b'{"spec":{"command":[' + b'"",' * (VALUES_MAX - 10) + b'""]}}',
        b'{"spec":{"command":[' + b"1," * (VALUES_MAX - 10) + b"1]}}",
        b'{"spec":{' + b",".join(b'"k%d":1' % n for n in range(VALUES_MAX // 2 - 10)) + b"}}",
        b'{"spec":{' + b",".join(b'"k%d":1' % (n // 2) for n in range(VALUES_MAX // 2 - 10)) + b"}}",
    ],
    ids=["strings", "numbers", "fields", "twice"],
)
def test_the_largest_bodies_take_bounded_time(body: bytes) -> None:
    began = time.process_time()
    with contextlib.suppress(HttpError):
        read("POST", "/v1/jobs", body=body)
    assert time.process_time() - began < SECONDS_MAX


texts = st.text(max_size=8)
specs = st.builds(
    JobSpec,
    name=texts,
    command=st.lists(texts, max_size=3),
    environment=st.dictionaries(texts, texts, max_size=3),
    priority=st.integers(-(2**31), 2**31 - 1),
    steps_total=st.integers(-(2**63), 2**63 - 1),
    preemptible=st.none() | st.booleans(),
)


@given(specs, texts)
def test_what_is_written_is_read_as_protobuf_reads_it(spec: JobSpec, request_id: str) -> None:
    request = CreateJobRequest(spec=spec, request_id=request_id)
    assert read("POST", "/v1/jobs", body=to_json(request)) == request
    assert json_format.Parse(to_json(request), CreateJobRequest()) == request


def test_a_large_answer_is_the_same_json() -> None:
    spec = JobSpec(command=["é" * 20_000], environment={"a": "\n"})
    assert json.loads(to_json(spec)) == json_format.MessageToDict(spec)
    assert read_json(to_json(spec))["command"] == list(spec.command)
