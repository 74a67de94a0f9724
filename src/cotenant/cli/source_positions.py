"""Texts, lists and maps that remember where they were written, so that every mistake can be pointed at.

YAML is composed but not constructed: a scalar stays the text that stands in the file, and the field that takes it
decides what it means. So `name: 010` and `env: {DEBUG: yes}` are taken as they look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import yaml

NULL_TAG = "tag:yaml.org,2002:null"


class Place(NamedTuple):
    """Where something was written: in a file, or in an option, which has no lines."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        """The place as compilers write it, for editors to jump to."""
        return ":".join(str(part) for part in self if part)


@dataclass(frozen=True, slots=True)
class Text:
    """A scalar; `null` where nothing was written."""

    place: Place
    text: str
    null: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    place: Place
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """A map; a key may stand more than once, which its reader reports. Keys that are no texts have an empty one."""

    place: Place
    entries: tuple[tuple[Text, Node], ...]


Node = Text | Items | Fields


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with a document as a whole, which therefore has no content to look at."""

    place: Place
    message: str


def compose(text: str, source: str) -> Iterator[Node | Fault]:
    """Yield each document of a YAML text that is not empty, and last a fault where one ends the reading.

    >>> [fault] = compose("gpus: [1", "job.yaml")
    >>> str(fault.place)
    'job.yaml:1:9'
    """
    try:
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            node = _located(document, source, {})
            if not (isinstance(node, Text) and node.null):
                yield node
    except yaml.MarkedYAMLError as error:
        yield Fault(_place(source, error.problem_mark or error.context_mark), _told(error))
    except yaml.reader.ReaderError as error:
        yield Fault(
            _at_index(text, source, int(error.position)), f"is a character that YAML does not allow: {_shown(error)}"
        )
    except RecursionError:
        yield Fault(Place(source), "is nested too deeply")


def overlay(base: Node, above: Fields) -> Node:
    """Put fields over a document: maps are joined key by key, anything else is replaced."""
    if not isinstance(base, Fields):
        return base
    entries = list(base.entries)
    for key, value in above.entries:
        at = next((index for index, (known, _) in enumerate(entries) if known.text == key.text), None)
        if at is None:
            entries.append((key, value))
            continue
        old = entries[at][1]
        entries[at] = (key, overlay(old, value) if isinstance(value, Fields) else value)
    return replace(base, entries=tuple(entries))


def kind_of(node: Node) -> str:
    """Name what was written, for errors."""
    match node:
        case Text(null=True):
            return "nothing"
        case Text():
            return "a text"
        case Items():
            return "a list"
        case Fields():
            return "a map"


def _located(node: yaml.Node, source: str, done: dict[int, Node | None]) -> Node:
    """Turn a composed node into ours. Aliases share nodes, so each is turned once; one inside itself is refused."""
    if id(node) in done:
        known = done[id(node)]
        if known is None:
            raise yaml.MarkedYAMLError(
                problem="an alias stands inside what it stands for", problem_mark=node.start_mark
            )
        return known
    done[id(node)] = None
    place = _place(source, node.start_mark)
    ours: Node
    match node:
        case yaml.MappingNode():
            ours = Fields(place, tuple((_key(key, source), _located(value, source, done)) for key, value in node.value))
        case yaml.SequenceNode():
            ours = Items(place, tuple(_located(item, source, done) for item in node.value))
        case _:
            ours = Text(place, str(node.value), null=node.tag == NULL_TAG)
    done[id(node)] = ours
    return ours


def _key(node: yaml.Node, source: str) -> Text:
    return Text(_place(source, node.start_mark), node.value if isinstance(node, yaml.ScalarNode) else "")


def _place(source: str, mark: yaml.Mark | None) -> Place:
    return Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)


def _at_index(text: str, source: str, index: int) -> Place:
    before = text[:index]
    return Place(source, before.count("\n") + 1, index - before.rfind("\n"))


def _told(error: yaml.MarkedYAMLError) -> str:
    return f"is no YAML: {', '.join(part for part in (error.problem, error.context) if part)}"


def _shown(error: yaml.reader.ReaderError) -> str:
    return f"#x{ord(error.character):04x}" if isinstance(error.character, str) else f"#x{int(error.character):04x}"
