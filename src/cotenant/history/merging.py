"""Merges the recordings of the store and of processes into one order.

Theory of operation. Commits are in the order of their revisions. The time of a commit is unknown, only the later time
at which it was observed is known; so events of a process before that time are put before it, unless that is impossible:
an event that follows an order comes after the commit whose revision is the order's epoch. Events of one process stay in
their own order.

An agent records what it is about to start, and may die before it has started it. What really ran is reported by the
jobs themselves; if an agent records a start twice, and only one of them ran, it was the later one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cotenant.history.events import Began, Commit, Event, Resized, Told, Welcomed

Part = tuple[str, str, int]  # node ID, job ID and attempt number


def merged(commits: Sequence[Commit], edges: Iterable[tuple[float, Event]]) -> list[Event]:
    """Return all events in one order: `edges` have their times on the commits' clock.

    >>> told, late = Told("n", "a", epoch=2), Commit(2, (), at_seconds=5.0)
    >>> merged([late], [(1.0, Told("n", "b", epoch=1)), (3.0, told)])[1:] == [late, told]
    True
    """
    order: list[Event] = []
    waiting = sorted(edges, key=lambda pair: pair[0])
    place = 0
    for at_seconds, event in waiting:
        epoch = _epoch_of(event)
        while place < len(commits) and (commits[place].at_seconds <= at_seconds or commits[place].revision <= epoch):
            order.append(commits[place])
            place += 1
        order.append(event)
    return [*order, *commits[place:]]


def _epoch_of(event: Event) -> int:
    """Return up to which revision everything was committed before this event."""
    match event:
        case Began() | Told() | Resized():
            return event.epoch
        case Welcomed():
            return event.term
    return 0


def that_ran(edges: Iterable[tuple[float, Event]], ran: Mapping[Part, int]) -> list[tuple[float, Event]]:
    """Return the events without starts that did not run: of each attempt's part, as many starts remain as ran."""
    edges = list(edges)
    begun = Counter(part for _, event in edges if (part := _started(event)))
    kept = []
    for at_seconds, event in edges:
        if part := _started(event):
            begun[part] -= 1
            if begun[part] >= ran.get(part, 0):
                continue
        kept.append((at_seconds, event))
    return kept


def _started(event: Event) -> Part | None:
    return (event.node_id, event.job_id, event.number) if isinstance(event, Began) else None
