"""The table of methods, and what is derived from it, equal the options in protos/."""

from __future__ import annotations

from google.protobuf.descriptor import MethodDescriptor
from tools import methods

from cotenant.codec.method_table import METHOD_RULES
from cotenant.leadership.routing_table import ROUTES
from cotenant.security.permissions import ROLES, Role
from cotenant.v1 import options_pb2

METHODS = dict(methods.methods())


def options(method: MethodDescriptor) -> options_pb2.CallRules:
    return method.GetOptions().Extensions[options_pb2.call]


def test_the_table_is_up_to_date() -> None:
    assert methods.TABLE.read_text() == methods.table(), "run `make docs`"


def test_every_method_has_rules() -> None:
    assert len(METHODS) > 40
    for path, method in METHODS.items():
        assert options(method).route, path
        assert any(getattr(options(method), role.value.replace("-", "_")) for role in Role), path


def test_roles_routes_and_retries_are_those_of_the_options() -> None:
    assert set(METHOD_RULES) == set(ROLES) == set(ROUTES) == set(METHODS)
    for path, method in METHODS.items():
        rules = options(method)
        for role in Role:
            scope = getattr(rules, role.value.replace("-", "_"))
            assert ROLES[path].scopes.get(role, 0) == scope, (path, role)
        assert ROLES[path].changes == rules.audited, path
        assert ROUTES[path].name == options_pb2.Route.Name(rules.route).removeprefix("ROUTE_"), path
        assert METHOD_RULES[path].retried == rules.retried, path


def test_streams_are_not_retried_and_request_ids_are_known() -> None:
    for path, method in METHODS.items():
        streams = method.client_streaming or method.server_streaming
        assert METHOD_RULES[path].streams == streams, path
        assert not (streams and METHOD_RULES[path].retried), path
        assert METHOD_RULES[path].has_request_id == ("request_id" in method.input_type.fields_by_name), path
