"""YAML nodes with source positions, so that every mistake can be reported with its line and column.

YAML is composed but not constructed: a scalar keeps the text from the file, and the field that reads it decides what
it means. So `name: 010` and `env: {DEBUG: yes}` mean what they look like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cotenant.deferred import yaml

NULL_TAG = "tag:yaml.org,2002:null"


class SourcePosition(NamedTuple):
    """A position in a file, or an option, which has no lines."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        """Return the position as compilers write it, so that editors can jump to it."""
        return ":".join(str(part) for part in self if part)


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """A scalar; `null` if the value is empty."""

    place: SourcePosition
    text: str
    null: bool = False


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    place: SourcePosition
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class MapNode:
    """A map. Duplicate keys are kept for the reader to report; keys that are not scalars become empty."""

    place: SourcePosition
    entries: tuple[tuple[ScalarNode, Node], ...]


Node = ScalarNode | ListNode | MapNode


@dataclass(frozen=True, slots=True)
class DocumentError:
    """An error that makes a whole document unreadable."""

    place: SourcePosition
    message: str


def compose(text: str, source: str) -> Iterator[Node | DocumentError]:
    """Yield each document of a YAML text that is not empty, and last the error that ended reading, if any.

    >>> [error] = compose("gpus: [1", "job.yaml")
    >>> str(error.place)
    'job.yaml:1:9'
    """
    try:
        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            node = _located(document, source, {})
            if not (isinstance(node, ScalarNode) and node.null):
                yield node
    except yaml.MarkedYAMLError as error:
        yield DocumentError(_place(source, error.problem_mark or error.context_mark), _yaml_message(error))
    except yaml.reader.ReaderError as error:
        yield DocumentError(
            _at_index(text, source, int(error.position)), f"character not allowed in YAML: {_shown(error)}"
        )
    except RecursionError:
        yield DocumentError(SourcePosition(source), "nested too deeply")


def overlay(base: Node, overrides: MapNode) -> Node:
    """Return the document with fields overridden: maps are merged key by key, other values are replaced."""
    if not isinstance(base, MapNode):
        return base
    entries = list(base.entries)
    for key, value in overrides.entries:
        at = next((index for index, (known, _) in enumerate(entries) if known.text == key.text), None)
        if at is None:
            entries.append((key, value))
            continue
        old = entries[at][1]
        entries[at] = (key, overlay(old, value) if isinstance(value, MapNode) else value)
    return replace(base, entries=tuple(entries))


def kind_of(node: Node) -> str:
    """Return the kind of a node, for error messages."""
    match node:
        case ScalarNode(null=True):
            return "nothing"
        case ScalarNode():
            return "a string"
        case ListNode():
            return "a list"
        case MapNode():
            return "a map"


def _located(node: yaml.Node, source: str, done: dict[int, Node | None]) -> Node:
    """Convert a composed YAML node. Aliases share nodes, so each is converted once; recursive aliases are rejected."""
    if id(node) in done:
        known = done[id(node)]
        if known is None:
            raise yaml.MarkedYAMLError(
                problem="an alias refers to a node that contains it", problem_mark=node.start_mark
            )
        return known
    done[id(node)] = None
    place = _place(source, node.start_mark)
    ours: Node
    match node:
        case yaml.MappingNode():
            ours = MapNode(
                place, tuple((_key(key, source), _located(value, source, done)) for key, value in node.value)
            )
        case yaml.SequenceNode():
            ours = ListNode(place, tuple(_located(item, source, done) for item in node.value))
        case _:
            ours = ScalarNode(place, str(node.value), null=node.tag == NULL_TAG)
    done[id(node)] = ours
    return ours


def _key(node: yaml.Node, source: str) -> ScalarNode:
    return ScalarNode(_place(source, node.start_mark), node.value if isinstance(node, yaml.ScalarNode) else "")


def _place(source: str, mark: yaml.Mark | None) -> SourcePosition:
    return SourcePosition(source, mark.line + 1, mark.column + 1) if mark else SourcePosition(source)


def _at_index(text: str, source: str, index: int) -> SourcePosition:
    before = text[:index]
    return SourcePosition(source, before.count("\n") + 1, index - before.rfind("\n"))


def _yaml_message(error: yaml.MarkedYAMLError) -> str:
    return f"invalid YAML: {', '.join(part for part in (error.problem, error.context) if part)}"


def _shown(error: yaml.reader.ReaderError) -> str:
    return f"#x{ord(error.character):04x}" if isinstance(error.character, str) else f"#x{int(error.character):04x}"
