"""Finished jobs as features for models of run time: facts known at submission, the submission time, and the outcome.

Facts that only a run produces (its rate, its loss, its placement) are left out, because a model that is queried at
submission could not know them. Ends are stored as compressed blocks: the blocks are written to the store and sent to
training processes, and are by far the smallest form.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cotenant.core.model.estimate import Observation, Query, Submission
from cotenant.core.model.job import WHOLE_GPU_MILLI, Role

BLOCK_ENDS = 256
BLOCK_BYTES_MAX = 4 * 2**20  # after decompression
WORD_LENGTH_MAX = 64
FACTS_MAX = 64

Fact = tuple[str, float | str]  # a field's name; a number, or a word
Facts = tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class End:
    """An ended job. `surprising`: whether it was unpredictable; None if unknown."""

    facts: Facts
    submitted_seconds: float
    ended_seconds: float
    run_seconds: float
    surprising: bool | None = None


def facts_of(about: Query | Observation) -> Facts:
    """Return what was known of a job at its submission.

    >>> dict(facts_of(Query("vision", "bert", "", gpu_milli=2000, replicas=2)))["gpus"]
    2.0
    """
    told = about.submission
    return (
        ("tenant", about.user),
        ("kind", (about.model or about.name)[:WORD_LENGTH_MAX]),
        ("gpus", about.gpu_milli / WHOLE_GPU_MILLI),
        ("shape", role_summary(told.roles) or str(about.replicas)),
        ("submitter", told.submitter or about.user),
        ("name", about.name[:WORD_LENGTH_MAX]),
        *(*_asked(told.kind, told.roles, told.steps_total), *_labels(told.labels))[:FACTS_MAX],
    )


@lru_cache(maxsize=4096)  # the same few role combinations occur job after job
def role_summary(roles: tuple[Role, ...]) -> str:
    """Return the roles and replicas of a job as one word.

    >>> role_summary((Role("ps", 2), Role("worker", 4)))
    '2 ps + 4 worker'
    """
    return " + ".join(f"{role.replicas} {role.name}" for role in roles)[:WORD_LENGTH_MAX]


@lru_cache(maxsize=4096)  # likewise
def _asked(kind: str, roles: tuple[Role, ...], steps_total: int) -> Facts:
    facts: list[Fact] = [("job kind", kind)]
    if steps_total:
        facts.append(("steps", float(steps_total)))
    for role in roles:
        asked, name = role.request, role.name[:WORD_LENGTH_MAX]
        facts.append((f"{name}: replicas", float(role.replicas)))
        facts.append((f"{name}: gpus", asked.gpu_milli / WHOLE_GPU_MILLI))
        if asked.cores is not None:
            facts.append((f"{name}: cores", float(asked.cores)))
        if asked.memory_bytes:
            facts.append((f"{name}: memory", asked.memory_bytes / 2**30))
        if asked.gpu_type:
            facts.append((f"{name}: gpu type", asked.gpu_type[:WORD_LENGTH_MAX]))
    return tuple(facts[:FACTS_MAX])


def _labels(labels: tuple[tuple[str, str], ...]) -> Facts:
    """Return the labels as facts; not cached, since a job may have 32 KiB of labels that no other job has."""
    return tuple([(f"label {name[:WORD_LENGTH_MAX]}", _number_or_word(text)) for name, text in labels])


def _number_or_word(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text[:WORD_LENGTH_MAX]
    return number if math.isfinite(number) else text[:WORD_LENGTH_MAX]


def submitted_seconds(submission: Submission) -> float:
    """Return when a job was submitted; NaN if unknown."""
    return math.nan if submission.submitted_seconds is None else submission.submitted_seconds


def pack(ends: Sequence[End]) -> bytes:
    """Encode ends; equal jobs share their facts.

    >>> end = End((("tenant", "ann"),), 10.0, 75.0, 60.0)
    >>> list(unpack(pack([end]))) == [end]
    True
    """
    shapes: dict[Facts, int] = {}
    rows = [
        [
            shapes.setdefault(end.facts, len(shapes)),
            None if math.isnan(end.submitted_seconds) else end.submitted_seconds,
            end.ended_seconds,
            end.run_seconds,
            end.surprising,
        ]
        for end in ends
    ]
    return zlib.compress(json.dumps({"facts": list(shapes), "ends": rows}, separators=(",", ":")).encode(), 1)


def unpack(content: bytes) -> Iterator[End]:
    """Decode ends.

    Raises:
        ValueError: the content was not written by `pack`.
    """
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(content, BLOCK_BYTES_MAX)
        if not unpacker.eof:
            raise ValueError("a block of ends is truncated, or far too large")
        block = json.loads(text)
        shapes = [tuple([_fact(name, value) for name, value in facts]) for facts in block["facts"]]
        ends = [_end(shapes, *row) for row in block["ends"]]
    except (zlib.error, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"invalid block of ends: {error}") from None
    return iter(ends)


def _fact(name: object, value: object) -> Fact:
    if not isinstance(name, str) or not isinstance(value, str | float):
        raise ValueError(f"invalid fact: {name!r}: {value!r}")
    return name, value


def _end(shapes: Sequence[Facts], index: int, submitted: float | None, ended: float, run: float, odd: object) -> End:
    if index < 0 or not (math.isfinite(ended) and 0 < run < math.inf) or odd not in (True, False, None):
        raise ValueError("an end has invalid figures")
    at = math.nan if submitted is None else float(submitted)
    return End(shapes[index], at, float(ended), float(run), None if odd is None else bool(odd))
