"""The OpenAPI document: every method, every field, no dangling reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cotenant.transcoding import openapi, shipped_protos

API = shipped_protos.api()
DOCUMENT = openapi.document(API)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, verbs in DOCUMENT["paths"].items():
        for verb, operation in verbs.items():
            yield verb, path, operation


def test_it_has_every_method_but_those_with_a_stream_of_requests() -> None:
    methods = {method.name for service in API.services for method in service.methods if not method.client_streams}
    assert {operation["operationId"] for _, _, operation in operations()} == methods
    assert "OpenSession" not in methods


def test_a_path_is_listed_once_with_all_its_verbs() -> None:
    assert set(DOCUMENT["paths"]["/v1/jobs/{id}"]) == {"get", "patch"}


def test_every_reference_leads_to_a_schema_and_every_schema_is_used() -> None:
    text = json.dumps(DOCUMENT)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used == set(DOCUMENT["components"]["schemas"])


def test_comments_describe_operations_parameters_and_fields() -> None:
    for verb, path, operation in operations():
        assert operation["description"], f"{verb} {path}"
        assert all(one["description"] for one in operation["parameters"]), f"{verb} {path}"
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert schema["description"], name


def test_filters_pages_and_masks_are_query_parameters() -> None:
    listed = {one["name"] for one in DOCUMENT["paths"]["/v1/jobs"]["get"]["parameters"]}
    assert {"filter.phases", "filter.createdSince", "pageSize", "pageToken"} <= listed
    patched = {one["name"]: one for one in DOCUMENT["paths"]["/v1/jobs/{id}"]["patch"]["parameters"]}
    assert patched["updateMask"]["required"]
    assert patched["id"]["in"] == "path"


def test_a_body_lacks_what_is_in_the_path() -> None:
    body = DOCUMENT["paths"]["/v1/jobs/{id}:cancel"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"requestId", "etag"}
    created = DOCUMENT["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert created["required"] == ["spec"]
