"""Which method a request calls."""

from __future__ import annotations

import pytest

from cotenant.transcoding import shipped_protos
from cotenant.transcoding.http_errors import HttpError
from cotenant.transcoding.http_routes import Routes

ROUTES = Routes(shipped_protos.api())


@pytest.mark.parametrize(
    ("verb", "path", "method", "variables"),
    [
        ("GET", "/v1/jobs", "ListJobs", {}),
        ("GET", "/v1/jobs:watch", "WatchJobs", {}),
        ("GET", "/v1/jobs/17", "GetJob", {"id": "17"}),
        ("PATCH", "/v1/jobs/17", "UpdateJob", {"job.id": "17"}),
        ("POST", "/v1/jobs/17:cancel", "CancelJob", {"id": "17"}),
        ("GET", "/v1/jobs/17/logs", "ReadLogs", {"id": "17"}),
        ("GET", "/v1/jobs/a%2Fb%3Acancel", "GetJob", {"id": "a/b:cancel"}),
        ("GET", "/v1/nodes/rack:7", "GetNode", {"id": "rack:7"}),
        ("POST", "/v1/nodes/a:b:drain", "DrainNode", {"id": "a:b"}),
        ("POST", "/v1/nodes/n/gpus/GPU-1:release", "ReleaseGpu", {"id": "n", "gpu_uuid": "GPU-1"}),
    ],
)
def test_a_request_calls_one_method(verb: str, path: str, method: str, variables: dict[str, str]) -> None:
    route, found = ROUTES.find(verb, path)
    assert (route.method.name, found) == (method, variables)


def test_every_method_with_a_rule_is_found_by_its_template() -> None:
    assert len(ROUTES.all) == sum(len(service.methods) for service in shipped_protos.api().services)
    for one in ROUTES.all:
        assert ROUTES.find(one.verb, one.template)[0] is one


@pytest.mark.parametrize(
    ("verb", "path", "status", "words"),
    [
        ("GET", "/v1/job", 404, "did you mean /v1/jobs"),
        ("GET", "/", 404, "/openapi.json"),
        ("GET", "/v1/jobs/", 404, "no method"),
        ("DELETE", "/v1/jobs/17", 405, "GET or PATCH"),
        ("GET", "/v1/jobs/17:cancel", 405, "POST"),
        ("GET", "/v1/jobs/%ff", 400, "UTF-8"),
        ("GET", "/v1/jobs/" + "a" * 5000, 400, "4096"),
        ("X" * 9999, "/v1/jobs", 405, "GET or POST"),
    ],
)
def test_another_request_is_refused(verb: str, path: str, status: int, words: str) -> None:
    with pytest.raises(HttpError, match=words) as caught:
        ROUTES.find(verb, path)
    assert caught.value.status == status
    assert len(str(caught.value)) < 1000
    assert ("allow" in caught.value.headers) == (status == 405)
