"""A proxy between clients and a server that can delay data, in its own thread."""

from __future__ import annotations

import asyncio
import threading


class SlowWire:
    """Forwards bytes both ways; each piece is delayed by `delay_seconds`, which may be set at any time."""

    def __init__(self, server_port: int) -> None:
        self.delay_seconds = 0.0
        self.port = 0
        self._server_port = server_port
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Close all connections."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        listener.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        await asyncio.gather(self._pass(reader, server_writer), self._pass(server_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        due = 0.0
        while data := await self._read(reader):
            due = max(due, self._loop.time() + self.delay_seconds)  # no piece overtakes another
            self._loop.call_at(due, writer.write, data)
        self._loop.call_at(max(due, self._loop.time()), writer.close)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(1 << 16)
        except ConnectionError:
            return b""
