"""A wire between a client and a server that can lose the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class LossyWire:
    """Passes bytes both ways; between `lose_answers` and `cut`, only to the server."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self._server_port = server_port
        self._passes_answers = True
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def endpoint(self) -> str:
        """Say where the client's end is."""
        return f"127.0.0.1:{self.port}"

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[LossyWire]:
        """Be there for the length of a block."""
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            listener.close()
            self.cut()

    def lose_answers(self) -> None:
        """Let nothing through to the client from now on."""
        self._passes_answers = False

    def cut(self) -> None:
        """End the connections there are; new ones lose nothing."""
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
    """Read what is there; nothing where the connection has ended, however it did."""
    try:
        return await reader.read(65_536)
    except ConnectionError:
        return b""
