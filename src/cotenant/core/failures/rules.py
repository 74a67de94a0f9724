"""Classification rules as data: read from TOML, validated, and matched in bounded time.

Theory of operation. A rule has conditions that must all hold: a regular expression over the lines of output or over
what the node observed, the signal, the exit code, the kernel's out-of-memory report. The first rule that matches
decides. Patterns are RE2's (`cotenant.core.model.patterns`), so that no line takes longer than its length times the
size of the pattern; lines are truncated and few.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cotenant.core.model.patterns import Pattern, compile_pattern
from cotenant.core.spelling import did_you_mean

VERSION = 1
PATTERN_LENGTH_MAX = 400
TEXT_LENGTH_MAX = 64


class Responsibility(StrEnum):
    """Who is responsible for a failure."""

    UNKNOWN = "unknown"
    USER = "user"
    INFRASTRUCTURE = "infrastructure"


class BadRules(Exception):
    """An invalid rules file; the message names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Conditions that are None or empty are not checked; `source` is the rule's position."""

    name: str
    failure_class: str
    blame: Responsibility
    line: Pattern | None = None
    sign: Pattern | None = None
    signals: tuple[int, ...] = ()
    exit_codes: tuple[int, ...] = ()
    out_of_memory: bool = False
    transient: bool = False
    node_at_fault: bool = False
    example: str = ""
    source: str = field(default="", compare=False)


_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("name", "class", "blame", "line", "sign", "example"), str),
    **dict.fromkeys(("signals", "exit_codes"), list),
    **dict.fromkeys(("out_of_memory", "transient", "node_at_fault"), bool),
}
_WORDS = {str: "a string", list: "a list of whole numbers", bool: "true or false"}
_CONDITIONS = ("line", "sign", "signals", "exit_codes", "out_of_memory")


def parse_rules(text: str, source: str) -> tuple[Rule, ...]:
    """Return rules in their order; `source` names the file.

    Raises:
        BadRules: the file is not valid TOML, or a rule is invalid; names the first error.

    >>> rule, = parse_rules('''
    ... version = 1
    ... [[rule]]
    ... name = "licence"
    ... class = "licence_server"
    ... blame = "infrastructure"
    ... line = 'no licence left'
    ... transient = true
    ... ''', "ours.toml")
    >>> rule.name, rule.transient, rule.source
    ('licence', True, 'ours.toml:3')
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # including numbers that are too long, and deep nesting
        raise BadRules(f"{source} is not valid TOML: {error}") from None
    if unknown := [key for key in table if key not in ("version", "rule")]:
        raise BadRules(f"{source}: {unknown[0]}: no such key; keys are version and rule")
    if table.get("version") != VERSION:
        raise BadRules(f"{source}: version: must be {VERSION}, not {table.get('version')!r}")
    raw = table.get("rule", [])
    if not isinstance(raw, list) or not all(isinstance(one, dict) for one in raw):
        raise BadRules(f"{source}: rule: must be written as [[rule]]")
    written = text.splitlines()
    starts = [number for number, line in enumerate(written, 1) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    lines = starts if len(starts) == len(raw) else [1] * len(raw)
    rules: dict[str, Rule] = {}
    for one, at in zip(raw, lines, strict=True):
        rule = _rule(one, source, at, written)
        if rule.name in rules:
            raise BadRules(f"{rule.source}: name: {rule.name!r} is already defined")
        rules[rule.name] = rule
    return tuple(rules.values())


def merged(own: Sequence[Rule], shipped: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return an operator's rules followed by the shipped ones; rules of the same name replace shipped ones."""
    names = {rule.name for rule in own}
    return (*own, *(rule for rule in shipped if rule.name not in names))


def _rule(raw: Mapping[str, Any], source: str, at: int, lines: Sequence[str]) -> Rule:
    def wrong(key: str, problem: str) -> BadRules:
        line = next((n for n in range(at, len(lines) + 1) if re.match(rf"\s*{re.escape(key)}\s*=", lines[n - 1])), at)
        after = next(
            (n for n in range(at + 1, len(lines) + 1) if lines[n - 1].strip().startswith("[[")), len(lines) + 1
        )
        return BadRules(f"{source}:{line if line < after else at}: {key}: {problem}")

    for key, value in raw.items():
        if key not in _TYPES:
            raise wrong(key, f"no such field{did_you_mean(key, _TYPES)}; fields are {', '.join(_TYPES)}")
        whole = not isinstance(value, list) or all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        if not isinstance(value, _TYPES[key]) or not whole:
            raise wrong(key, f"must be {_WORDS[_TYPES[key]]}, not {value!r}")
    for key in ("name", "class", "blame"):
        if not raw.get(key):
            raise wrong(key, "is missing")
        if len(raw[key]) > TEXT_LENGTH_MAX or not re.fullmatch(r"[a-z0-9_-]+", raw[key]):
            raise wrong(key, f"must be of a-z, 0-9, _ and -, at most {TEXT_LENGTH_MAX}, not {raw[key]!r}")
    if raw["blame"] not in [blame.value for blame in Responsibility]:
        raise wrong("blame", f"must be one of {', '.join(Responsibility)}, not {raw['blame']!r}")
    if not any(raw.get(key) for key in _CONDITIONS):
        raise wrong("name", f"the rule {raw['name']!r} has no condition; conditions are {', '.join(_CONDITIONS)}")
    if raw["blame"] == Responsibility.USER and (raw.get("transient") or raw.get("node_at_fault")):
        key = "transient" if raw.get("transient") else "node_at_fault"
        raise wrong(key, "a user's own failure recurs wherever the job runs")
    patterns: dict[str, Pattern] = {}
    for key in ("line", "sign"):
        if key in raw:
            try:
                patterns[key] = safe_pattern(raw[key])
            except ValueError as error:
                raise wrong(key, str(error)) from None
    return Rule(
        raw["name"],
        raw["class"],
        Responsibility(raw["blame"]),
        patterns.get("line"),
        patterns.get("sign"),
        tuple(raw.get("signals", ())),
        tuple(raw.get("exit_codes", ())),
        raw.get("out_of_memory", False),
        raw.get("transient", False),
        raw.get("node_at_fault", False),
        raw.get("example", ""),
        f"{source}:{at}",
    )


def safe_pattern(text: str) -> Pattern:
    r"""Return a compiled pattern that takes time linear in the length of a line.

    Raises:
        ValueError: the pattern is not in RE2's syntax, or matches everything.

    >>> safe_pattern(r"no space left on .*").pattern
    'no space left on .*'
    >>> safe_pattern("a*")
    Traceback (most recent call last):
    ...
    ValueError: matches everything
    """
    if not text:
        raise ValueError(f"must be a pattern of at most {PATTERN_LENGTH_MAX} characters")
    compiled = compile_pattern(text, PATTERN_LENGTH_MAX)
    if compiled.search(""):
        raise ValueError("matches everything")
    return compiled
