"""Shells in running jobs on a page: the session of `cotenant exec`, whose terminal is in a browser.

Output goes down as server-sent events, the answer to the POST that opened the shell; what is typed and the terminal's
size come up as POSTs that name the shell. A shell belongs to the login that opened it, and ends with that request: when
its page is closed, when the login ends, or when the program does.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import CommandError
from cotenant.cli.sessions.session_call import ERROR, INPUT, OUTPUT, carry
from cotenant.client.errors import InvalidArgument, NotFound
from cotenant.codec.errors import from_error
from cotenant.core.model.session import TERMINAL_SIZE_MAX, WINDOW_BYTES, SessionBroken
from cotenant.core.model.validation import REPLICAS_MAX
from cotenant.rpc.session_peer import SessionPeer
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.v1.session_pb2 import ExecSession, SessionEnd, SessionFrame, SessionStart, TerminalSize
from cotenant.web.rows import to_json
from cotenant.web.sessions import Session, new_token
from cotenant.web.streams import COMMENT, ENDED, event

SHELLS_MAX = 3  # of a login: a browser has six connections, and each shell and each open page holds one or two
TERMINAL_TYPE = "xterm-256color"
QUIET_SECONDS = 5.0  # without output; then a comment, by which both sides notice a lost connection
OUTPUT_CHUNKS_MAX = 4  # that wait for a slow page; then the session's window closes, and the program waits
TOO_MANY = f"{SHELLS_MAX} shells of this login are open, which is as many as may be; close one first"
NOT_READ = "the program does not read what is typed; the rest was dropped"


class Opening(NamedTuple):
    """What a page asks for: the replica, or None for the first one, and the size of its terminal."""

    rank: int | None
    size: TerminalSize


class Typed(NamedTuple):
    """What a page sends: bytes that were typed, b"" for none, and the terminal's new size, if it has changed."""

    data: bytes
    size: TerminalSize | None


def read_opening(body: bytes) -> Opening:
    """Return what a page asks for.

    Raises:
        InvalidArgument: names what is invalid.
    """
    given = _object(body)
    rank = given.get("rank")
    if rank is not None and not _is_number(rank, 0, REPLICAS_MAX - 1):
        raise InvalidArgument(f"rank: must be a number from 0 to {REPLICAS_MAX - 1}")
    size = _size(given)
    if size is None:
        raise InvalidArgument("rows, columns: missing")
    return Opening(int(str(rank)) if rank is not None else None, size)


def read_typed(body: bytes) -> Typed:
    """Return what was typed, and the terminal's new size.

    >>> read_typed(b'{"data": "ls\\\\r"}')
    Typed(data=b'ls\\r', size=None)

    Raises:
        InvalidArgument: names what is invalid.
    """
    given = _object(body)
    data = given.get("data", "")
    if not isinstance(data, str):
        raise InvalidArgument("data: must be text")
    return Typed(data.encode(errors="replace"), _size(given))


def _object(body: bytes) -> dict[str, object]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, an endless number, or nested too deeply
        given = None
    if not isinstance(given, dict):
        raise InvalidArgument("the body must be a JSON object")
    return given


def _size(given: dict[str, object]) -> TerminalSize | None:
    sizes = [given.get(name) for name in ("rows", "columns")]
    if sizes == [None, None]:
        return None
    rows, columns = (one if _is_number(one, 1, TERMINAL_SIZE_MAX) else None for one in sizes)
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise InvalidArgument(f"rows, columns: must be numbers from 1 to {TERMINAL_SIZE_MAX}")
    return TerminalSize(rows=rows, columns=columns)


def _is_number(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class _Keyboard:
    """What was typed and is not sent yet."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._some = asyncio.Event()

    def type(self, data: bytes) -> bool:
        """Add what was typed; False if too much waits already."""
        if self._bytes + len(data) > WINDOW_BYTES:
            return False
        self._waiting.append(data)
        self._bytes += len(data)
        self._some.set()
        return True

    async def ready(self) -> None:
        """Wait until something was typed."""
        await self._some.wait()

    def read(self, most: int) -> bytes | None:
        """Return what was typed first."""
        if not self._waiting:
            self._some.clear()
            return None
        data = self._waiting.popleft()
        if len(data) > most:
            self._waiting.appendleft(data[most:])
            data = data[:most]
        self._bytes -= len(data)
        if not self._waiting:
            self._some.clear()
        return data


class _Screen:
    """What a page is to show: events, of which few wait."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[str] = asyncio.Queue(OUTPUT_CHUNKS_MAX)

    async def write(self, data: bytes) -> bool:
        """Add output; waits while the page is slow."""
        await self.events.put(event("output", f'"{base64.b64encode(data).decode()}"'))
        return True

    def close(self) -> None:
        """End the output: how the session ended follows."""


class Shell:
    """An open shell."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._keyboard, self._screen = _Keyboard(), _Screen()
        self._size: TerminalSize | None = None  # the new one, until it is sent
        self._peer = SessionPeer({INPUT: self._keyboard}, {OUTPUT: self._screen, ERROR: self._screen})

    async def send(self, typed: Typed) -> bool:
        """Pass on what a page sends; False if the program does not read what is typed."""
        if typed.size is not None:
            await self._peer.send(SessionFrame(terminal=typed.size))
        return not typed.data or self._keyboard.type(typed.data)

    async def carry(self, mesh: Mesh, start: SessionStart) -> AsyncGenerator[str]:
        """Yield the events of a session: its output, and at last how it ended; a comment now and then."""
        carrying = asyncio.create_task(self._carry(mesh, start))
        waiting: asyncio.Task[str] | None = None
        try:
            while True:
                waiting = waiting or asyncio.create_task(self._screen.events.get())
                await asyncio.wait({waiting, carrying}, timeout=QUIET_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                    waiting = None
                elif not carrying.done():
                    yield COMMENT
                elif self._screen.events.empty():
                    break
            yield event("ended", to_json({"why": carrying.result()}))
        finally:
            await cancel_and_wait(carrying, *([waiting] if waiting else []))

    async def _carry(self, mesh: Mesh, start: SessionStart) -> str:
        try:
            return in_words(await carry(mesh, start, self._peer))
        except grpc.aio.AioRpcError as error:
            return from_error(error).message
        except (CommandError, SessionBroken) as error:
            return str(error)


def in_words(end: SessionEnd) -> str:
    """Return how a shell ended.

    >>> in_words(SessionEnd(code=3)), in_words(SessionEnd(signal=9)), in_words(SessionEnd(error="the job has ended"))
    ('the program ended with exit code 3', 'the program was ended by signal 9', 'the job has ended')
    """
    if end.error:
        return end.error
    return (
        f"the program was ended by signal {end.signal}"
        if end.signal
        else f"the program ended with exit code {end.code}"
    )


class Shells:
    """The open shells of all logins, by id."""

    def __init__(self) -> None:
        self._open: dict[str, Shell] = {}

    def find(self, shell_id: str, session: Session) -> Shell:
        """Return an open shell of a login.

        Raises:
            NotFound: it has ended, or is another login's.
        """
        shell = self._open.get(shell_id)
        if shell is None or shell.session is not session:
            raise NotFound("this shell has ended")
        return shell

    def check_room(self, session: Session) -> None:
        """Check that a login may open one more.

        Raises:
            InvalidArgument: it has as many as it may have.
        """
        if sum(one.session is session for one in self._open.values()) >= SHELLS_MAX:
            raise InvalidArgument(TOO_MANY)

    async def run(
        self, mesh: Mesh, session: Session, job_id: str, opening: Opening, is_alive: Callable[[], bool]
    ) -> AsyncGenerator[str]:
        """Yield the events of a new shell: its id, its output, how it ended; closing it ends the session."""
        start = SessionStart(id=job_id, rank=opening.rank)
        start.exec.CopyFrom(ExecSession(terminal=opening.size, terminal_type=TERMINAL_TYPE))
        shell_id, shell = new_token(), Shell(session)
        self._open[shell_id] = shell
        try:
            yield event("opened", to_json({"shell": shell_id}))
            async with contextlib.aclosing(shell.carry(mesh, start)) as events:
                async for text in events:
                    if not is_alive():
                        yield ENDED
                        return
                    yield text
        finally:
            del self._open[shell_id]
