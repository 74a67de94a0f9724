"""The public API as an OpenAPI 3.1 document, from descriptors: the HTTP rules, the fields, and the comments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType
from typing import Any

from cotenant.transcoding.api_model import Api, ApiField, ApiMessage, ApiMethod, ApiService
from cotenant.transcoding.http_errors import HTTP_STATUS
from cotenant.transcoding.http_routes import VARIABLE, VARIABLE_LENGTH_MAX

Schema = dict[str, Any]

JSON, LINES = "application/json", "application/x-ndjson"
STATUS = "google.rpc.Status"
PATH = "/openapi.json"
INT_32, UINT_32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
SCALARS: Mapping[str, Schema] = MappingProxyType(
    {
        "string": {"type": "string"},
        "bool": {"type": "boolean"},
        "bytes": {"type": "string", "contentEncoding": "base64"},
        "double": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
        "float": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
        **{
            name: {"type": "integer", "format": "int32", "minimum": INT_32[0], "maximum": INT_32[1]}
            for name in ("int32", "sint32", "sfixed32")
        },
        **{
            name: {"type": "integer", "format": "int64", "minimum": UINT_32[0], "maximum": UINT_32[1]}
            for name in ("uint32", "fixed32")
        },
        **{  # strings, as JavaScript has no integers of 64 bits
            name: {"type": "string", "format": "int64", "pattern": "^-?(0|[1-9][0-9]{0,17})$"}
            for name in ("int64", "sint64", "sfixed64")
        },
        **{
            name: {"type": "string", "format": "uint64", "pattern": "^(0|[1-9][0-9]{0,18})$"}
            for name in ("uint64", "fixed64")
        },
        "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
        "google.protobuf.Duration": {"type": "string", "pattern": r"^-?[0-9]{1,11}(\.[0-9]{1,9})?s$"},
        "google.protobuf.FieldMask": {"type": "string"},
    }
)
ERROR: Schema = {
    "type": "object",
    "description": "An error: google.rpc.Status. The reason in its ErrorInfo is stable, the message is for people.",
    "properties": {
        "code": {"type": "integer", "format": "int32", "description": "The code of google.rpc.Code."},
        "message": {"type": "string"},
        "details": {
            "type": "array",
            "items": {"type": "object", "properties": {"@type": {"type": "string"}}, "required": ["@type"]},
            "description": "google.rpc.ErrorInfo, google.rpc.BadRequest with each bad field, google.rpc.RetryInfo.",
        },
    },
    "required": ["code", "message"],
}


def document(api: Api) -> Schema:
    """Return the document."""
    requests = set(api.reached(*(method.request for _, method in offered(api))))
    paths: dict[str, dict[str, Any]] = {}
    for service, method in offered(api):
        assert method.http
        paths.setdefault(_path(method.http.path), {})[method.http.verb.lower()] = _operation(api, service, method)
    schemas = _schemas(api, paths, requests)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Cotenant",
            "version": metadata.version("cotenant"),
            "description": "The public API of Cotenant as JSON over HTTP. Each call needs an API token.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "tags": [{"name": service.name, "description": service.comment} for service in api.services],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**dict(sorted(schemas.items())), STATUS: ERROR},
        },
    }


def _schemas(api: Api, paths: Any, requests: Collection[str]) -> dict[str, Schema]:
    """Return the schemas that paths refer to, and those that these refer to."""
    found: dict[str, Schema] = {}
    waiting = _references(paths)
    while waiting:
        name = waiting.pop()
        if name not in found and name != STATUS:
            full_name = f"{api.package}.{name}"
            found[name] = _schema(api, full_name, closed=full_name in requests)
            waiting += _references(found[name])
    return found


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for one in value for name in _references(one)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"].rpartition("/")[2]] if isinstance(value.get("$ref"), str) else []
    return own + [name for one in value.values() for name in _references(one)]


def offered(api: Api) -> Iterator[tuple[ApiService, ApiMethod]]:
    """Yield the methods that HTTP can call: all but those whose requests are streams."""
    for service in api.services:
        for method in service.methods:
            if method.http and not method.client_streams:
                yield service, method


def _path(template: str) -> str:
    """Return a path with the names of its parameters; OpenAPI knows no fields of fields.

    >>> _path("/v1/jobs/{job.id}"), _path("/v1/nodes/{id}/gpus/{gpu_uuid}:release")
    ('/v1/jobs/{id}', '/v1/nodes/{id}/gpus/{gpuUuid}:release')
    """
    return VARIABLE.sub(lambda match: "{" + _variable(match[1]) + "}", template)


def _variable(path: str) -> str:
    return json_name(path.rpartition(".")[2])


def _operation(api: Api, service: ApiService, method: ApiMethod) -> Schema:
    assert method.http
    variables = VARIABLE.findall(method.http.path)
    operation: Schema = {
        "operationId": method.name,
        "tags": [service.name],
        "summary": _first_sentence(method.comment),
        "description": method.comment,
        "parameters": [
            *(_parameter(api, method, name) for name in variables),
            *_query(api, method, variables),
        ],
        "responses": {"200": _answer(api, method), "default": _error()},
    }
    if method.http.body:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _body(api, method, variables)}}}
    return operation


def _parameter(api: Api, method: ApiMethod, path: str) -> Schema:
    field = _at(api, method.request, path)
    return {
        "name": _variable(path),
        "in": "path",
        "required": True,
        "description": field.comment,
        "schema": {"type": "string", "minLength": 1, "maxLength": VARIABLE_LENGTH_MAX},
    }


def _query(api: Api, method: ApiMethod, variables: Sequence[str]) -> Iterator[Schema]:
    """Yield the fields that are neither in the path nor in the body."""
    assert method.http
    if method.http.body == "*":
        return
    left = [("", one) for one in api.messages[method.request].fields if one.name != method.http.body]
    while left:
        prefix, one = left.pop(0)
        path = f"{prefix}{one.name}"
        if path in variables:
            continue
        if one.is_message and one.type not in SCALARS and not one.key:
            left += [(f"{prefix}{json_name(one.name)}.", inner) for inner in api.messages[one.type].fields]
        elif not one.key:
            yield {
                "name": f"{prefix}{json_name(one.name)}",
                "in": "query",
                "required": "REQUIRED" in one.behaviors,
                "description": one.comment,
                "schema": _field(api, one),
            }


def _body(api: Api, method: ApiMethod, variables: Sequence[str]) -> Schema:
    assert method.http
    if method.http.body != "*":
        return _ref(api, _at(api, method.request, method.http.body).type)
    message = api.messages[method.request]
    return _object(api, message, [one for one in message.fields if one.name not in variables], closed=True)


def _answer(api: Api, method: ApiMethod) -> Schema:
    schema = _ref(api, method.response)
    if not method.server_streams:
        return {"description": api.messages[method.response].comment, "content": {JSON: {"schema": schema}}}
    line = {
        "oneOf": [
            {"type": "object", "properties": {"result": schema}, "required": ["result"]},
            {
                "type": "object",
                "properties": {"error": {"$ref": f"#/components/schemas/{STATUS}"}},
                "required": ["error"],
            },
        ]
    }
    return {
        "description": "A JSON object per line; one with an error is the last.",
        "content": {LINES: {"schema": {"type": "string"}, "x-line-schema": line}},
    }


def _error() -> Schema:
    codes = ", ".join(sorted({str(status) for status in HTTP_STATUS.values()} | {"405", "408", "413", "415"}))
    return {
        "description": f"An error. The status is one of {codes}.",
        "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{STATUS}"}}},
    }


def _schema(api: Api, name: str, *, closed: bool) -> Schema:
    if enum := api.enums.get(name):
        values = "\n".join(f"- `{value}`: {comment}" for value, comment in enum.values)
        return {
            "type": "string",
            "description": f"{enum.comment}\n\n{values}",
            "enum": [value for value, _ in enum.values],
        }
    message = api.messages[name]
    return _object(api, message, message.fields, closed=closed)


def _object(api: Api, message: ApiMessage, fields: Sequence[ApiField], *, closed: bool) -> Schema:
    """Return the schema of a message. Of one that callers send, other fields are refused."""
    required = [json_name(one.name) for one in fields if "REQUIRED" in one.behaviors]
    return {
        "type": "object",
        "description": message.comment,
        "properties": {json_name(one.name): _described(api, one) for one in fields},
        **({"required": required} if required and closed else {}),
        **({"additionalProperties": False} if closed else {}),
    }


def _described(api: Api, one: ApiField) -> Schema:
    extra = {"readOnly": True} if "OUTPUT_ONLY" in one.behaviors else {}
    return {**_field(api, one), "description": one.comment, **extra}


def _field(api: Api, one: ApiField) -> Schema:
    schema = dict(SCALARS[one.type]) if one.type in SCALARS else _ref(api, one.type)
    if one.key:
        return {"type": "object", "additionalProperties": schema}
    return {"type": "array", "items": schema} if one.repeated else schema


def _ref(api: Api, name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{_short(api, name)}"}


def _short(api: Api, name: str) -> str:
    return name.removeprefix(f"{api.package}.")


def _at(api: Api, message: str, path: str) -> ApiField:
    first, _, rest = path.partition(".")
    found = next(one for one in api.messages[message].fields if one.name == first)
    return _at(api, found.type, rest) if rest else found


def json_name(name: str) -> str:
    """Return the name of a field in JSON.

    >>> json_name("next_page_token")
    'nextPageToken'
    """
    first, *others = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in others)


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].removesuffix(".")
