"""Extracts progress from a job's output with the user's regular expression."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import structlog

from cotenant.core.model.patterns import MEMORY_BYTES_MAX
from cotenant.node_agent.control.progress import LINE_BYTES_MAX, ProgressUpdate, progress_update
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.output_reader import OutputReader, ranks_in

log = structlog.get_logger()

PROCESS = Path(__file__).with_name("pattern_process.py")
RE2 = find_spec("re2")  # only the process loads it, which takes 2 MiB
if RE2 is None or RE2.origin is None:
    raise ModuleNotFoundError("No module named 're2'", name="re2")
RE2_DIRECTORY = str(Path(RE2.origin).parent.parent)
SEARCH_SECONDS_MAX = 1.0
START_SECONDS_MAX = 10.0
LOOK_BACK_BYTES = 65536
ANSWER_BYTES_MAX = 65536


class PatternTimeout(Exception):
    """A pattern search did not finish in time."""


class PatternMatcher:
    """One process that searches for all patterns of a node; started on first use and restarted after each kill."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def search(self, pattern: str, lines: list[str]) -> dict[str, str]:
        """Search lines in the process. On timeout the process is killed. Raises `PatternTimeout`."""
        async with self._lock:
            try:
                await self._ensure()
                return await asyncio.wait_for(self._request(pattern, lines), SEARCH_SECONDS_MAX)
            except (TimeoutError, OSError, ValueError) as error:
                await self._kill()
                raise PatternTimeout(f"took longer than {SEARCH_SECONDS_MAX:.0f} s") from error
            except asyncio.CancelledError:
                await self._kill()  # its late answer would be taken for the next request's
                raise

    async def _ensure(self) -> None:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(PROCESS), RE2_DIRECTORY, str(MEMORY_BYTES_MAX),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
                env={}, limit=ANSWER_BYTES_MAX,
            )  # fmt: skip
            await asyncio.wait_for(self._request("()", []), START_SECONDS_MAX)

    async def _request(self, pattern: str, lines: list[str]) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"pattern": pattern, "lines": lines}).encode() + b"\n")
        await self._process.stdin.drain()
        answer = json.loads(await self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    async def _kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def close(self) -> None:
        """Stop the process."""
        await self._kill()


class OutputPattern:
    """One attempt's pattern and how far its output has been searched."""

    def __init__(
        self, key: AttemptKey, regex: str, directory: Callable[[], Path | None], matcher: PatternMatcher
    ) -> None:
        self.usable = True
        self._key = key
        self._regex = regex
        self._directory = directory
        self._matcher = matcher
        self._readers: dict[int, OutputReader] = {}
        self._partial_lines: dict[int, bytes] = {}

    async def latest(self) -> ProgressUpdate | None:
        """Return the progress in the last matching line since the previous call; over all ranks, the last one read."""
        directory = self._directory()
        if directory is None or not self.usable:
            return None
        latest = None
        for rank in ranks_in(directory):
            if rank not in self._readers:
                self._readers[rank] = OutputReader(directory, rank)
            latest = await self._search(self._new_lines(rank, self._readers[rank])) or latest
        return latest

    def _new_lines(self, rank: int, reader: OutputReader) -> list[str]:
        """Return the complete lines written since the last call; only the last ones if there are very many."""
        data = self._partial_lines.get(rank, b"")
        while (piece := reader.read()).data:
            data = (data + piece.data)[-LOOK_BACK_BYTES:]
        *lines, rest = re.split(rb"[\r\n]+", data)  # progress bars end their lines with carriage returns
        self._partial_lines[rank] = rest[-LINE_BYTES_MAX:]
        return [line[:LINE_BYTES_MAX].decode(errors="replace") for line in lines if line]

    async def _search(self, lines: list[str]) -> ProgressUpdate | None:
        if not lines:
            return None
        try:
            found = await self._matcher.search(self._regex, lines)
        except PatternTimeout as error:
            found = {"error": str(error)}
        if "error" in found:
            self.usable = False
            log.warning("progress_pattern_dropped", attempt=str(self._key), pattern=self._regex, why=found["error"])
            return None
        return progress_update(found.get("step"), found.get("loss"))

    def close(self) -> None:
        """Close the output files."""
        for reader in self._readers.values():
            reader.close()
