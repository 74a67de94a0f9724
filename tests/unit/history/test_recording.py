"""Recorded events are read back unchanged, and merged with commits at possible positions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.history import recording
from cotenant.history.events import Acknowledged, Began, Commit, Event, Left, Over, Told, Welcomed, Wrote
from cotenant.history.merging import merged, that_ran

EVENTS: list[Event] = [
    Began("n", "a", 1, 3, {("n", "core 0"): 1000, ("n", "GPU-1"): 500}),
    Told("n", "a", 3),
    Welcomed("n", 2),
    Over("n", "a", 1, superseded=True),
    Left("n", 7.5),
    Wrote(9, "queue", "x"),
    Acknowledged("r", "a"),
]


def test_every_event_is_read_as_it_was_written() -> None:
    lines = [recording.written(event, float(at)) for at, event in enumerate(EVENTS)]
    assert recording.read(lines) == list(enumerate(EVENTS))


@pytest.mark.parametrize("line", ["", "{}", '{"at": 1, "kind": "Commit"}', '{"at": 1, "kind": "Told", "node": "n"}'])
def test_a_line_that_is_not_an_event_is_rejected(line: str) -> None:
    with pytest.raises(ValueError, match="not an event"):
        recording.read([line])


def test_nothing_is_written_unless_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recording.VARIABLE, raising=False)
    recording.record(EVENTS[0])
    path = tmp_path / "history"
    monkeypatch.setenv(recording.VARIABLE, str(path))
    before = recording.clock()
    for event in EVENTS:
        recording.record(event)
    found = recording.read(path.read_text().splitlines())
    assert [event for _, event in found] == EVENTS
    assert all(before <= at <= recording.clock() for at, _ in found)


def test_an_unwritable_history_stops_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recording.VARIABLE, str(tmp_path))
    recording.record(EVENTS[0])


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 8))), st.lists(st.floats(0, 1), max_size=8))
def test_each_side_keeps_its_order_and_no_order_is_obeyed_before_its_commit(
    told: list[tuple[float, int]], gaps: list[float]
) -> None:
    commits = [Commit(number, (), sum(gaps[:number]) * 2) for number in range(1, len(gaps) + 1)]
    edges: list[tuple[float, Event]] = [
        (at, Told("n", str(number), epoch)) for number, (at, epoch) in enumerate(sorted(told, key=lambda one: one[0]))
    ]
    order = merged(commits, edges)
    assert [event for event in order if isinstance(event, Commit)] == commits
    assert [event for event in order if isinstance(event, Told)] == [event for _, event in edges]
    for place, event in enumerate(order):
        if isinstance(event, Told):
            later = [one.revision for one in order[place:] if isinstance(one, Commit)]
            assert all(revision > event.epoch for revision in later)


def test_as_many_recorded_starts_remain_as_ran() -> None:
    began, other = Began("n", "a", 1, 2), Began("n", "b", 1, 3)
    edges: list[tuple[float, Event]] = [(1.0, began), (2.0, other), (3.0, began), (4.0, Over("n", "a", 1))]
    assert that_ran(edges, {("n", "a", 1): 1}) == [(3.0, began), (4.0, Over("n", "a", 1))]
    assert that_ran(edges, {("n", "a", 1): 2, ("n", "b", 1): 1}) == edges
