"""The queue receives every attempt change, in order, batched when many wait."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import cast

from cotenant.internal.v1.attempt_pb2 import AttemptEvidence, ObservedAttempt
from cotenant.services.placement.attempts.attempt_events import BATCH_ATTEMPTS_MAX, AttemptEvents, Event
from cotenant.v1 import job_pb2


def attempt(number: int, output_tail: str = "") -> ObservedAttempt:
    return ObservedAttempt(
        attempt=job_pb2.Attempt(job_id=f"job-{number}", number=1), evidence=AttemptEvidence(output_tail=output_tail)
    )


def told_in(events: Iterable[Event]) -> list[str]:
    return [observed.attempt.job_id for event in events for observed in event.attempts]


async def heard(feed: AttemptEvents, after: int, until: int) -> list[Event]:
    events: list[Event] = []
    async with aclosing(feed.watch(after)) as watch:  # type: ignore[type-var]  # it is a generator
        async for event in watch:
            copy = Event()
            copy.CopyFrom(event)
            events.append(copy)
            if event.revision >= until:
                break
    return events


async def test_waiting_events_are_batched_in_order() -> None:
    feed, count = AttemptEvents(), 3 * BATCH_ATTEMPTS_MAX
    feed.start(1, [])
    for number in range(count):
        feed.publish(2 + number, [attempt(number)])
    for _ in range(2):  # the second time from the history, which the first has left as it was
        events = await heard(feed, 2, count + 1)
        assert told_in(events) == [f"job-{number}" for number in range(count)]
        assert len(events) == 3
        assert [event.revision for event in events] == [1 + BATCH_ATTEMPTS_MAX * part for part in (1, 2, 3)]


async def test_a_snapshot_is_sent_alone() -> None:
    feed = AttemptEvents()
    feed.start(1, [attempt(0)])
    watch = feed.watch(0)
    first = cast("Event", await anext(watch))
    assert first.snapshot
    feed.publish(2, [attempt(1)])
    feed.start(3, [attempt(2)])
    feed.publish(4, [attempt(3)])
    feed.publish_capacity()
    snapshot = await anext(watch)
    assert snapshot.snapshot
    assert told_in([snapshot]) == ["job-2"]
    later = await anext(watch)
    assert later.capacity_changed
    assert told_in([later]) == ["job-3"]


async def test_evidence_is_in_changes_and_snapshots() -> None:
    feed = AttemptEvents()
    feed.start(1, [attempt(0, "before")])
    feed.publish(2, [attempt(1, "a change")])
    feed.publish(3, [attempt(2, "another")])
    (snapshot,), (batch,) = await heard(feed, 0, 3), await heard(feed, 2, 3)
    for event, tails in ((snapshot, ["before", "a change", "another"]), (batch, ["a change", "another"])):
        assert [observed.evidence.output_tail for observed in event.attempts] == tails
