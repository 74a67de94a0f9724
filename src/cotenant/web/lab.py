"""The policy lab: simulations of today's jobs under other policies, each in a process of its own.

A principal has one at a time, and there are few in all. A simulation lasts for as long as the request that started it:
when its page is closed, or the session ends, the process is killed. The snapshot is taken there too, so that neither
reading thousands of jobs nor simulating them holds the loop of the dashboard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from typing import NamedTuple, cast

from starlette.responses import StreamingResponse
from starlette.types import Send

from cotenant.client.errors import InvalidArgument
from cotenant.core.model.field_limits import shown
from cotenant.rpc.access import Access, AccessError
from cotenant.web.lab_board import JOBS_MAX, OTHERS_MAX, TRIED
from cotenant.web.rows import to_json

RUNS_MAX = 2  # in all; a principal has one
SECONDS_MAX = 900.0
CPU_SECONDS_MAX = 600  # of the process
LINE_BYTES_MAX = 4 * 1024 * 1024  # of what the process writes
QUIET_SECONDS = 1.0  # without progress; then a comment, which notices that the page is gone
KINDS = ("profile", *TRIED.values())
NAME_LENGTH_MAX = 100
COMMAND = (sys.executable, "-P", "-m", "cotenant.web.lab_process")
INSTEAD = (
    "use `cotenant snapshot -o now.json` and `cotenant compare --from-snapshot now.json --arms A,B`, which has no limit"
)
FEWER = f"try fewer policies, or {INSTEAD}"


class Event(NamedTuple):
    """An event of a simulation: its name, and its data as JSON on one line."""

    name: str
    data: str


QUIET = Event("", "")  # nothing to tell
ENDS = ("result", "failed")


class Choice(NamedTuple):
    """A policy to try beside those in use: a profile, or one policy of a group."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """The words for it."""
        return f"{self.kind} {self.name}"


class Request(NamedTuple):
    """What the process of a simulation is asked."""

    access: Access
    choices: Sequence[Choice]
    jobs_max: int = JOBS_MAX
    cpu_seconds_max: int = CPU_SECONDS_MAX


def read_choices(body: bytes) -> list[Choice]:
    """Return the policies to try.

    >>> read_choices(b'{"policies": [["queue", "las"], ["profile", "full"]]}')
    [Choice(kind='queue', name='las'), Choice(kind='profile', name='full')]

    Raises:
        InvalidArgument: names every invalid policy.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, an endless number, or nested too deeply
        given = None
    wanted = given.get("policies") if isinstance(given, dict) else None
    if not isinstance(wanted, list) or not 1 <= len(wanted) <= OTHERS_MAX:
        raise InvalidArgument(f"policies: must be a list of 1 to {OTHERS_MAX} policies")
    if wrong := [f"policies[{number}]" for number, one in enumerate(wanted) if not _is_choice(one)]:
        raise InvalidArgument(f"{', '.join(wrong)}: must be one of {', '.join(KINDS)}, and a name")
    choices = [Choice(*one) for one in wanted]
    if twice := next((one for one in choices if choices.count(one) > 1), None):
        raise InvalidArgument(f"policies: {shown(twice.label)} occurs twice")
    return choices


def _is_choice(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or value[0] not in KINDS:
        return False
    name = value[1]
    return isinstance(name, str) and name.isprintable() and 0 < len(name) <= NAME_LENGTH_MAX


class Lab:
    """The simulations that run."""

    def __init__(self, command: Sequence[str] = COMMAND, seconds_max: float = SECONDS_MAX) -> None:
        self._command, self._seconds_max = command, seconds_max
        self._running: set[Hashable] = set()  # principals
        self._ending: dict[Hashable, asyncio.Task[None]] = {}  # of those, the ones whose process is killed

    async def run(
        self, principal: Hashable, find: Callable[[], Access], choices: Sequence[Choice]
    ) -> AsyncGenerator[Event]:
        """Yield the events of a simulation, the last of which is `result` or `failed`; closing it ends the process."""
        await self.ended(principal)
        if refusal := self._refusal(principal):
            yield failed(refusal)
            return
        self._running.add(principal)
        process: Process | None = None
        try:
            request = pickle.dumps(Request(find(), choices))
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES_MAX, start_new_session=True
            )
            assert process.stdin
            process.stdin.write(request)  # the token is in no argument; the pipe stays open for as long as it is wanted
            async with contextlib.aclosing(self._events(process)) as events:
                async for one in events:
                    yield one
        except AccessError as error:
            yield failed(f"the mesh is not found: {error}")
        finally:
            self._end(principal, process)

    async def ended(self, principal: Hashable) -> None:
        """Wait until a process of the principal that is no longer wanted has ended."""
        if ending := self._ending.get(principal):
            await asyncio.shield(ending)

    def _refusal(self, principal: Hashable) -> str:
        if principal in self._running:
            return "a simulation of yours runs already, on another page; it ends when that page is closed"
        if len(self._running) >= RUNS_MAX:
            return f"{RUNS_MAX} simulations of others run now, which is as many as run at once; try again in a minute"
        return ""

    async def _events(self, process: Process) -> AsyncGenerator[Event]:
        """Yield what the process writes, and why it ended without a result."""
        assert process.stdout
        clock = asyncio.get_running_loop().time
        until = clock() + self._seconds_max
        while clock() < until:
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    line = await process.stdout.readline()
            except TimeoutError:
                yield QUIET
                continue
            if not line:
                yield failed(_in_words(await process.wait()))
                return
            name, _, data = line.decode().rstrip("\n").partition(" ")
            yield Event(name, data)
            if name in ENDS:
                return
        yield failed(f"it took longer than {self._seconds_max / 60:.0f} minutes; {FEWER}")

    def _end(self, principal: Hashable, process: Process | None) -> None:
        """Kill a process that is no longer wanted, and let the principal start another when it has ended."""
        if process is None or process.returncode is not None:
            self._running.discard(principal)
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._ending[principal] = asyncio.create_task(self._reap(principal, process))

    async def _reap(self, principal: Hashable, process: Process) -> None:
        await process.wait()
        self._running.discard(principal)
        del self._ending[principal]


class EventStream(StreamingResponse):
    """A stream of events whose source is closed at once when its reader goes away."""

    async def stream_response(self, send: Send) -> None:
        """Send the events."""
        async with contextlib.aclosing(cast("AsyncGenerator[str]", self.body_iterator)):
            await super().stream_response(send)


def failed(words: str) -> Event:
    """Return the event of a simulation without a result."""
    return Event("failed", to_json({"why": f"The simulation has no result: {words.rstrip('.')}."}))


def _in_words(code: int) -> str:
    """Return why a process ended before it had a result, by its exit code."""
    if code == -signal.SIGXCPU:
        return f"it used all of its {CPU_SECONDS_MAX} seconds of processor time; {FEWER}"
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}, perhaps for want of memory; run it again"
    return f"its process ended with code {code}; the log of the dashboard says why"
