"""Requests of the API from HTTP: path variables, query parameters and a JSON body, by protobuf's JSON mapping.

The work is bounded before it begins: a body has few enough values to be decoded in a moment. A body that protobuf
refuses is looked through again, field by field, so that the error names each bad field.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NoReturn
from urllib.parse import parse_qsl

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cotenant.codec import errors, request_bytes
from cotenant.codec.errors import Violation
from cotenant.core.model.limits import VIOLATIONS_MAX
from cotenant.core.model.validation import shown
from cotenant.core.spelling import did_you_mean
from cotenant.transcoding.http_errors import HttpError
from cotenant.transcoding.http_routes import Route, message_class

Json = dict[str, Any]

JSON_PER_BYTE = 2  # the bytes that a body may have for each byte of the encoded request: names, quotes, base64
SERVER_BYTES_MAX = 4 * 2**20  # of requests without a limit of their own
VALUES_MAX = 200_000  # of a body: 50 ms to parse at worst
PARAMETERS_MAX = 1_000
AS_TEXT = {  # messages that are strings in JSON
    "google.protobuf.Timestamp": "a time such as 2026-01-31T12:00:00Z",
    "google.protobuf.Duration": "a duration in seconds, such as 90s",
    "google.protobuf.FieldMask": "names of fields, such as spec.priority,spec.labels",
}
INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number of 32 bits from 0",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number of 64 bits from 0",
}
BOOLEANS = {"true": True, "false": False}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KEY = re.compile(r"([^\[\]]+)\[([^\[\]]*)\]")


def body_bytes_max(route: Route) -> int:
    """Return how many bytes the body of a request may have."""
    return JSON_PER_BYTE * (request_bytes.bytes_max(route.grpc_path) or SERVER_BYTES_MAX)


def read_request(route: Route, variables: Mapping[str, str], query: bytes, body: bytes) -> Any:
    """Return the message that a request stands for.

    Raises:
        HttpError: the body is not JSON, has too many values, or fields are unknown or bad; each is named.
    """
    values, violations = _from_query(route, query)
    values = _with_body(route, values, body)
    violations += _set_variables(route, values, variables)
    if violations:
        _refuse(violations)
    message = route.request()
    try:
        json_format.ParseDict(values, message)
    except (json_format.ParseError, RecursionError) as error:
        found = list(islice(_violations(route.request.DESCRIPTOR, values, ""), VIOLATIONS_MAX + 1))
        _refuse(found or [Violation("request", _plain(error))])
    return message


def _refuse(violations: list[Violation]) -> NoReturn:
    raise HttpError(errors.invalid(violations))


# Where values come from -----------------------------------------------------------------------------------------------


def _with_body(route: Route, values: Json, body: bytes) -> Json:
    if not body.strip():
        return values
    if not route.body:
        _refuse([Violation("body", f"{route.method.name} takes none; use query parameters")])
    given = read_json(body)
    if not isinstance(given, dict):
        _refuse([Violation("body", f"must be a JSON object, not {_kind(given)}")])
    return given if route.body == "*" else {**values, route.body: given}


def read_json(body: bytes) -> Any:
    """Return the value of a JSON text.

    >>> read_json(b'{"id": "17"}')
    {'id': '17'}

    Raises:
        HttpError: it is not JSON, gives a key twice, or has too many values.
    """
    if sum(body.count(letter) for letter in b",[{:") > VALUES_MAX:
        _refuse([Violation("body", f"has more than {VALUES_MAX:,} values")])
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        _refuse([Violation("body", f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}")])
    except UnicodeDecodeError as error:
        _refuse([Violation("body", f"is not JSON: byte {error.start} is not UTF-8")])
    except UnicodeEncodeError:  # protobuf fails at names of this kind
        _refuse([Violation("body", "is not JSON that can be read: a string has half of a surrogate pair")])
    except RecursionError:
        _refuse([Violation("body", "is not JSON that can be read: it is nested too deeply")])
    except ValueError as error:
        _refuse([Violation("body", f"is not JSON that can be read: {error}")])
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(name)} is given twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} has to be in quotes")


def _from_query(route: Route, query: bytes) -> tuple[Json, list[Violation]]:
    """Return the query parameters as the fields that they stand for, and what is wrong with them."""
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX)
    except UnicodeDecodeError:
        _refuse([Violation("query", "is not UTF-8 when its percent encoding is decoded")])
    except ValueError:
        _refuse([Violation("query", f"has more than {PARAMETERS_MAX:,} parameters")])
    values: Json = {}
    violations = []
    for path, text in pairs:
        if reason := _set_parameter(route, values, path, text):
            violations.append(Violation(path[:200], reason))
    return values, violations


def _set_parameter(route: Route, values: Json, path: str, text: str) -> str:
    """Set the field that a query parameter names; return what is wrong with it, "" if nothing is."""
    kind: Descriptor = route.request.DESCRIPTOR
    *parents, last = path.split(".", 32)
    last, key = match.groups() if (match := _KEY.fullmatch(last)) else (last, None)
    if route.body == "*":
        return "is not a query parameter; it belongs into the body"
    for depth, name in enumerate((*parents, last)):
        field = _field(kind, name)
        if field is None or (depth == 0 and field.name == route.body):
            return f"unknown query parameter{did_you_mean(name, _names(kind))}"
        if depth == len(parents):
            return _set_value(field, values, key, text)
        if not _is_object(field) or field.is_repeated:
            return f"{name} has no fields"
        kind, values = _message(field), values.setdefault(field.name, {})
    return "names no field"


def _set_value(field: FieldDescriptor, values: Json, key: str | None, text: str) -> str:
    value: Any = text
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if text not in BOOLEANS:
            return f"must be true or false, not {shown(text)}"
        value = BOOLEANS[text]
    if _is_map(field):
        if key is None:
            return f"name a key: {field.name}[KEY]=VALUE"
        entries = values.setdefault(field.name, {})
        if key in entries:
            return "is given twice"
        entries[key] = value
        return ""
    if key is not None:
        return "has no keys"
    if _is_object(field):
        return "is an object; name one of its fields"
    if field.is_repeated:
        values.setdefault(field.name, []).append(value)
        return ""
    if field.name in values:
        return "is given twice"
    values[field.name] = value
    return ""


def _set_variables(route: Route, values: Json, variables: Mapping[str, str]) -> list[Violation]:
    """Set the fields that are in the path; return those that the body or the query contradicts."""
    violations = []
    for path, text in variables.items():
        *parents, name = path.split(".")
        inner: Any = values
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if inner.get(name, text) != text:
            violations.append(Violation(path, f"is {shown(text)} in the path, and {shown(str(inner[name]))} elsewhere"))
        inner[name] = text
    return violations


# What is wrong with values --------------------------------------------------------------------------------------------


def _violations(kind: Descriptor, values: Json, prefix: str) -> Iterator[Violation]:
    """Yield each field that protobuf's JSON mapping does not take."""
    for name, value in values.items():
        field, path = _field(kind, name), f"{prefix}{name[:200]}"
        if field is None:
            yield Violation(path, f"unknown field{did_you_mean(name, _names(kind))}")
        elif value is None:
            continue
        elif _is_map(field):
            yield from _map_violations(field, value, path)
        elif field.is_repeated:
            if not isinstance(value, list):
                yield Violation(path, f"must be a list, not {_kind(value)}")
                continue
            for number, one in enumerate(value):
                yield from _value_violations(field, one, f"{path}[{number}]")
        else:
            yield from _value_violations(field, value, path)


def _map_violations(field: FieldDescriptor, value: Any, path: str) -> Iterator[Violation]:
    if not isinstance(value, dict):
        yield Violation(path, f"must be an object, not {_kind(value)}")
        return
    for key, one in value.items():
        if not _parses(field, {key: one}):
            wanted = _expected(_message(field).fields_by_name["value"])
            yield Violation(f"{path}[{key[:200]}]", f"must be {wanted}, not {_kind(one)}")


def _value_violations(field: FieldDescriptor, value: Any, path: str) -> Iterator[Violation]:
    if _is_object(field):
        if isinstance(value, dict):
            yield from _violations(_message(field), value, f"{path}.")
        else:
            yield Violation(path, f"must be an object, not {_kind(value)}")
    elif not _parses(field, [value] if field.is_repeated else value):
        yield Violation(path, f"must be {_expected(field, value)}, not {_kind(value)}")


def _parses(field: FieldDescriptor, value: Any) -> bool:
    assert field.containing_type
    try:
        json_format.ParseDict({field.name: value}, message_class(field.containing_type.full_name)())
    except json_format.ParseError:
        return False
    return True


def _expected(field: FieldDescriptor, value: Any = None) -> str:
    """Return in words what a field takes."""
    if field.message_type:
        return AS_TEXT.get(field.message_type.full_name, "an object")
    if field.enum_type:
        names = list(field.enum_type.values_by_name)
        near = did_you_mean(value, names) if isinstance(value, str) else ""
        return f"one of {', '.join(names[:12])}{', …' if len(names) > 12 else ''}{near}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return "bytes in base64"
    return INTEGERS.get(
        field.cpp_type,
        {
            FieldDescriptor.CPPTYPE_BOOL: "true or false",
            FieldDescriptor.CPPTYPE_STRING: "a string of Unicode characters",
        }.get(field.cpp_type, "a number"),
    )


def _kind(value: Any) -> str:
    """Return a JSON value for an error, short."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return shown(value) if isinstance(value, str) else json.dumps(value)[:40]


def _plain(error: Exception) -> str:
    """Return protobuf's message without what belongs to Python."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return str(error).partition("\n")[0].removesuffix(".")[:400]


# Fields ---------------------------------------------------------------------------------------------------------------


def _field(kind: Descriptor, name: str) -> FieldDescriptor | None:
    """Return a field by its name in JSON or in the protos."""
    found: FieldDescriptor | None = kind.fields_by_name.get(name) or kind.fields_by_camelcase_name.get(name)
    return found


def _names(kind: Descriptor) -> list[str]:
    return [field.json_name for field in kind.fields]


def _message(field: FieldDescriptor) -> Descriptor:
    assert field.message_type
    return field.message_type


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _is_object(field: FieldDescriptor) -> bool:
    """Return whether a value of the field is a JSON object."""
    return bool(field.message_type and field.message_type.full_name not in AS_TEXT)
