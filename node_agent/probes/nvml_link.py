"""The agent's line to the process that asks NVML; it never loads NVML itself.

A call that does not come back in time costs that process its life. A new one is started after a while, but never while
the old one is still there: a process that the driver holds in the kernel cannot be killed, and two of them would hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import structlog

from cotenant.node_agent.backoff import Backoff

log = structlog.get_logger()

PROCESS = Path(__file__).with_name("nvml_process.py")
START_SECONDS_MAX = 60.0  # without persistence mode the driver first starts the GPUs, one after the other
ASK_SECONDS_MAX = 5.0
ANSWER_BYTES_MAX = 4 << 20
END_SECONDS_MAX = 1.0
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 1.0, 60.0


class NvmlSilent(Exception):
    """NVML does not answer; why, in a few words."""


class NvmlAbsent(Exception):
    """There is no driver here."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that NVML told of by itself: an XID, or with None a double-bit ECC error."""

    gpu_uuid: str
    xid: int | None


@dataclass(slots=True)
class NvmlLink:
    """One process at a time, started when it is first asked."""

    sysfs: Path
    on_event: Callable[[Event], None] = lambda event: None  # whoever watches sets it
    ask_seconds_max: float = ASK_SECONDS_MAX
    start_seconds_max: float = START_SECONDS_MAX
    retry_seconds_first: float = RETRY_SECONDS_FIRST
    troubles: list[str] = field(default_factory=list)  # of single GPUs, as of the last look at all of them
    minors: dict[str, int] = field(default_factory=dict)  # the N of /dev/nvidiaN, by UUID, where it is told
    unwatched: list[str] = field(default_factory=list)  # GPUs of which no event will be told, and why
    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _backoff: Backoff | None = None
    _not_before: float = 0.0
    _why: str = ""

    async def gpus(self) -> list[dict[str, Any]]:
        """All GPUs that NVML shows. Raises `NvmlAbsent` or `NvmlSilent`."""
        async with self._turn:
            return await self._start() if self._process is None else await self._look()

    async def readings(self) -> list[dict[str, Any]]:
        """How the GPUs are. Raises `NvmlSilent`."""
        async with self._turn:
            if self._process is None:
                await self._start()
            answer = await self._ask("readings", self.ask_seconds_max)
            readings: list[dict[str, Any]] = answer["readings"]
            return readings

    async def _start(self) -> list[dict[str, Any]]:
        """Begin a process and have it look at all GPUs, which it must before it can tell of them."""
        now = asyncio.get_running_loop().time()
        if now < self._not_before:
            raise NvmlSilent(self._why)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(PROCESS), str(self.sysfs),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("COTENANT_")},
            limit=ANSWER_BYTES_MAX,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self._process))
        gpus = await self._look(self.start_seconds_max)
        self._backoff = None
        return gpus

    async def _look(self, seconds_max: float | None = None) -> list[dict[str, Any]]:
        answer = await self._ask("gpus", seconds_max or self.ask_seconds_max)
        self.troubles = answer["troubles"]
        gpus: list[dict[str, Any]] = answer["gpus"]
        self.minors = {gpu["uuid"]: gpu["minor"] for gpu in gpus if gpu["minor"] >= 0}
        return gpus

    async def _ask(self, what: str, seconds_max: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        number = next(self._numbers)
        if process.returncode is not None:
            await self._give_up("its process has ended")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds_max):
                process.stdin.write(json.dumps({"id": number, "ask": what}).encode() + b"\n")
                await process.stdin.drain()
                told = await answer
        except TimeoutError:
            await self._give_up(f"no answer within {seconds_max:g} s")
        except (OSError, NvmlSilent) as error:
            await self._give_up(str(error) or type(error).__name__)
        except asyncio.CancelledError:
            await self._end()
            raise
        finally:
            self._answers.pop(number, None)
        if told.get("absent"):
            await self._end()
            raise NvmlAbsent
        if "failed" in told:
            await self._give_up(str(told["failed"]))
        return dict(told)

    async def _give_up(self, why: str) -> None:
        """End the process, and raise."""
        if self._backoff is None:
            self._backoff = Backoff(
                first_seconds=self.retry_seconds_first, longest_seconds=RETRY_SECONDS_MAX, rng=Random(0)
            )
        self._why = why
        self._not_before = asyncio.get_running_loop().time() + self._backoff.next_seconds()
        log.error("nvml_silent", why=why)
        await self._end()
        raise NvmlSilent(why)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        why = "its process has ended"
        try:
            while line := await process.stdout.readline():
                self._heard(json.loads(line))
        except (OSError, ValueError) as error:
            why = f"its process cannot be understood: {error}"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(NvmlSilent(why))

    def _heard(self, told: dict[str, Any]) -> None:
        if "id" in told:
            answer = self._answers.get(told["id"])
            if answer is not None and not answer.done():
                answer.set_result(told)
        elif "no_events" in told:
            self.unwatched = told["no_events"]
            log.warning("nvml_events_not_told", why=self.unwatched)
        else:
            event = Event(str(told["uuid"]), told.get("xid"))
            log.warning("nvml_event", gpu=event.gpu_uuid, xid=event.xid)
            self.on_event(event)

    async def _end(self) -> None:
        """Kill the process; one that the kernel does not let go stays ours, and no other is started beside it."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS_MAX):
                await process.wait()
            self._process = None
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)

    async def close(self) -> None:
        """End the process, whatever is being asked of it."""
        await self._end()
