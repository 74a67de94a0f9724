"""Generates docs/api, the reference of the public API, from the comments and options in protos/: `make docs`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # make runs this file, not a module

from tools import protos  # noqa: E402 - the root of the checkout has to be on the path first

from cotenant.codec.method_rules import DEADLINE_SECONDS_DEFAULT  # noqa: E402 - as above
from cotenant.transcoding import api_model  # noqa: E402 - as above
from cotenant.transcoding.api_model import (  # noqa: E402 - as above
    Api,
    ApiEnum,
    ApiField,
    ApiMessage,
    ApiMethod,
    ApiService,
)
from cotenant.v1 import options_pb2  # noqa: E402 - as above

PAGES = ROOT / "docs" / "api"
OVERVIEW, SHARED = "README.md", "shared-messages.md"
WELL_KNOWN = "https://protobuf.dev/reference/protobuf/google.protobuf/"
ROLES = {  # fields of CallRules, as callers know the roles
    "viewer": "viewer",
    "user": "user",
    "tenant_admin": "tenant-admin",
    "operator": "operator",
    "agent": "agent",
    "service": "service",
}
SCOPES = {
    options_pb2.SCOPE_OWN_NODE: "its own node",
    options_pb2.SCOPE_OWN_JOBS: "own jobs",
    options_pb2.SCOPE_TENANT: "own tenants",
    options_pb2.SCOPE_ALL_TENANTS: "needs all tenants",
    options_pb2.SCOPE_ANY: "everything",
}
ROUTES = {
    options_pb2.ROUTE_LEADER: "the leader",
    options_pb2.ROUTE_ENDED: "any replica for ended jobs, else the leader",
    options_pb2.ROUTE_ANY: "any replica",
    options_pb2.ROUTE_NODE: "the replica of the node",
}
BEHAVIORS = {  # the order of the words
    "REQUIRED": "required",
    "IDENTIFIER": "identifier",
    "OUTPUT_ONLY": "output",
    "IMMUTABLE": "immutable",
    "OPTIONAL": "",
}

TEXT = """\
# API reference

The services and messages of the package `cotenant.v1`. Drawn by `make docs` from the comments and options in
`protos/cotenant/v1`; a test fails if these pages differ. [Calling Cotenant over gRPC](../tutorials/grpc.md) shows how
to begin; [JSON over HTTP](../http.md) shows how to call the API without it;
[what stays compatible](../compatibility.md) says what a release may change.

Messages and enums that several services use are on the page [Shared messages](shared-messages.md).

{services}

## How to read the tables

**Callable by.** The roles that may call a method, and on what: *own jobs* are those that the caller submitted; *own
tenants*, what belongs to the caller's tenants; *everything*, all tenants. *Needs all tenants*: only a caller with
access to all tenants may call it, because the answer does not separate them. See [security](../security.md).

**Audited.** Each call is a line of the audit log.

**Retried.** A repeat is harmless, and clients repeat the call when the service is unavailable. A call that changes
something recognizes a repeat by its `request_id`.

**Deadline.** How long our clients wait. Streams have none.

**Answered by.** Which replica of a service answers; the others forward the call.

**Fields.** A field is *required* if a call fails without it, *output* if only the server sets it, *immutable* if it
cannot be changed after the first call, and an *identifier* if it names the resource. All others may be left out. Of the
fields that are *one of* a group, at most one is set. `repeated` fields are lists; `optional` ones distinguish "not set"
from zero.
"""


class Reference:
    """The pages of the reference, by file name."""

    def __init__(self, api: Api) -> None:
        self.api, self.services = api, sorted(api.services, key=lambda service: service.name)
        self._own = {
            name: service.name
            for service in api.services
            for method in service.methods
            for name in (method.request, method.response)
        }

    @cached_property
    def pages(self) -> Mapping[str, str]:
        """The text of every page."""
        pages = {OVERVIEW: self.overview(), SHARED: self.shared()}
        return pages | {page_of(service.name): self.service(service) for service in self.services}

    @cached_property
    def places(self) -> Mapping[str, str]:
        """The page of each message and enum, by its full name."""
        places = {}
        for name, users in self.api.users.items():
            own = self._own.get(name) or (users[0] if len(users) == 1 else "")
            places[name] = page_of(own) if own else SHARED
        return places

    @cached_property
    def words(self) -> Mapping[str, str]:
        """Links for the names in comments that can be nothing else, such as CreateJobRequest."""
        names = {name.rpartition(".")[2]: name for name in self.places}
        found = {name: full for name, full in names.items() if len(re.findall(r"[A-Z][a-z]", name)) > 1}
        methods = {method.name: service.name for service in self.api.services for method in service.methods}
        links = {name: f"{self.places[full]}#{anchor(name)}" for name, full in found.items()}
        links |= {
            name: f"{page_of(service)}#{anchor(name)}"
            for name, service in methods.items()
            if len(re.findall(r"[A-Z][a-z]", name)) > 1
        }
        return links | {service.name: page_of(service.name) for service in self.api.services}

    # Pages ---------------------------------------------------------------------------------------------------

    def overview(self) -> str:
        """Return the first page."""
        parts = []
        for service in self.services:
            page = page_of(service.name)
            rows = [
                [
                    f"[{method.name}]({page}#{anchor(method.name)})",
                    http_of(method),
                    self.cell(first_sentence(method.comment), OVERVIEW),
                ]
                for method in service.methods
            ]
            parts += [f"## [{service.name}]({page})", self.prose(first_sentence(service.comment), OVERVIEW)]
            parts += [table(("Method", "Over HTTP", "What it does"), rows)]
        return TEXT.format(services="\n\n".join(parts))

    def service(self, service: ApiService) -> str:
        """Return the page of a service."""
        page = page_of(service.name)
        own = [name for name, place in self.places.items() if place == page and name not in self._own]
        parts = [
            f"# {service.name}",
            self.prose(service.comment, page),
            f"Package `{self.api.package}`, file `protos/{service.file}`.",
            *(part for method in service.methods for part in self.method(method, page)),
            *self.types(own, page),
        ]
        return "\n\n".join(parts) + "\n"

    def shared(self) -> str:
        """Return the page of the messages and enums that several services use."""
        own = [name for name, place in self.places.items() if place == SHARED]
        text = "Messages and enums that several services use, or that are part of such messages."
        return "\n\n".join(["# Shared messages", text, *self.types(own, SHARED)]) + "\n"

    # Parts of a page -----------------------------------------------------------------------------------------

    def method(self, method: ApiMethod, page: str) -> Iterator[str]:
        """Yield the parts of a method: text, how it is called, request and response."""
        yield f"## {method.name}"
        yield self.prose(method.comment, page)
        yield "\n".join(f"- {line}" for line in calling(method))
        yield from self.message(self.api.messages[method.request], page)
        yield from self.message(self.api.messages[method.response], page, streamed=method.server_streams)

    def types(self, names: Sequence[str], page: str) -> Iterator[str]:
        """Yield the parts of messages, then of enums, in the order of their names."""
        ordered = sorted(names, key=lambda name: name.rpartition(".")[2])
        if messages := [self.api.messages[name] for name in ordered if name in self.api.messages]:
            if page != SHARED:
                yield "## Messages and enums"
            for message in messages:
                yield from self.message(message, page)
        for name in ordered:
            if enum := self.api.enums.get(name):
                yield from self.enum(enum, page)

    def message(self, message: ApiMessage, page: str, *, streamed: bool = False) -> Iterator[str]:
        """Yield a message: its heading, text and fields."""
        yield f"{'##' if page == SHARED else '###'} {message.name}"
        text = "" if OBVIOUS.fullmatch(message.comment) else self.prose(message.comment, page)
        if streamed:
            text = f"The answer is a stream of these messages. {text}".rstrip()
        if text:
            yield text
        if message.fields:
            rows = [[f"`{one.name}`", self.type_of(one, page), self.field_text(one, page)] for one in message.fields]
            yield table(("Field", "Type", "Description"), rows)
        else:
            yield "No fields."

    def field_text(self, one: ApiField, page: str) -> str:
        """Return the cell that describes a field: its behavior, then its comment."""
        words = [word for behavior, word in BEHAVIORS.items() if behavior in one.behaviors and word]
        words += [f"one of {one.oneof}"] if one.oneof else []
        prefix = f"*{', '.join(words)}* · " if words else ""
        return prefix + self.cell(one.comment, page)

    def enum(self, enum: ApiEnum, page: str) -> Iterator[str]:
        """Yield an enum: its heading, text and values."""
        yield f"{'##' if page == SHARED else '###'} {enum.name}"
        yield self.prose(enum.comment, page)
        rows = [[f"`{name}`", self.cell(comment, page)] for name, comment in enum.values]
        yield table(("Value", "Meaning"), rows)

    def type_of(self, one: ApiField, page: str) -> str:
        """Return the type of a field, with a link to a message or an enum."""
        name = one.type.rpartition(".")[2]
        if one.type.startswith("google.protobuf."):
            shown = f"[{name}]({WELL_KNOWN}#{name.lower()})"
        elif one.type in self.places:
            shown = f"[{name}]({self.link(self.places[one.type], name, page)})"
        else:
            shown = name
        if one.key:
            return f"map of {one.key} to {shown}"
        return f"{'repeated ' if one.repeated else 'optional ' if one.optional else ''}{shown}"

    def link(self, to: str, name: str, page: str) -> str:
        """Return the link to a message or an enum on a page."""
        return f"#{anchor(name)}" if to == page else f"{to}#{anchor(name)}"

    # Text ----------------------------------------------------------------------------------------------------

    def prose(self, comment: str, page: str) -> str:
        """Return a comment as Markdown; an empty line begins a paragraph."""
        return "\n\n".join(self.marked(" ".join(part.split()), page) for part in comment.split("\n\n"))

    def cell(self, comment: str, page: str) -> str:
        """Return a comment as one line of a table."""
        return self.marked(" ".join(comment.split()), page).replace("|", "\\|")

    def marked(self, text: str, page: str) -> str:
        """Return text with its names as code or links, and nothing else that Markdown would read."""
        parts = re.split(r"(`[^`]*`)", text)
        return "".join(part if part.startswith("`") else self._plain(part, page) for part in parts)

    def _plain(self, text: str, page: str) -> str:
        def name(found: re.Match[str]) -> str:
            if found["code"]:
                return f"`{found[0]}`".replace("\\", "")
            link = self.words.get(found[0], "")
            return f"[{found[0]}]({link.removeprefix(page) if '#' in link else link})" if link else found[0]

        escaped = re.sub(r"([*<$\[\]])", r"\\\1", text)
        return QUOTED.sub(r"\1", NAME.sub(name, escaped))


QUOTED = re.compile(r'"(`[^`]+`)"')  # code needs no quotation marks
OBVIOUS = re.compile(r"The (request|answer) of \w+\.")  # below the heading of the method
CODE = r"[a-z][a-z0-9]*(?:[_.][A-Za-z0-9]+)+(?:\\\[[A-Z]+\\\]=[A-Z]+)?|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+"
NAME = re.compile(rf"\b(?:(?P<code>{CODE})|(?:[A-Z][a-z0-9]+)+)")


def page_of(service: str) -> str:
    """Return the file name of a service's page.

    >>> page_of("JobService")
    'job-service.md'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", service).lower() + ".md"


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as forges and the site make it."""
    return heading.lower()


def http_of(method: ApiMethod) -> str:
    """Return how a method is called over HTTP, as code."""
    return f"`{method.http.verb} {method.http.path}`" if method.http else ""


def calling(method: ApiMethod) -> Iterator[str]:
    """Yield how a method is called, by whom, and what happens to the call."""
    if http := method.http:
        bodies = {"": "", "*": ", with the request as its body"}
        yield f"HTTP: {http_of(method)}{bodies.get(http.body, f', with `{http.body}` as its body')}"
    yield f"Callable by: {scope_words(method)}"
    call = method.call
    given = call.deadline.ToTimedelta().total_seconds() if call.HasField("deadline") else 0
    streams = method.client_streams or method.server_streams
    words = [
        f"answered by {ROUTES[call.route]}",
        "audited" if call.audited else "",
        "retried" if call.retried else "not retried",
        "no deadline" if streams else f"deadline {given or DEADLINE_SECONDS_DEFAULT:g} s",
    ]
    text = ", ".join(filter(None, words))
    yield text[0].upper() + text[1:]


def scope_words(method: ApiMethod) -> str:
    """Return who may call a method: the roles of each scope."""
    roles: dict[options_pb2.Scope.ValueType, list[str]] = {}
    for field, role in ROLES.items():
        if scope := getattr(method.call, field):
            roles.setdefault(scope, []).append(role)
    return "; ".join(f"{', '.join(names)} ({SCOPES[scope]})" for scope, names in roles.items())


def first_sentence(comment: str) -> str:
    """Return the first sentence of a comment, without the paragraphs that follow.

    >>> first_sentence("Lists jobs. Served by the queue.")
    'Lists jobs.'
    """
    text = " ".join(comment.split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", text)[0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(pages: Mapping[str, str]) -> None:
    """Write the pages, and remove those of services that are gone."""
    PAGES.mkdir(exist_ok=True)
    for path in PAGES.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (PAGES / name).write_text(text)


if __name__ == "__main__":
    write(Reference(api_model.load(protos.descriptors())).pages)
    print(f"   wrote {PAGES.relative_to(ROOT)}")
