"""Clients of other languages against a live mesh: JSON over HTTP, its OpenAPI document, and the client for Node."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from tests.end_to_end.meshes import Mesh
from tests.end_to_end.waiting import until
from tests.support.paths import ROOT

SCHEMATHESIS = shutil.which("schemathesis", path=f"{ROOT / '.cotenant/schemathesis/bin'}:{os.environ.get('PATH', '')}")
TYPESCRIPT = ROOT / "clients" / "typescript"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method,ignored_auth"
)
EXAMPLES = os.environ.get("COTENANT_API_EXAMPLES", "2")  # per operation; `make test-api` has more
SECONDS_MAX = 60.0

pytestmark = pytest.mark.group("gateway")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A mesh with a gateway."""
    shared = Mesh(tmp_path_factory.mktemp("mesh"), "--gpus", "fake:4", "--gateway", "127.0.0.1:0")
    try:
        shared.start()
        yield shared
    finally:
        shared.close()


class Http:
    """A caller with a token."""

    def __init__(self, base: str, token: str) -> None:
        self.base, self.token = base, token

    def __call__(self, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        try:
            with self.open(verb, path, body) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def open(self, verb: str, path: str, body: Any = None) -> Any:
        """Open an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=verb)
        return urllib.request.urlopen(request, timeout=SECONDS_MAX)

    def results(self, path: str) -> Iterator[Any]:
        """Yield the messages of a stream."""
        with self.open("GET", path) as lines:
            for line in lines:
                yield json.loads(line)["result"]


@pytest.fixture(scope="module")
def http(mesh: Mesh) -> Http:
    found = re.search(r"^gateway: (\S+)/$", mesh.log.read_text(), re.MULTILINE)
    assert found
    return Http(found[1], (mesh.state_dir / "token").read_text().strip())


def job(name: str, script: str) -> dict[str, Any]:
    """Return the body that submits a shell script."""
    role = {"replicas": 1, "resources": {"cores": 1}}
    return {"spec": {"name": name, "roles": [role], "command": ["sh", "-c", script]}}


def submitted(http: Http, name: str, script: str) -> str:
    status, answer = http("POST", "/v1/jobs", job(name, script))
    assert status == 200, answer
    return str(answer["job"]["id"])


def test_a_job_is_submitted_followed_and_read(http: Http) -> None:
    job_id = submitted(http, "json", "echo one; echo two")
    pieces = [piece.get("data", "") for piece in http.results(f"/v1/jobs/{job_id}/logs?follow=true&rank=0")]
    assert b"".join(map(base64.b64decode, pieces)) == b"one\ntwo\n"
    phases = [
        one["phase"]
        for message in http.results(f"/v1/jobs:watch?filter.ids={job_id}&untilEnded=true")
        for one in message.get("jobs", ())
    ]
    assert phases[-1] == "JOB_PHASE_SUCCEEDED"
    assert http("GET", f"/v1/jobs?filter.ids={job_id}")[1]["jobs"][0]["spec"]["name"] == "json"


def test_a_job_is_changed_and_cancelled(http: Http) -> None:
    job_id = submitted(http, "changed", "sleep 1000")
    status, answer = http("PATCH", f"/v1/jobs/{job_id}?updateMask=spec.priority", {"spec": {"priority": 3}})
    assert (status, answer["job"]["spec"]["priority"]) == (200, 3)
    assert http("POST", f"/v1/jobs/{job_id}:cancel", {})[0] == 200
    until(lambda: http("GET", f"/v1/jobs/{job_id}")[1]["job"]["phase"] == "JOB_PHASE_CANCELLED", "its end")


def test_a_bad_job_names_each_bad_field(http: Http) -> None:
    status, answer = http("POST", "/v1/jobs", {"spec": {"nam": "x", "priority": "high"}})
    fields = [one["field"] for detail in answer["details"] for one in detail.get("fieldViolations", ())]
    assert (status, fields) == (400, ["spec.nam", "spec.priority"])


def test_another_tenants_job_does_not_exist(mesh: Mesh, http: Http) -> None:
    job_id = submitted(http, "mine", "true")
    made = mesh.cli("tokens", "create", "--role", "viewer", "--name", "eve", "--tenant", "other").out.split()
    eve = Http(http.base, made[-1])
    until(lambda: eve("GET", "/v1/jobs")[0] == 200, "the token is known")
    status, answer = eve("GET", f"/v1/jobs/{job_id}")
    assert (status, answer["details"][0]["reason"]) == (404, "JOB_NOT_FOUND")
    assert eve("GET", "/v1/jobs") == (200, {})
    assert eve("POST", "/v1/jobs", job("not hers", "true"))[0] == 403


def test_a_wrong_token_is_refused(http: Http) -> None:
    assert Http(http.base, "x" * 43)("GET", "/v1/jobs")[0] == 401


def test_the_document_is_the_one_that_the_command_prints(mesh: Mesh, http: Http) -> None:
    assert http("GET", "/openapi.json")[1] == json.loads(mesh.cli("openapi").out)


@pytest.mark.skipif(not SCHEMATHESIS, reason="schemathesis is not installed; `make test-api` installs it")
def test_schemathesis_finds_nothing(mesh: Mesh, http: Http) -> None:
    """Only streams are left out, which do not end. What needs an agent's token is refused, as the caller has none."""
    made = mesh.cli("tokens", "create", "--role", "operator", "--name", "tester").out.split()
    until(lambda: Http(http.base, made[-1])("GET", "/v1/jobs")[0] == 200, "the token is known")
    done = subprocess.run(
        [
            *(str(SCHEMATHESIS), "run", f"{http.base}/openapi.json", "--header", f"Authorization: Bearer {made[-1]}"),
            *(
                "--checks",
                CHECKS,
                "--max-examples",
                EXAMPLES,
                "--seed",
                "1",
                "--exclude-path-regex",
                "watch|logs|files$",
            ),
            *("--phases", "fuzzing" if EXAMPLES == "2" else "examples,coverage,fuzzing", "--request-timeout", "20"),
        ],
        cwd=mesh.directory,
        env={**mesh.cli.environment, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.skipif(
    not shutil.which("node") or not (TYPESCRIPT / "dist").exists(),
    reason="the client for Node is not built; `make test-typescript` builds it",
)
def test_the_client_for_node(mesh: Mesh, http: Http) -> None:
    done = subprocess.run(
        ["node", "--test", "test/"],
        cwd=TYPESCRIPT,
        env={**mesh.cli.environment, "COTENANT_ENDPOINT": mesh.address, "COTENANT_TOKEN": http.token},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "# skipped 0" in done.stdout
