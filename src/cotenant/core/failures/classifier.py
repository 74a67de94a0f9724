"""Classifies how an attempt ended: pure, and fast whatever the job printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from cotenant.core.failures.rules import Responsibility, Rule

TAIL_LENGTH_MAX = 4096
LINE_LENGTH_MAX = 500
LINES_MAX = 200  # distinct lines, the newest
EVIDENCE_LENGTH_MAX = 300
SIGNS_MAX = 16
UNCLASSIFIED = "unclassified"


@dataclass(frozen=True, slots=True)
class Failure:
    """The class of failure that ended an attempt, judged by exit and output; `rule` is "" if none matched."""

    failure_class: str = UNCLASSIFIED
    blame: Responsibility = Responsibility.UNKNOWN
    rule: str = ""
    evidence: str = ""
    transient: bool = False
    node_at_fault: bool = False


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended: `tail` is the end of the deciding process's output, `message` the agent's own message.

    `signal` is 0 if the process ended by itself with `exit_code`. `signs` is what the node observed during the attempt.
    """

    exit_code: int = 0
    signal: int = 0
    out_of_memory: bool = False
    message: str = ""
    tail: str = ""
    signs: Sequence[str] = ()


def classify(end: AttemptEnd, rules: Sequence[Rule]) -> Failure:
    r"""Return the class of a failure: the first matching rule decides, by the newest matching line.

    >>> from cotenant.core.failures.rules import parse_rules
    >>> rules = parse_rules('version = 1\n[[rule]]\nname = "import"\nclass = "import_error"\nblame = "user"\n'
    ...     "line = 'ModuleNotFoundError: '", "rules")
    >>> end = AttemptEnd(exit_code=1, tail="Traceback\nModuleNotFoundError: No module named 'torch'\n")
    >>> classify(end, rules).evidence
    "ModuleNotFoundError: No module named 'torch'"
    >>> classify(AttemptEnd(exit_code=3), rules).failure_class
    'unclassified'
    """
    tail = end.tail[-TAIL_LENGTH_MAX:].splitlines()
    newest = (shorten(line) for line in reversed([*tail, end.message]) if line.strip())
    lines = list(islice(dict.fromkeys(newest), LINES_MAX))
    signs = [shorten(sign) for sign in end.signs[:SIGNS_MAX]]
    for rule in rules:
        evidence = _evidence(rule, end, lines, signs)
        if evidence is not None:
            return Failure(
                rule.failure_class,
                rule.blame,
                rule.name,
                evidence[:EVIDENCE_LENGTH_MAX],
                rule.transient,
                rule.node_at_fault,
            )
    return Failure(evidence=_last(end, lines)[:EVIDENCE_LENGTH_MAX])


def shorten(line: str) -> str:
    """Return a long line with its middle cut out: its beginning names the error, its end often the cause."""
    line = line.strip()
    if len(line) <= LINE_LENGTH_MAX:
        return line
    half = (LINE_LENGTH_MAX - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def _evidence(rule: Rule, end: AttemptEnd, lines: Sequence[str], signs: Sequence[str]) -> str | None:
    """Return the evidence for a rule; None if it does not match."""
    words: list[str] = []
    if rule.out_of_memory:
        if not end.out_of_memory:
            return None
        words.append("killed by the kernel: out of memory")
    if rule.signals:
        if end.signal not in rule.signals:
            return None
        words.append(f"killed by signal {end.signal}")
    if rule.exit_codes:
        if end.signal or end.exit_code not in rule.exit_codes:
            return None
        words.append(f"exited with status {end.exit_code}")
    for pattern, texts in ((rule.sign, signs), (rule.line, lines)):
        if pattern is not None:
            found = next((text for text in texts if pattern.search(text)), None)
            if found is None:
                return None
            words.insert(0, found)
    return words[0]


def _last(end: AttemptEnd, lines: Sequence[str]) -> str:
    """Return at least the last line that the process printed."""
    printed = [line for line in lines if line != end.message.strip()]
    return printed[0] if printed else ""
