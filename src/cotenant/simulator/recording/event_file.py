"""Recording files: a header, the events in order, and an end line that seals them.

A file appears under its name once complete; a simulation that was stopped leaves its events so far, marked as
incomplete; one that failed leaves nothing. The SHA-256 of the end line covers the lines before it, each with its
newline, also in Parquet files: there events are rows, and the header and the end are in the file's metadata.
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

from cotenant.simulator.recording.event_validation import BadRecording, invalid_reason
from cotenant.simulator.recording.events import Event, line_of
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.traces import SAMPLE, SAMPLE_PATH

VERSION = 1
ENDINGS = (".jsonl", ".parquet")
DIGEST_CHUNK_BYTES = 2**20
LINE_BYTES_MAX = 2**26  # of a plan that starts a million jobs


class Sink(Protocol):
    """A destination of events: JSON lines, or Parquet."""

    def header(self, line: str) -> None:
        """Write the header."""

    def event(self, event: Event, line: str) -> None:
        """Write an event, which is also given as a line."""

    def close(self, line: str) -> None:
        """Write the end line and buffered events."""

    def abandon(self) -> None:
        """Close the file as it is."""


class EventFile:
    """A recording being written. Pass it to a simulation as its recorder, then call `end`."""

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
    """The number of events and a digest of their lines, so that a changed byte is detected."""

    def __init__(self, header_line: str) -> None:
        self.events = 0
        self._at_seconds = 0.0
        self._digest = hashlib.sha256(f"{header_line}\n".encode())

    def add(self, at_seconds: float, line: str) -> None:
        """Add the next event."""
        self.events += 1
        self._at_seconds = at_seconds
        self._digest.update(f"{line}\n".encode())

    def end(self, *, complete: bool) -> dict[str, Any]:
        """Return the end line."""
        return {
            "kind": "end",
            "complete": complete,
            "at_seconds": self._at_seconds,
            "events": self.events,
            "sha256": self._digest.hexdigest(),
        }


def header_of(scenario: Scenario) -> dict[str, Any]:
    """Return the header: all that is needed to run a scenario again, and the versions it was run with."""
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
    """Return the versions that a simulation runs with."""
    return {
        "cotenant": metadata.version("cotenant"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def digest_of(name: str) -> str | None:
    """Return the SHA-256 of a file; None if there is no such file."""
    path = SAMPLE_PATH if name == SAMPLE else Path(name)
    digest = hashlib.sha256()
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            while chunk := file.read(DIGEST_CHUNK_BYTES):
                digest.update(chunk)
    except OSError:
        return None  # not a file name; or its reader reports why it cannot be read
    return digest.hexdigest()


@contextmanager
def writing(path: Path, scenario: Scenario) -> Iterator[EventFile]:
    """Open a recording of a scenario for writing; it gets its name once it has ended.

    Raises:
        BadRecording: the file cannot be written, or its format is unknown.
    """
    _check_ending(path)
    if path.exists() and not path.is_file():
        raise BadRecording(f"events cannot be written to {path}: it is not a regular file")
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
        raise BadRecording(f"{path}: a file of events must end in {' or '.join(ENDINGS)}")


def _sink(path: Path, part: Path) -> Sink:
    if path.suffix == ".parquet":
        from cotenant.simulator.recording.event_parquet import ParquetSink

        return ParquetSink(part)
    return LineSink(part)


class LineSink:
    """A sink of JSON lines."""

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
    """A recording being read: its header, then its lines one by one, then its end.

    Raises:
        BadRecording: it cannot be read, or is not a recording.
    """

    def __init__(self, path: Path) -> None:
        _check_ending(path)
        self.path = path
        self._lines = _lines_of(path)
        self.header_line = next(self._lines, b"").removesuffix(b"\n").decode(errors="replace")
        self.header = self._object(self.header_line, "header")
        if self.header.get("version") != VERSION:
            told = self.header.get("version")
            raise BadRecording(f"{path} has version {told}; this Cotenant reads version {VERSION}")
        if not isinstance(self.header.get("scenario", {}), dict):
            raise BadRecording(f"{path}: its header has no scenario")
        self.end: dict[str, Any] | None = None  # known once all lines were read
        self.end_line = b""

    def lines(self) -> Iterator[bytes]:
        """Yield each event's line, without its newline. A truncated file has no end."""
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
        """Yield each event as plain values.

        Raises:
            BadRecording: a line is not an event.
        """
        for number, line in enumerate(self.lines(), 2):
            try:
                event = json.loads(line.decode())
                if b"\\u" in line:
                    json.dumps(event, ensure_ascii=False).encode()  # rejects lone surrogates, which cannot be printed
            except (ValueError, RecursionError) as error:
                raise BadRecording(f"{self.path}, line {number}: invalid JSON: {error}") from error
            wrong = invalid_reason(event) if isinstance(event, dict) else "not an object"
            if wrong:
                raise BadRecording(f"{self.path}, line {number}: invalid event: {wrong}")
            yield event

    def _object(self, line: str, kind: str) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("kind") != kind:
            raise BadRecording(f"{self.path} is not a recording of events: its first line is not a {kind}")
        return found

    def scenario(self, trace: str | None = None) -> Scenario:
        """Return the recorded scenario after checking its files; `trace` is the trace's present path.

        Raises:
            BadRecording: the header has no scenario, or a file is missing or has changed.
        """
        try:
            scenario = Scenario(**self.header["scenario"])
            files = dict(self.header["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadRecording(f"{self.path}: its header has no valid scenario: {error}") from error
        now = {"trace": trace or scenario.trace, "cluster": scenario.cluster}
        for role, digest in files.items():
            if role in now:
                self._check_file(role, str(now[role]), digest)
        return Scenario(**{**scenario.as_json(), "trace": now["trace"]})

    def _check_file(self, role: str, name: str, digest: str) -> None:
        found = digest_of(name)
        remedy = "; --trace gives its present path" if role == "trace" else ""
        if found is None:
            raise BadRecording(f"the {role} of {self.path} is missing: there is no file {name}{remedy}")
        if found != digest:
            raise BadRecording(
                f"the {role} {name} is not the one of {self.path}: "
                f"its SHA-256 is {found[:12]}…, recorded was {str(digest)[:12]}…{remedy}"
            )


def _lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a recording, each with its newline."""
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
