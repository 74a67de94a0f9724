"""Brings what the store and the edges of processes have recorded into one order.

Theory of operation. Commits are in the order of their revisions. When one happened is not known, only when it was heard
of, which was later; so whatever an edge did before that is put before it, unless it cannot have been: what follows an
order comes after the commit that the order bears as its epoch. Each edge's events stay in their own order.

An agent writes down what it is about to start, and may die before it has. What it started is what ran, which jobs
tell themselves; where an agent writes down a start twice, and only one of them ran, the later one did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cotenant.history.events import Began, Commit, Event, Resized, Told, Welcomed

Part = tuple[str, str, int]  # a node's id, a job's and an attempt's number


def merged(commits: Sequence[Commit], edges: Iterable[tuple[float, Event]]) -> list[Event]:
    """One order of all events: `edges` with the times at which they happened, on the clock of the commits'.

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
    """Up to which revision everything was committed before this."""
    match event:
        case Began() | Told() | Resized():
            return event.epoch
        case Welcomed():
            return event.term
    return 0


def that_ran(edges: Iterable[tuple[float, Event]], ran: Mapping[Part, int]) -> list[tuple[float, Event]]:
    """The events without the starts that came to nothing: of each part of an attempt as many as ran are left."""
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
