"""The executor under test as a process: started, killed as a power cut would, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

STOP_SECONDS_MAX = 10.0


class ExecutorProcess:
    """A command in whose words `{endpoint}` is replaced. What it prints goes to a file."""

    def __init__(self, command: Sequence[str], endpoint: str, log: Path) -> None:
        self.log = log
        self._command = [word.replace("{endpoint}", endpoint) for word in command]
        self._environment = {"COTENANT_TOKEN": "check", **os.environ, "COTENANT_ENDPOINT": endpoint}
        self._process: Process | None = None

    async def start(self) -> None:
        """Start it.

        Raises:
            OSError: there is no such program, or it cannot be executed.
        """
        with self.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def exited(self) -> int | None:
        """Its exit code, if it has ended by itself."""
        return self._process.returncode if self._process else None

    async def kill(self) -> None:
        """Kill it, without a chance to do anything."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Stop it as an operator does, and kill it if it does not end."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
