"""Reads progress out of a job's output with the regular expression that its user gave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import re2
import structlog

from cotenant.core.model.patterns import MEMORY_BYTES_MAX
from cotenant.node_agent.control.progress import LINE_BYTES_MAX, Told, told
from cotenant.node_agent.runtime.attempt_status import AttemptKey
from cotenant.node_agent.runtime.output_reader import OutputReader, ranks_in

log = structlog.get_logger()

PROCESS = Path(__file__).with_name("pattern_process.py")
RE2_DIRECTORY = str(Path(re2.__file__).parent.parent)
SEARCH_SECONDS_MAX = 1.0
START_SECONDS_MAX = 10.0
LOOK_BACK_BYTES = 65536
ANSWER_BYTES_MAX = 65536


class TooSlow(Exception):
    """A pattern did not come to an end in time."""


class PatternMatcher:
    """One process for all patterns of a node, started with the first and again after each that it was killed for."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def search(self, pattern: str, lines: list[str]) -> dict[str, str]:
        """Ask the process. Raises `TooSlow`; the process is killed then."""
        async with self._turn:
            try:
                await self._ensure()
                return await asyncio.wait_for(self._ask(pattern, lines), SEARCH_SECONDS_MAX)
            except (TimeoutError, OSError, ValueError) as error:
                await self._kill()
                raise TooSlow(f"took longer than {SEARCH_SECONDS_MAX:.0f} s") from error
            except asyncio.CancelledError:
                await self._kill()  # else its late answer would be taken for the next one's
                raise

    async def _ensure(self) -> None:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(PROCESS), RE2_DIRECTORY, str(MEMORY_BYTES_MAX),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
                env={}, limit=ANSWER_BYTES_MAX,
            )  # fmt: skip
            await asyncio.wait_for(self._ask("()", []), START_SECONDS_MAX)

    async def _ask(self, pattern: str, lines: list[str]) -> dict[str, str]:
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
        """End the process."""
        await self._kill()


class OutputPattern:
    """One attempt's pattern and how far its output has been read."""

    def __init__(
        self, key: AttemptKey, regex: str, directory: Callable[[], Path | None], matcher: PatternMatcher
    ) -> None:
        self.usable = True
        self._key = key
        self._regex = regex
        self._directory = directory
        self._matcher = matcher
        self._readers: dict[int, OutputReader] = {}
        self._rests: dict[int, bytes] = {}

    async def newest(self) -> Told | None:
        """What the newest matching line since the last call tells; over all ranks, the one read last."""
        directory = self._directory()
        if directory is None or not self.usable:
            return None
        newest = None
        for rank in ranks_in(directory):
            if rank not in self._readers:
                self._readers[rank] = OutputReader(directory, rank)
            newest = await self._search(self._new_lines(rank, self._readers[rank])) or newest
        return newest

    def _new_lines(self, rank: int, reader: OutputReader) -> list[str]:
        """Whole lines written since the last time: the end of them, should there be very many."""
        data = self._rests.get(rank, b"")
        while (piece := reader.read()).data:
            data = (data + piece.data)[-LOOK_BACK_BYTES:]
        *lines, rest = re.split(rb"[\r\n]+", data)  # progress bars end their lines with carriage returns
        self._rests[rank] = rest[-LINE_BYTES_MAX:]
        return [line[:LINE_BYTES_MAX].decode(errors="replace") for line in lines if line]

    async def _search(self, lines: list[str]) -> Told | None:
        if not lines:
            return None
        try:
            found = await self._matcher.search(self._regex, lines)
        except TooSlow as error:
            found = {"error": str(error)}
        if "error" in found:
            self.usable = False
            log.warning("progress_pattern_dropped", attempt=str(self._key), pattern=self._regex, why=found["error"])
            return None
        return told(found.get("step"), found.get("loss"))

    def close(self) -> None:
        """Let go of the output."""
        for reader in self._readers.values():
            reader.close()
