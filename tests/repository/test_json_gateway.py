"""A JSON gateway and an OpenAPI document are generated from the protos by the plug-ins of grpc-gateway."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.compiler import plugin_pb2
from tools import protos

from cotenant.transcoding import api_model

OPENAPI, GATEWAY = "protoc-gen-swagger", "protoc-gen-grpc-gateway"
PUBLIC = "cotenant/v1/"


def generated(plugin: str, options: str) -> Mapping[str, str]:
    """Return the files that a plug-in of protoc makes of the public API, by name."""
    path = shutil.which(plugin)
    if path is None:
        pytest.skip(f"no {plugin}; on Debian: apt-get install golang-grpc-gateway")
    files = protos.descriptors().file
    packages = ",".join(f"M{file.name}=example.com/{file.name.rpartition('/')[0]}" for file in files)
    request = plugin_pb2.CodeGeneratorRequest(
        file_to_generate=[file.name for file in files if file.name.startswith(PUBLIC)],
        parameter=f"{options},{packages}",
        proto_file=files,
    )
    done = subprocess.run([path], input=request.SerializeToString(), capture_output=True, check=True)
    response = plugin_pb2.CodeGeneratorResponse.FromString(done.stdout)
    assert not response.error
    return {file.name: file.content for file in response.file}


@pytest.fixture(scope="module")
def openapi() -> Mapping[str, Any]:
    (text,) = generated(OPENAPI, "allow_merge=true,merge_file_name=cotenant").values()
    document: Mapping[str, Any] = json.loads(text)
    return document


def rules() -> set[tuple[str, str, str]]:
    methods = [method for service in api_model.load(protos.descriptors()).services for method in service.methods]
    return {(method.name, method.http.verb, method.http.path) for method in methods if method.http}


def test_the_openapi_document_has_every_method(openapi: Mapping[str, Any]) -> None:
    found = {
        (operation["operationId"], verb.upper(), path)
        for path, verbs in openapi["paths"].items()
        for verb, operation in verbs.items()
    }
    assert found == rules()


def test_filters_and_pages_are_query_parameters(openapi: Mapping[str, Any]) -> None:
    given = {one["name"] for one in openapi["paths"]["/v1/jobs"]["get"]["parameters"] if one["in"] == "query"}
    assert {"filter.phases", "filter.tenant", "page_size", "page_token"} <= given


def test_an_update_takes_the_job_as_its_body(openapi: Mapping[str, Any]) -> None:
    given = openapi["paths"]["/v1/jobs/{job.id}"]["patch"]["parameters"]
    (body,) = [one for one in given if one["in"] == "body"]
    assert body["schema"] == {"$ref": "#/definitions/v1Job"}


def test_comments_are_descriptions(openapi: Mapping[str, Any]) -> None:
    fields = openapi["definitions"]["v1CreateJobRequest"]["properties"]
    assert "idempotency key" in fields["request_id"]["description"]


def test_the_gateway_routes_every_method() -> None:
    text = "".join(generated(GATEWAY, "allow_patch_feature=false").values())
    routed = re.findall(r"mux\.Handle\(\"([A-Z]+)\", pattern_(\w+?)_(\w+?)_0,", text)
    assert {(name, verb) for verb, _, name in routed} == {(name, verb) for name, verb, _ in rules()}
