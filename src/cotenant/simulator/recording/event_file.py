"""Recordings as files: a header, the events in their order, and an end that seals them.

A file appears under its name when it is whole; a simulation that was stopped leaves what it had come to, marked as
incomplete; one that failed leaves nothing. The end's SHA-256 is over the lines before it, each with its newline, also
where they are kept as Parquet: there the events are rows, the header and the end are in the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from cotenant.simulator.recording.event_validation import wrong_with
from cotenant.simulator.recording.events import Event, line_of
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.traces import SAMPLE, SAMPLE_PATH

VERSION = 1
ENDINGS = (".jsonl", ".parquet")
DIGEST_CHUNK_BYTES = 2**20
LINE_BYTES_MAX = 2**26  # of a plan that starts a million jobs


class BadRecording(Exception):
    """A recording that cannot be written, read or run again, and why, in one sentence that names the file."""


class Sink(Protocol):
    """Where events go: JSON lines, or Parquet."""

    def header(self, line: str) -> None:
        """Take the header."""

    def event(self, event: Event, line: str) -> None:
        """Take an event, which the line tells too."""

    def close(self, line: str) -> None:
        """Take the end, and write what is left."""

    def abandon(self) -> None:
        """Let go of the file as it is."""


class EventFile:
    """A recording under way. Hand it to a simulation as its recorder, then `end` it."""

    def __init__(self, sink: Sink, header: Mapping[str, Any]) -> None:
        self.ended = False
        self._sink = sink
        self._seal = Seal(line_of(header))
        sink.header(line_of(header))

    def record(self, event: Event) -> None:
        """Write an event."""
        line = event.as_line()
        self._seal.add(event.at_seconds, line)
        self._sink.event(event, line)

    def end(self, *, complete: bool) -> None:
        """Seal it; `complete` False: the simulation was stopped."""
        self._sink.close(line_of(self._seal.end(complete=complete)))
        self.ended = True


class Seal:
    """Counts events and sums their lines up, so that a changed byte shows."""

    def __init__(self, header_line: str) -> None:
        self.events = 0
        self._at_seconds = 0.0
        self._digest = hashlib.sha256(f"{header_line}\n".encode())

    def add(self, at_seconds: float, line: str) -> None:
        """Take the next event."""
        self.events += 1
        self._at_seconds = at_seconds
        self._digest.update(f"{line}\n".encode())

    def end(self, *, complete: bool) -> dict[str, Any]:
        """Say what the last line should say."""
        return {
            "kind": "end",
            "complete": complete,
            "at_seconds": self._at_seconds,
            "events": self.events,
            "sha256": self._digest.hexdigest(),
        }


def header_of(scenario: Scenario) -> dict[str, Any]:
    """Say all that is needed to run a scenario again, and what it was run with."""
    return {
        "kind": "header",
        "version": VERSION,
        "scenario": scenario.as_json(),
        "files": {
            role: digest
            for role, name in (("trace", scenario.trace), ("cluster", scenario.cluster))
            if (digest := digest_of(name))
        },
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Name what a simulation is run with."""
    return {
        "cotenant": metadata.version("cotenant"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def digest_of(name: str) -> str | None:
    """Sum a file up (SHA-256); None where there is none of that name."""
    path = SAMPLE_PATH if name == SAMPLE else Path(name)
    digest = hashlib.sha256()
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            while chunk := file.read(DIGEST_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return None  # no name of a file; or whoever reads it for what it says will tell why it cannot be read
    return digest.hexdigest()


@contextmanager
def writing(path: Path, scenario: Scenario) -> Iterator[EventFile]:
    """Open a recording of a scenario for writing; it gets its name once it was ended.

    Raises:
        BadRecording: it cannot be written there, or not in that form.
    """
    _check_ending(path)
    if path.exists() and not path.is_file():
        raise BadRecording(f"events cannot be written to {path}: it is no file")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        sink = _sink(path, part)
        try:
            file = EventFile(sink, header_of(scenario))
            yield file
            if file.ended:
                part.replace(path)
        finally:
            sink.abandon()
            with suppress(FileNotFoundError):
                part.unlink()
    except OSError as error:
        raise BadRecording(f"events cannot be written to {path}: {error.strerror or error}") from error


def _check_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        raise BadRecording(f"{path}: a file of events ends in {' or '.join(ENDINGS)}")


def _sink(path: Path, part: Path) -> Sink:
    if path.suffix == ".parquet":
        from cotenant.simulator.recording.event_parquet import ParquetSink

        return ParquetSink(part)
    return LineSink(part)


class LineSink:
    """Writes JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8", newline="\n")

    def header(self, line: str) -> None:
        """Write the first line."""
        self._file.write(f"{line}\n")

    def event(self, event: Event, line: str) -> None:
        """Write a line."""
        self._file.write(f"{line}\n")

    def close(self, line: str) -> None:
        """Write the last line."""
        self._file.write(f"{line}\n")
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        with suppress(OSError):
            self._file.close()


class Recording:
    """A recording that is being read: its header, then its lines one by one, then its end.

    Raises:
        BadRecording: it cannot be read, or is no recording.
    """

    def __init__(self, path: Path) -> None:
        _check_ending(path)
        self.path = path
        self._lines = _lines_of(path)
        self.header_line = next(self._lines, b"").removesuffix(b"\n").decode(errors="replace")
        self.header = self._object(self.header_line, "header")
        if self.header.get("version") != VERSION:
            told = self.header.get("version")
            raise BadRecording(f"{path} is of version {told}; this Cotenant reads version {VERSION}")
        if not isinstance(self.header.get("scenario", {}), dict):
            raise BadRecording(f"{path}: its header tells no scenario")
        self.end: dict[str, Any] | None = None  # known once all lines were read
        self.end_line = b""

    def lines(self) -> Iterator[bytes]:
        """Give each event's line, without its newline. Where the file breaks off there is no end."""
        last: bytes | None = None
        for line in self._lines:
            if last is not None:
                yield last.removesuffix(b"\n")
            last = line
        if last is None:
            return
        with suppress(ValueError, BadRecording):
            self.end = self._object(last.decode(), "end")
            self.end_line = last
            return
        yield last.removesuffix(b"\n")

    def events(self) -> Iterator[dict[str, Any]]:
        """Give each event as plain values.

        Raises:
            BadRecording: a line is no event.
        """
        for number, line in enumerate(self.lines(), 2):
            try:
                event = json.loads(line.decode())
                if b"\\u" in line:
                    json.dumps(event, ensure_ascii=False).encode()  # no half of a character is shown to anybody
            except (ValueError, RecursionError) as error:
                raise BadRecording(f"{self.path}, line {number}: is no JSON: {error}") from error
            wrong = wrong_with(event) if isinstance(event, dict) else "it is none"
            if wrong:
                raise BadRecording(f"{self.path}, line {number}: is no event: {wrong}")
            yield event

    def _object(self, line: str, kind: str) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("kind") != kind:
            raise BadRecording(f"{self.path} is no recording of events: its first line is no {kind}")
        return found

    def scenario(self, trace: str | None = None) -> Scenario:
        """Make the scenario that was recorded, its files checked; `trace` is where the trace lies now.

        Raises:
            BadRecording: the header tells no scenario, or a file is missing or another than it was.
        """
        try:
            scenario = Scenario(**self.header["scenario"])
            files = dict(self.header["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecording(f"{self.path}: its header tells no scenario: {error}") from error
        now = {"trace": trace or scenario.trace, "cluster": scenario.cluster}
        for role, digest in files.items():
            if role in now:
                self._check_file(role, str(now[role]), digest)
        return Scenario(**{**scenario.as_json(), "trace": now["trace"]})

    def _check_file(self, role: str, name: str, digest: str) -> None:
        found = digest_of(name)
        remedy = "; --trace points to where it lies now" if role == "trace" else ""
        if found is None:
            raise BadRecording(f"the {role} of {self.path} is missing: there is no file {name}{remedy}")
        if found != digest:
            raise BadRecording(
                f"the {role} {name} is not the one of {self.path}: "
                f"its SHA-256 is {found[:12]}…, recorded was {str(digest)[:12]}…{remedy}"
            )


def _lines_of(path: Path) -> Iterator[bytes]:
    """Give the lines of a recording, each with its newline."""
    if path.suffix == ".parquet":
        from cotenant.simulator.recording.event_parquet import lines_of

        yield from lines_of(path)
        return
    try:
        with path.open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX):
                yield line
    except OSError as error:
        raise BadRecording(f"{path} cannot be read: {error.strerror or error}") from error
