"""A proxy between a client and a server that can drop the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LossyWire:
    """Forwards bytes in both directions; between `lose_answers` and `cut`, only to the server."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self._server_port = server_port
        self._passes_answers = True
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def endpoint(self) -> str:
        """Return the address for the client."""
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[LossyWire]:
        """Run for the duration of a block."""
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            listener.close()
            self.cut()

    def lose_answers(self) -> None:
        """Drop everything sent to the client from now on."""
        self._passes_answers = False

    def cut(self) -> None:
        """Close the existing connections; new ones lose nothing."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._passes_answers = True

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers += [writer, server_writer]
        await asyncio.gather(self._pass(reader, server_writer), self._pass_answers(server_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await read_some(reader):
            writer.write(data)
        writer.close()

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await read_some(reader):
            if self._passes_answers:
                writer.write(data)
        writer.close()


async def read_some(reader: asyncio.StreamReader) -> bytes:
    """Return the available bytes; none if the connection has ended for any reason."""
    try:
        return await reader.read(65_536)
    except ConnectionError:
        return b""
