"""What a session is connected to on the node: a command, or a port."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Protocol

from cotenant.node_agent.runtime.runtime_port import CommandSession, SessionFailed
from cotenant.rpc.descriptors import DescriptorSink, DescriptorSource, SocketSink, TerminalSink
from cotenant.rpc.session_peer import SessionPeer, Sink, Source, Stream
from cotenant.v1 import session_pb2
from cotenant.v1.session_pb2 import SessionEnd

INPUT, OUTPUT, ERROR = (
    session_pb2.SESSION_STREAM_INPUT,
    session_pb2.SESSION_STREAM_OUTPUT,
    session_pb2.SESSION_STREAM_ERROR,
)
LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
CONNECT_SECONDS_MAX = 5.0


class Endpoint(Protocol):
    """What a session is connected to."""

    sources: Mapping[Stream, Source]
    sinks: Mapping[Stream, Sink]

    async def ended(self, peer: SessionPeer) -> SessionEnd:
        """Wait until it has ended by itself and all that it said was sent."""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal, if it has one."""

    async def close(self) -> None:
        """End it, and leave nothing."""


class CommandEndpoint:
    """A command in a job."""

    def __init__(self, command: CommandSession) -> None:
        self._command = command
        outputs = {OUTPUT: command.output} | ({ERROR: command.error} if command.error >= 0 else {})
        self._outputs = list(outputs.values())
        sink = TerminalSink if command.error < 0 else DescriptorSink
        self._input = sink(command.input, closes=True)
        self.sources: Mapping[Stream, Source] = {stream: DescriptorSource(one) for stream, one in outputs.items()}
        self.sinks: Mapping[Stream, Sink] = {INPUT: self._input}

    async def started(self) -> None:
        """Wait until the command runs. Raises `SessionFailed`."""
        await self._command.started()

    async def ended(self, peer: SessionPeer) -> SessionEnd:
        """Wait until the command has ended, and all of its output was sent."""
        code, number = await self._command.ended()
        await peer.sources_ended.wait()
        return SessionEnd(code=code, signal=number)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        self._command.resize(rows, columns)

    async def close(self) -> None:
        """Kill what is left; a terminal hangs up."""
        self._input.release()
        for descriptor in self._outputs:
            os.close(descriptor)
        await self._command.close()


class SocketEndpoint:
    """A connection to a port of this node."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.sources: Mapping[Stream, Source] = {OUTPUT: DescriptorSource(connected.fileno())}
        self.sinks: Mapping[Stream, Sink] = {INPUT: SocketSink(connected)}

    @classmethod
    async def connect(cls, port: int, job_id: str) -> SocketEndpoint:
        """Connect to a port on loopback: jobs share the network of their node. Raises `SessionFailed`."""
        for family, address in LOOPBACK:
            connected = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                async with asyncio.timeout(CONNECT_SECONDS_MAX):
                    await asyncio.get_running_loop().sock_connect(connected, (address, port))
                return cls(connected)
            except (OSError, TimeoutError):
                connected.close()
            except BaseException:
                connected.close()
                raise
        raise SessionFailed(f"nothing listens on port {port} in job {job_id}")

    async def ended(self, peer: SessionPeer) -> SessionEnd:
        """Wait until both directions have ended."""
        await peer.sources_ended.wait()
        await peer.sinks_ended.wait()
        return SessionEnd()

    def resize(self, rows: int, columns: int) -> None:
        """Do nothing: a connection has no terminal."""

    async def close(self) -> None:
        """Close the connection."""
        self._socket.close()
