"""The agent's connection to the NVML process; the agent itself never loads NVML.

A call that times out gets that process killed. A new one is started after a delay, but never while the old one still
exists: a process that the driver blocks in the kernel cannot be killed, and a second one would hang too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import structlog

from cotenant.node_agent.backoff import Backoff
from cotenant.node_agent.probes.outer_job import select_gpus
from cotenant.rpc import events as rpc_events

log = structlog.get_logger()

PROCESS = Path(__file__).with_name("nvml_process.py")
START_SECONDS_MAX = 60.0  # without persistence mode the driver initializes the GPUs one by one
ASK_SECONDS_MAX = 5.0
ANSWER_BYTES_MAX = 4 << 20
END_SECONDS_MAX = 1.0
RETRY_SECONDS_FIRST, RETRY_SECONDS_MAX = 1.0, 60.0


class NvmlUnresponsive(Exception):
    """NVML does not answer; the text says why."""


class NvmlNotFound(Exception):
    """No NVIDIA driver is installed."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event that NVML reported: an XID, or with None a double-bit ECC error."""

    gpu_uuid: str
    xid: int | None


@dataclass(slots=True)
class NvmlLink:
    """One process at a time, started on the first request."""

    sysfs: Path
    events: rpc_events.Event[[Event]] = field(default_factory=rpc_events.Event)
    ask_seconds_max: float = ASK_SECONDS_MAX
    start_seconds_max: float = START_SECONDS_MAX
    retry_seconds_first: float = RETRY_SECONDS_FIRST
    troubles: list[str] = field(default_factory=list)  # problems with single GPUs at the last listing
    minors: dict[str, int] = field(default_factory=dict)  # the N of /dev/nvidiaN by UUID, if reported
    unwatched: list[str] = field(default_factory=list)  # GPUs without events, and why
    given: tuple[str, ...] | None = None  # GPUs to use, by index or UUID; None: all
    _given: set[str] = field(default_factory=set)  # the UUIDs of those, as of the last listing
    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None
    _answers: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _backoff: Backoff | None = None
    _not_before: float = 0.0
    _why: str = ""

    async def gpus(self) -> list[dict[str, Any]]:
        """Return all GPUs that NVML lists. Raises `NvmlNotFound` or `NvmlUnresponsive`."""
        async with self._turn:
            return await self._start() if self._process is None else await self._list_gpus()

    async def readings(self) -> list[dict[str, Any]]:
        """Return the GPUs' readings. Raises `NvmlUnresponsive`."""
        async with self._turn:
            if self._process is None:
                await self._start()
            answer = await self._request("readings", self.ask_seconds_max)
            readings: list[dict[str, Any]] = answer["readings"]
            return [raw for raw in readings if self._uses(str(raw["uuid"]))]

    async def _start(self) -> list[dict[str, Any]]:
        """Start a process and list all GPUs, which it must do before it can read them."""
        now = asyncio.get_running_loop().time()
        if now < self._not_before:
            raise NvmlUnresponsive(self._why)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", str(PROCESS), str(self.sysfs),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("COTENANT_")},
            limit=ANSWER_BYTES_MAX,
        )  # fmt: skip
        self._reader = asyncio.create_task(self._read(self._process))
        gpus = await self._list_gpus(self.start_seconds_max)
        self._backoff = None
        return gpus

    async def _list_gpus(self, seconds_max: float | None = None) -> list[dict[str, Any]]:
        answer = await self._request("gpus", seconds_max or self.ask_seconds_max)
        self.troubles = answer["troubles"]
        listed: list[dict[str, Any]] = answer["gpus"]
        gpus = select_gpus(listed, [str(gpu["uuid"]) for gpu in listed], self.given)
        self._given = {str(gpu["uuid"]) for gpu in gpus}
        self.minors = {gpu["uuid"]: gpu["minor"] for gpu in gpus if gpu["minor"] >= 0}
        return gpus

    async def _request(self, what: str, seconds_max: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        number = next(self._numbers)
        if process.returncode is not None:
            await self._fail("its process has ended")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds_max):
                process.stdin.write(json.dumps({"id": number, "ask": what}).encode() + b"\n")
                await process.stdin.drain()
                reply = await answer
        except TimeoutError:
            await self._fail(f"no answer within {seconds_max:g} s")
        except (OSError, NvmlUnresponsive) as error:
            await self._fail(str(error) or type(error).__name__)
        except asyncio.CancelledError:
            await self._end()
            raise
        finally:
            self._answers.pop(number, None)
        if reply.get("absent"):
            await self._end()
            raise NvmlNotFound
        if "failed" in reply:
            await self._fail(str(reply["failed"]))
        return dict(reply)

    async def _fail(self, why: str) -> None:
        """Stop the process and raise `NvmlUnresponsive`."""
        if self._backoff is None:
            self._backoff = Backoff(
                first_seconds=self.retry_seconds_first, longest_seconds=RETRY_SECONDS_MAX, rng=Random(0)
            )
        self._why = why
        self._not_before = asyncio.get_running_loop().time() + self._backoff.next_seconds()
        log.error("nvml_unresponsive", why=why)
        await self._end()
        raise NvmlUnresponsive(why)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        why = "its process has ended"
        try:
            while line := await process.stdout.readline():
                self._on_message(json.loads(line))
        except (OSError, ValueError) as error:
            why = f"invalid message from its process: {error}"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(NvmlUnresponsive(why))

    def _on_message(self, message: dict[str, Any]) -> None:
        if "id" in message:
            answer = self._answers.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif "no_events" in message:
            self.unwatched = message["no_events"]
            log.warning("nvml_events_unavailable", why=self.unwatched)
        elif self._uses(str(message["uuid"])):
            event = Event(str(message["uuid"]), message.get("xid"))
            log.warning("nvml_event", gpu=event.gpu_uuid, xid=event.xid)
            self.events(event)

    def _uses(self, uuid: str) -> bool:
        """Return whether the agent uses a GPU: an outer job may have been given only some."""
        return self.given is None or uuid in self._given

    async def _end(self) -> None:
        """Kill the process; if the kernel blocks it, keep it and start no other one."""
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
        """Stop the process even during a request."""
        await self._end()
