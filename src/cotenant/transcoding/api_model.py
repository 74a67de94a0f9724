"""The API as its protos describe it: services, methods, messages and enums with their comments and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from google.api import annotations_pb2, field_behavior_pb2, http_pb2
from google.protobuf import descriptor_pb2 as pb

from cotenant.v1 import options_pb2

Field = pb.FieldDescriptorProto
SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in Field.Type.items()}
VERBS = ("get", "put", "post", "delete", "patch")


@dataclass(frozen=True, slots=True)
class ApiField:
    """A field of a message. `type` is a scalar's name, or the full name of a message or an enum."""

    name: str
    type: str
    comment: str
    repeated: bool = False
    optional: bool = False  # its presence is known although it is a scalar
    key: str = ""  # of a map: the type of its keys; then `type` is that of its values
    behaviors: tuple[str, ...] = ()
    is_message: bool = False
    oneof: str = ""  # only one field of this group is set


@dataclass(frozen=True, slots=True)
class ApiMessage:
    """A message."""

    name: str  # without the package
    full_name: str
    comment: str
    fields: Sequence[ApiField]
    file: str


@dataclass(frozen=True, slots=True)
class ApiEnum:
    """An enum; `values` are its names with their comments, in order."""

    name: str
    full_name: str
    comment: str
    values: Sequence[tuple[str, str]]
    file: str


@dataclass(frozen=True, slots=True)
class HttpRule:
    """How a method is called over HTTP."""

    verb: str  # in capitals
    path: str
    body: str  # "*", a field, or empty


@dataclass(frozen=True, slots=True)
class ApiMethod:
    """A method."""

    name: str
    comment: str
    request: str  # full names
    response: str
    http: HttpRule | None
    call: options_pb2.CallRules
    client_streams: bool
    server_streams: bool


@dataclass(frozen=True, slots=True)
class ApiService:
    """A service."""

    name: str
    full_name: str
    comment: str
    methods: Sequence[ApiMethod]
    file: str


@dataclass(frozen=True)
class Api:
    """One package, and the messages and enums of every package that it uses."""

    package: str
    services: Sequence[ApiService]
    messages: Mapping[str, ApiMessage] = field(default_factory=dict)  # by full name
    enums: Mapping[str, ApiEnum] = field(default_factory=dict)

    @cached_property
    def users(self) -> Mapping[str, Sequence[str]]:
        """The services that reach each message and enum of the package, by its full name."""
        users: dict[str, list[str]] = {}
        for service in self.services:
            for name in self.reached(*(one for method in service.methods for one in (method.request, method.response))):
                users.setdefault(name, []).append(service.name)
        return users

    def reached(self, *names: str) -> list[str]:
        """Return messages and everything in their fields, in the order in which they are found."""
        found: dict[str, None] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop(0)
            if name in found or not name.startswith(f"{self.package}."):
                continue
            found[name] = None
            if message := self.messages.get(name):
                waiting += [one.type for one in message.fields]
        return list(found)


def load(files: pb.FileDescriptorSet, package: str = "cotenant.v1") -> Api:
    """Return the API of a package."""
    readers = [_File(file) for file in files.file]
    return Api(
        package,
        [service for reader in readers if reader.proto.package == package for service in reader.services()],
        {message.full_name: message for reader in readers for message in reader.messages()},
        {enum.full_name: enum for reader in readers for enum in reader.enums()},
    )


class _File:
    """A file with its comments, by the paths of descriptor.proto."""

    def __init__(self, proto: pb.FileDescriptorProto) -> None:
        self.proto = proto
        self._comments = {
            tuple(place.path): place.leading_comments.strip() for place in proto.source_code_info.location
        }

    def comment(self, *path: int) -> str:
        return "\n".join(line.strip() for line in self._comments.get(path, "").splitlines())

    def services(self) -> Iterator[ApiService]:
        for number, service in enumerate(self.proto.service):
            methods = [
                ApiMethod(
                    method.name,
                    self.comment(6, number, 2, place),
                    method.input_type[1:],
                    method.output_type[1:],
                    http_rule(method.options.Extensions[annotations_pb2.http]),
                    method.options.Extensions[options_pb2.call],
                    method.client_streaming,
                    method.server_streaming,
                )
                for place, method in enumerate(service.method)
            ]
            name = f"{self.proto.package}.{service.name}"
            yield ApiService(service.name, name, self.comment(6, number), methods, self.proto.name)

    def messages(self) -> Iterator[ApiMessage]:
        for number, message in enumerate(self.proto.message_type):
            yield from self._messages(message, self.proto.package, (4, number))

    def _messages(self, message: pb.DescriptorProto, prefix: str, path: tuple[int, ...]) -> Iterator[ApiMessage]:
        fields = [_field(one, message, self.comment(*path, 2, place)) for place, one in enumerate(message.field)]
        full_name = f"{prefix}.{message.name}"
        name = full_name.removeprefix(f"{self.proto.package}.")
        yield ApiMessage(name, full_name, self.comment(*path), fields, self.proto.name)
        for place, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._messages(nested, full_name, (*path, 3, place))

    def enums(self) -> Iterator[ApiEnum]:
        for number, enum in enumerate(self.proto.enum_type):
            values = [(value.name, self.comment(5, number, 2, place)) for place, value in enumerate(enum.value)]
            full_name = f"{self.proto.package}.{enum.name}"
            yield ApiEnum(enum.name, full_name, self.comment(5, number), values, self.proto.name)


def _field(one: pb.FieldDescriptorProto, message: pb.DescriptorProto, comment: str) -> ApiField:
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    entry = entries.get(one.type_name.rpartition(".")[2]) if one.type == Field.TYPE_MESSAGE else None
    shown = entry.field[1] if entry else one
    return ApiField(
        one.name,
        shown.type_name[1:] or SCALARS[shown.type],
        comment,
        repeated=one.label == Field.LABEL_REPEATED and entry is None,
        optional=one.proto3_optional,
        key=SCALARS[entry.field[0].type] if entry else "",
        behaviors=tuple(
            field_behavior_pb2.FieldBehavior.Name(value)
            for value in one.options.Extensions[field_behavior_pb2.field_behavior]
        ),
        is_message=shown.type == Field.TYPE_MESSAGE,
        oneof=message.oneof_decl[one.oneof_index].name
        if one.HasField("oneof_index") and not one.proto3_optional
        else "",
    )


def http_rule(rule: Any) -> HttpRule | None:
    """Return a google.api.HttpRule as ours; None if a method has none."""
    assert isinstance(rule, http_pb2.HttpRule)
    verb = rule.WhichOneof("pattern")
    return HttpRule(verb.upper(), getattr(rule, verb), rule.body) if verb in VERBS else None
