"""A cache of cases' figures in a directory.

A full run takes a while, and a stopped run should not have to start over. Each paper has a file there, with one line
for each finished case. A case's figures depend on its work, on the code, on what is bundled with it, on the libraries
and on the data: a line is used only if the digest of all these matches. Lines of other code versions are kept, in case
that code is used again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cotenant.reproduction.model import BUNDLED, Case, Data, Figures
from cotenant.simulator.recording.event_file import versions

PACKAGES = ("core", "policies", "simulator", "reproduction")  # of the package: what figures depend on
ENDINGS = (".py", ".csv", ".csv.gz", ".json", ".toml")  # of code and bundled data
LIBRARIES = ("lightgbm", "scikit-learn", "scipy")  # in addition to those in recordings


class BadDirectory(Exception):
    """A directory in which nothing can be cached; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The figures of a case, and its cost."""

    figures: Figures
    processor_seconds: float


class ResultCache:
    """The cached cases of a paper. Without a directory nothing is cached."""

    def __init__(self, directory: Path | None = None, paper: str = "", data: Data = BUNDLED) -> None:
        """Read the cache.

        Raises:
            BadDirectory: it cannot be created, read or written.
        """
        self._path = directory / f"{paper}.jsonl" if directory else None
        self._found: dict[str, CaseResult] = {}
        if self._path is None:
            return
        self._under = _digest_of_code() + _digest_of(data)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+", encoding="utf-8", errors="replace") as file:
                file.seek(0)
                lines = file.readlines()
                file.write("\n" * (bool(lines) and not lines[-1].endswith("\n")))  # after a line of a killed run
        except OSError as error:
            raise BadDirectory(f"figures cannot be cached in {directory}: {error.strerror or error}") from error
        self._found = dict(_read(lines))

    def of(self, case: Case) -> CaseResult | None:
        """Return the cached result of a case; None if there is none, or if the case is not repeatable."""
        return self._found.get(self._key(case)) if self._path and case.repeatable else None

    def keep(self, case: Case, ran: CaseResult) -> None:
        """Add a case.

        Raises:
            BadDirectory: no space, or no permission.
        """
        if self._path is None or not case.repeatable:
            return
        line = {
            "key": self._key(case),
            "case": str(case),
            "processor_seconds": round(ran.processor_seconds, 6),
            "values": dict(ran.figures.values),
            "series": {name: list(those) for name, those in ran.figures.series.items()},
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise BadDirectory(f"{self._path} cannot be written: {error.strerror or error}") from error

    def _key(self, case: Case) -> str:
        return hashlib.sha256(f"{self._under}{case!r}".encode()).hexdigest()


def _read(lines: Sequence[str]) -> Iterator[tuple[str, CaseResult]]:
    """Yield the cached results; truncated lines are skipped."""
    for line in lines:
        try:
            stat = json.loads(line)
            series = {name: tuple(map(float, those)) for name, those in stat["series"].items()}
            values = {name: float(value) for name, value in stat["values"].items()}
            yield str(stat["key"]), CaseResult(Figures(values, series), float(stat["processor_seconds"]))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue


def _digest_of_code() -> str:
    """Return a digest of the code, what is bundled with it, and the libraries that figures depend on."""
    beneath = versions() | {name: _version(name) for name in LIBRARIES}
    digest = hashlib.sha256(json.dumps(beneath, sort_keys=True).encode())
    package = Path(__file__).parents[1]
    for room in PACKAGES:
        for path in sorted(_files(package / room)):
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(library: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(library)
    return ""


def _files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder) / name for name in names if name.endswith(ENDINGS))


def _digest_of(data: Data) -> str:
    """Return a digest of the data's files, their sizes and modification times."""
    digest = hashlib.sha256()
    if data.directory:
        for path in sorted(data.directory.glob("*/*")):
            stat = path.stat()
            digest.update(f"{path.relative_to(data.directory)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()
