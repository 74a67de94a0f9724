"""Runs a recorded simulation again and compares every event with the recording."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from cotenant.simulator.recording.event_file import Recording, Seal, versions
from cotenant.simulator.recording.events import Event, line_of
from cotenant.simulator.run import Watch


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line in which a recording and its repetition differ; None if one of them has no such line."""

    line: int
    recorded: str | None
    repeated: str | None
    at_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of replaying a recording. `interrupted`: the replay was stopped before the recording's end."""

    events: int
    complete: bool
    difference: Difference | None
    versions: tuple[str, ...]
    interrupted: bool = False


class _Stop(Exception):
    """Stops the repetition early; with a difference if there is one."""

    def __init__(self, difference: Difference | None = None) -> None:
        super().__init__(difference)
        self.difference = difference


class _Comparison:
    """Compares the repetition's events with the recording's lines."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lines = recording.lines()
        self._numbers = count(2)  # the header is line 1
        self.seal = Seal(recording.header_line)
        self._next = next(self._lines, None)

    def record(self, event: Event) -> None:
        """Compare the next event."""
        number, line = next(self._numbers), event.as_line()
        if self._next is None:
            incomplete = self._recording.end is None or self._recording.end.get("complete") is not True
            raise _Stop(None if incomplete else Difference(number, None, line, event.at_seconds))
        if self._next != line.encode():
            raise _Stop(Difference(number, _text(self._next), line, event.at_seconds))
        self.seal.add(event.at_seconds, line)
        self._next = next(self._lines, None)

    def close(self) -> Difference | None:
        """Compare the rest: no further event, and the end."""
        number = next(self._numbers)
        if self._next is not None:
            return Difference(number, _text(self._next), None)
        told = self._recording.end or {}
        expected = f"{line_of(self.seal.end(complete=told.get('complete') is True))}\n".encode()
        if self._recording.end is not None and self._recording.end_line != expected:
            return Difference(number, _text(self._recording.end_line), _text(expected))
        return None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\n")


def check(recording: Recording, *, trace: str | None = None, watch: Watch | None = None) -> Verdict:
    """Simulate a recorded scenario again; `trace` is the trace's present path.

    Raises:
        BadRecording: it cannot be read, or its trace or cluster is missing or has changed.
        BadTrace, BadCluster, UnknownPolicy, BadOption, PolicyFailed: as in `simulate`.
    """
    scenario = recording.scenario(trace)
    comparison = _Comparison(recording)
    interrupted = False
    try:
        interrupted = not scenario.run(watch=watch, recorder=comparison).complete
        difference = None if interrupted else comparison.close()
    except _Stop as over:
        difference = over.difference or comparison.close()
    complete = recording.end is not None and recording.end.get("complete") is True
    return Verdict(comparison.seal.events, complete, difference, tuple(_versions(recording)), interrupted)


def _versions(recording: Recording) -> Iterator[str]:
    """Yield the versions that differ from those of the recording."""
    told = recording.header.get("versions")
    told = told if isinstance(told, dict) else {}
    for name, version in versions().items():
        if told.get(name) != version:
            yield f"{name} {told.get(name)} (now {version})"
