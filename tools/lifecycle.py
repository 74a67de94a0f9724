"""Generates docs/lifecycle.md from the transition tables in cotenant.core.model.lifecycle: `make docs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from cotenant.core.model.lifecycle import ATTEMPT_ENDED, ATTEMPT_NEXT, ENDED, JOB_NEXT, AttemptState, Phase

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lifecycle.md"

TEXT = """\
# The life cycle of jobs and attempts

Drawn by `make docs` from the transition tables in `cotenant.core.model.lifecycle`; a test fails if this page differs.
An event without an arrow from the current state is refused, with the history of the job.

## A job

{job}

A queued job is scheduled unless something holds it: the backoff after a failure, the jobs it depends on
(`DEPENDENCY`), or the limit of its array (`ARRAY_LIMIT`). A job that depends on the success of another job is
cancelled automatically if that job ends without success, even if the dependent job is suspended.

## An attempt: one run of a job

{attempt}
"""


def page() -> str:
    """Return the whole page."""
    return TEXT.format(
        job=diagram(Phase.QUEUED, JOB_NEXT, ENDED),
        attempt=diagram(AttemptState.ASSIGNED, ATTEMPT_NEXT, ATTEMPT_ENDED),
    )


def diagram(first: State, table: Mapping[tuple[State, Event], State], ended: Collection[State]) -> str:
    """Return a transition table as a Mermaid state diagram; events with the same transition share an arrow.

    >>> class Door(StrEnum):
    ...     OPEN = "open"
    ...     SHUT = "shut"
    >>> class CoreGrant(StrEnum):
    ...     PUSH = "push"
    >>> print(diagram(Door.OPEN, {(Door.OPEN, CoreGrant.PUSH): Door.SHUT}, [Door.SHUT]))
    ```mermaid
    stateDiagram-v2
        [*] --> open
        open --> shut: push
        shut --> [*]
    ```
    """
    arrows: dict[tuple[State, State], list[str]] = defaultdict(list)
    for (state, event), after in table.items():
        arrows[state, after].append(event.value.replace("_", " "))
    lines = [
        f"[*] --> {first}",
        *(f"{state} --> {after}: {', '.join(events)}" for (state, after), events in arrows.items()),
        *(f"{state} --> [*]" for state in sorted(ended)),
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"   wrote {PAGE.relative_to(PAGE.parent.parent)}")
