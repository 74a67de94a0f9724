"""Every public method can be called over HTTP: the rules from which a JSON gateway is generated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations

import pytest
from tools import protos

from cotenant.transcoding import api_model
from cotenant.transcoding.api_model import ApiField, ApiMethod, HttpRule

API = api_model.load(protos.descriptors())
METHODS = {f"{service.name}.{method.name}": method for service in API.services for method in service.methods}
VARIABLE = re.compile(r"\{([^}]*)\}")
IN_A_QUERY = {"google.protobuf.Timestamp", "google.protobuf.Duration", "google.protobuf.FieldMask"}  # JSON strings
DOCUMENTED = "As a query parameter"  # in the comment of a field that is none by the rules of google.api.http
REQUESTS = {method.request for method in METHODS.values()}
RESOURCES = {  # what calls that read return
    one.type
    for method in METHODS.values()
    if method.name.startswith(("Get", "List"))
    for one in API.messages[method.response].fields
    if one.is_message and one.type not in IN_A_QUERY
}


def rule(method: ApiMethod) -> HttpRule:
    assert method.http
    return method.http


def parts(path: str) -> tuple[list[str], str]:
    """Return the segments of a path and its verb, such as "cancel"."""
    path, _, verb = VARIABLE.sub("{}", path).partition(":")
    return path.split("/")[1:], verb


def at(message: str, path: str) -> ApiField:
    """Return the field at a path such as "job.id"."""
    first, _, rest = path.partition(".")
    found = next(one for one in API.messages[message].fields if one.name == first)
    return at(found.type, rest) if rest else found


def in_query(method: ApiMethod) -> Iterator[tuple[str, ApiField]]:
    """Yield the fields that are neither in the path nor in the body, with the fields of messages in them."""
    http = rule(method)
    if http.body == "*":
        return
    left = [("", one) for one in API.messages[method.request].fields if one.name != http.body]
    while left:
        prefix, one = left.pop()
        path = f"{prefix}{one.name}"
        if path in VARIABLE.findall(http.path):
            continue
        if one.is_message and not one.repeated and not one.key and one.type not in IN_A_QUERY:
            left += [(f"{path}.", inner) for inner in API.messages[one.type].fields]
        else:
            yield path, one


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_a_rule(name: str) -> None:
    http = rule(METHODS[name])
    segments, _ = parts(http.path)
    assert segments[0] == "v1"
    assert all(re.fullmatch(r"[a-z]+|\{\}", segment) for segment in segments[1:]), http.path


@pytest.mark.parametrize("name", METHODS)
def test_variables_are_strings_of_the_request(name: str) -> None:
    method = METHODS[name]
    for variable in VARIABLE.findall(rule(method).path):
        found = at(method.request, variable)
        assert (found.type, found.repeated) == ("string", False), variable


@pytest.mark.parametrize("name", METHODS)
def test_what_only_reads_or_removes_has_no_body(name: str) -> None:
    method = METHODS[name]
    http = rule(method)
    if http.verb in ("GET", "DELETE"):
        assert not http.body
    else:
        assert http.body == "*" or at(method.request, http.body).is_message
    if method.call.audited:
        assert http.verb != "GET", "a call that changes something"


@pytest.mark.parametrize("name", METHODS)
def test_every_other_field_can_be_a_query_parameter(name: str) -> None:
    for path, one in in_query(METHODS[name]):
        plain = not one.key and (not one.is_message or (one.type in IN_A_QUERY and not one.repeated))
        assert plain or DOCUMENTED in one.comment, f"{path}: say in its comment: {DOCUMENTED} …"


def test_a_request_goes_to_one_method_only() -> None:
    for one, other in combinations(METHODS.values(), 2):
        (segments, verb), (others, other_verb) = parts(rule(one).path), parts(rule(other).path)
        alike = len(segments) == len(others) and all(
            a == b or "{}" in (a, b) for a, b in zip(segments, others, strict=True)
        )
        same = rule(one).verb == rule(other).verb and verb == other_verb and alike
        assert not same, f"{one.name} and {other.name}"


@pytest.mark.parametrize("message", sorted(REQUESTS | RESOURCES))
def test_fields_of_requests_and_resources_have_a_behavior(message: str) -> None:
    known = {"REQUIRED", "OPTIONAL"} if message in REQUESTS else {"REQUIRED", "OPTIONAL", "OUTPUT_ONLY", "IDENTIFIER"}
    for one in API.messages[message].fields:
        assert one.behaviors, f"{one.name}: add (google.api.field_behavior)"
        assert set(one.behaviors) <= known, one.name


def test_every_list_is_paged() -> None:
    lists = {name: method for name, method in METHODS.items() if method.name.startswith("List")}
    assert len(lists) > 8
    for name, method in lists.items():
        asked, told = ([one.name for one in API.messages[of].fields] for of in (method.request, method.response))
        assert {"page_size", "page_token"} <= set(asked), name
        assert "next_page_token" in told, name


@pytest.mark.parametrize("name", METHODS)
def test_a_variable_of_a_path_is_required(name: str) -> None:
    method = METHODS[name]
    for variable in VARIABLE.findall(rule(method).path):
        assert {"REQUIRED", "IDENTIFIER"} & set(at(method.request, variable).behaviors), variable
