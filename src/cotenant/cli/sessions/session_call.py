"""One session as a caller carries it: its frames over a call, its streams, how it ended."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc.aio

from cotenant.cli.connection import Mesh
from cotenant.cli.outcome import CommandError, Exit, OutputClosed
from cotenant.rpc.descriptors import DescriptorSink, DescriptorSource
from cotenant.rpc.session_peer import SessionPeer, Sink, Source, Stream
from cotenant.v1 import session_pb2
from cotenant.v1.job_service_pb2 import OpenSessionRequest
from cotenant.v1.session_pb2 import SessionEnd, SessionFrame, SessionStart

INPUT, OUTPUT, ERROR = (
    session_pb2.SESSION_STREAM_INPUT,
    session_pb2.SESSION_STREAM_OUTPUT,
    session_pb2.SESSION_STREAM_ERROR,
)
TRIES_MAX = 5
SIGNALLED = 128  # plus the signal: what a shell reports
NO_INPUT = -1


class _Output(DescriptorSink):
    """This command's own output."""

    async def write(self, data: bytes) -> bool:
        """Write all of it. Raises `OutputClosed`."""
        if not await super().write(data):
            raise OutputClosed
        return True


class _Terminal(DescriptorSource):
    """This command's terminal."""

    def read(self, most: int) -> bytes | None:
        """Return what was typed. Raises `Exit` when the terminal is closed, which is no end of the input."""
        data = super().read(most)
        if data == b"":
            raise Exit(SIGNALLED + signal.SIGHUP)
        return data


def own_streams(*, with_input: bool, hangs_up: bool = False) -> tuple[dict[Stream, Source], dict[Stream, Sink]]:
    """Return the sources and sinks of a session that takes this command's place.

    With `hangs_up`, the input is a terminal, and the session fails with it instead of passing on the end of the input.
    """
    read = _Terminal if hangs_up else DescriptorSource
    sources: dict[Stream, Source] = {INPUT: read(sys.stdin.fileno())} if with_input else {}
    sinks: dict[Stream, Sink] = {
        OUTPUT: _Output(sys.stdout.fileno(), closes=False),
        ERROR: _Output(sys.stderr.fileno(), closes=False),
    }
    return sources, sinks


async def carry(mesh: Mesh, start: SessionStart, peer: SessionPeer) -> SessionEnd:
    """Carry a session to its end; return how it ended.

    Raises:
        AioRpcError: it was refused or cut off.
        CommandError: it was cut off without a word.
    """

    async with aclosing(_frames(mesh, start, peer)) as incoming:
        await peer.run(incoming)
    if peer.end is None:
        raise CommandError("the session was cut off", hint="see `cotenant show` for the job's state")
    return peer.end


async def _frames(mesh: Mesh, start: SessionStart, peer: SessionPeer) -> AsyncGenerator[SessionFrame, None]:
    """Open the session, send the peer's frames, and yield the other side's.

    gRPC loses the reason of a refusal that arrives while something is being sent, and reports an internal error. So
    nothing is sent after `start` until the other side has answered; and if the refusal met `start` itself, which then
    cannot have arrived, the session is opened again.

    Raises:
        AioRpcError: it was refused or cut off.
    """

    async def requests(answered: asyncio.Event) -> AsyncIterator[OpenSessionRequest]:
        yield OpenSessionRequest(start=start)
        await answered.wait()
        async for frame in peer.frames():
            yield OpenSessionRequest(frame=frame)

    for _ in range(TRIES_MAX):
        answered = asyncio.Event()
        call = mesh.jobs.OpenSession(requests(answered))
        try:
            async for response in call:
                answered.set()
                yield response.frame
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL:
                raise
            if answered.is_set():
                return
        finally:
            call.cancel()


def exit_code_of(end: SessionEnd) -> int:
    """Return the exit code of a command.

    Raises:
        CommandError: it did not start, or was cut off.
    """
    if end.error:
        raise CommandError(end.error)
    return SIGNALLED + end.signal if end.signal else end.code
