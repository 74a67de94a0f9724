"""Generates src/cotenant/codec/method_table.py from the options of the methods in protos/: `make docs`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from google.protobuf.descriptor import MethodDescriptor

from cotenant.codec.method_rules import DEADLINE_SECONDS_DEFAULT
from cotenant.v1 import options_pb2

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "cotenant" / "codec" / "method_table.py"

TEXT = '''\
"""The rules of all methods of the API. Generated from the options in protos/ by `make docs`; do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cotenant.codec.method_rules import MethodRules

METHOD_RULES: Mapping[str, MethodRules] = MappingProxyType(
    {{
{rows}
    }}
)
'''


def methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Yield every method of the protos with its path, in the order of the files."""
    for path in sorted((ROOT / "protos").rglob("*_service.proto")):
        module = ".".join(path.relative_to(ROOT / "protos").with_suffix("").parts) + "_pb2"
        for service in import_module(module).DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


def row(path: str, method: MethodDescriptor) -> str:
    """Return the line of the table for a method."""
    rules = method.GetOptions().Extensions[options_pb2.call]
    roles = (field.name for field in rules.DESCRIPTOR.fields if field.enum_type is options_pb2.Scope.DESCRIPTOR)
    scopes = {role.replace("_", "-"): options_pb2.Scope.Name(getattr(rules, role)) for role in roles}
    given = {role: name.removeprefix("SCOPE_") for role, name in scopes.items() if name != "SCOPE_UNSPECIFIED"}
    arguments = [
        "{\n" + "".join(f'                "{role}": "{scope}",\n' for role, scope in given.items()) + "            }",
        f'route="{options_pb2.Route.Name(rules.route).removeprefix("ROUTE_")}"',
    ]
    arguments += [f"{name}=True" for name in ("audited", "retried") if getattr(rules, name)]
    arguments += ["has_request_id=True"] if "request_id" in method.input_type.fields_by_name else []
    deadline = rules.deadline.ToTimedelta().total_seconds() if rules.HasField("deadline") else DEADLINE_SECONDS_DEFAULT
    arguments += [f"deadline_seconds={deadline:g}"] if deadline != DEADLINE_SECONDS_DEFAULT else []
    arguments += ["streams=True"] if method.client_streaming or method.server_streaming else []
    lines = "".join(f"            {argument},\n" for argument in arguments)
    return f'        "{path}": MethodRules(\n{lines}        ),'


def table() -> str:
    """Return the text of the module."""
    return TEXT.format(rows="\n".join(row(path, method) for path, method in methods()))


if __name__ == "__main__":
    TABLE.write_text(table())
    print(f"   wrote {TABLE.relative_to(ROOT)}")
