"""Tenant files: quotas, limits and weights in YAML. All mistakes are reported at once with their lines and columns.

A file is a map of tenants by id, or a list of tenants with an `id` field.

>>> read_tenants("vision: {quota_gpus: 8, limit_gpus: 16}", "tenants.yaml")[0].quota_gpu_milli
8000
>>> read_tenants("- {id: vision, quota_gpu: 8}", "tenants.yaml")
Traceback (most recent call last):
...
cotenant.cli.mesh.tenant_file.BadTenants: tenants.yaml has a mistake
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cotenant.cli import units
from cotenant.cli.outcome import CommandError, ExitCode, usage_error
from cotenant.cli.source_positions import (
    DocumentError,
    ListNode,
    MapNode,
    Node,
    ScalarNode,
    SourcePosition,
    compose,
    kind_of,
)
from cotenant.core.model.tenancy import Tenant, check_hierarchy, check_tenant
from cotenant.core.model.validation import shown
from cotenant.core.spelling import did_you_mean

FILE_BYTES_MAX = 2**20


FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "quota_gpus": ("quota_gpu_milli", units.parse_gpu_milli),
    "quota_cores": ("quota_cores", units.parse_integer),
    "limit_gpus": ("limit_gpu_milli", units.parse_gpu_milli),
    "limit_cores": ("limit_cores", units.parse_integer),
    "weight": ("weight", units.parse_number),
    "parent": ("parent", str),
}
NAMES = {attribute: name for name, (attribute, _) in FIELDS.items()}


class BadTenants(CommandError):
    """Invalid tenants, with all their mistakes."""

    def __init__(self, source: str, mistakes: Iterable[str]) -> None:
        lines = list(mistakes)
        message = f"{source} has {len(lines)} mistakes" if len(lines) > 1 else f"{source} has a mistake"
        super().__init__(message, details=lines, code=ExitCode.USAGE)


def load_tenants(path: Path) -> tuple[Tenant, ...]:
    """Return the tenants of a file.

    Raises:
        CommandError: the file cannot be read.
        BadTenants: the file has mistakes.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise usage_error(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise usage_error(f"{path} is larger than 1 MiB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BadTenants(str(path), [f"{path}:{line}: not UTF-8 text"]) from None
    return read_tenants(text, str(path))


def read_tenants(text: str, source: str) -> tuple[Tenant, ...]:
    """Return all tenants of a YAML text.

    Raises:
        BadTenants: the text has mistakes.
    """
    reader = _Reader()
    documents = list(compose(text, source))
    tenants: list[Tenant] = []
    for number, document in enumerate(documents):
        if number and not isinstance(document, DocumentError):
            reader.wrong(document.place, "", "unexpected second document; put all tenants into one")
        else:
            tenants += reader.document(document)
    if not documents:
        reader.wrong(SourcePosition(source), "", "is empty; expected a map of tenants by id")
    for tenant_id, bad in [] if reader.mistakes else check_hierarchy(tenants):
        reader.wrong(reader.known[tenant_id], f"{tenant_id}.{NAMES[bad.field]}", bad.description)
    if reader.mistakes:
        raise BadTenants(source, reader.mistakes)
    return tuple(tenants)


@dataclass(slots=True)
class _Reader:
    """Reads documents and continues after mistakes, to report all of them."""

    mistakes: list[str] = field(default_factory=list)
    known: dict[str, SourcePosition] = field(default_factory=dict)

    def wrong(self, place: SourcePosition, label: str, message: str) -> None:
        self.mistakes.append(": ".join(part for part in (str(place), label, message) if part))

    def document(self, node: Node | DocumentError) -> Iterator[Tenant]:
        match node:
            case DocumentError():
                self.wrong(node.place, "", node.message)
            case MapNode():
                for key, value in node.entries:
                    yield from self.tenant(key.text, key.place, value)
            case ListNode():
                for item in node.items:
                    yield from self.listed(item)
            case _:
                self.wrong(node.place, "", f"must be a map of tenants by id, or a list, not {kind_of(node)}")

    def listed(self, node: Node) -> Iterator[Tenant]:
        if not isinstance(node, MapNode):
            self.wrong(node.place, "", f"must be a map with the tenant's id, not {kind_of(node)}")
            return
        ids = [(key, value) for key, value in node.entries if key.text == "id"]
        if len(ids) != 1 or not isinstance(ids[0][1], ScalarNode):
            self.wrong(node.place, "id", "is missing" if not ids else "must be a single string")
            return
        rest = tuple((key, value) for key, value in node.entries if key.text != "id")
        yield from self.tenant(ids[0][1].text, ids[0][1].place, MapNode(node.place, rest))

    def tenant(self, tenant_id: str, place: SourcePosition, node: Node) -> Iterator[Tenant]:
        """Yield the tenant if it is valid."""
        before = len(self.mistakes)
        if tenant_id in self.known:
            self.wrong(place, tenant_id, f"duplicate tenant; first at {self.known[tenant_id]}")
        self.known[tenant_id] = place
        values: dict[str, Any] = {}
        places: dict[str, SourcePosition] = {}
        if isinstance(node, MapNode):
            for key, value in node.entries:
                self.field(tenant_id, key, value, values, places)
        elif not (isinstance(node, ScalarNode) and node.null):
            self.wrong(node.place, tenant_id, f"must be a map with {', '.join(FIELDS)}, not {kind_of(node)}")
        tenant = Tenant(tenant_id, **values)
        for bad in check_tenant(tenant):
            label = f"{tenant_id}.{NAMES[bad.field]}" if bad.field in NAMES else f"id {shown(tenant_id)}"
            self.wrong(places.get(bad.field, place), label, bad.description)
        if len(self.mistakes) == before:
            yield tenant

    def field(
        self, tenant_id: str, key: ScalarNode, value: Node, values: dict[str, Any], places: dict[str, SourcePosition]
    ) -> None:
        label = f"{tenant_id}.{key.text}"
        if key.text not in FIELDS:
            near = did_you_mean(key.text, FIELDS) or f"; fields are {', '.join(FIELDS)}"
            self.wrong(key.place, label, f"unknown field{near}")
            return
        attribute, parse = FIELDS[key.text]
        if attribute in values:
            self.wrong(key.place, label, "duplicate field")
        elif not isinstance(value, ScalarNode) or value.null:
            self.wrong(
                value.place, label, f"a {'text' if parse is str else 'number'} was expected, not {kind_of(value)}"
            )
        else:
            places[attribute] = value.place
            try:
                values[attribute] = parse(value.text)
            except ValueError as error:
                self.wrong(value.place, label, str(error))
