"""Reads and writes of file descriptors without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket

ENDED = frozenset({errno.EIO, errno.ECONNRESET, errno.EPIPE, errno.EBADF})  # EIO: of a terminal that nobody has open
READY_BYTES_MAX = select.PIPE_BUF  # what a blocking descriptor that is ready takes without blocking
WRITE_BYTES_MAX = 1 << 16
END_OF_INPUT = b"\x04"  # what a terminal takes for the end of its input


async def ready(descriptor: int, *, writing: bool = False) -> None:
    """Wait until a descriptor can be read or written; files always can."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not found.done():
            found.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    try:
        add(descriptor, wake)
    except PermissionError:  # a file, which the kernel does not wait for
        await asyncio.sleep(0)
        return
    try:
        await found
    finally:
        remove(descriptor)


class DescriptorSource:
    """Reads a descriptor: of a pipe, a terminal, a socket or a file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    async def ready(self) -> None:
        """Wait until there is something to read, or its end."""
        await ready(self.descriptor)

    def read(self, most: int) -> bytes | None:
        """Return at most this many bytes; b"" at the end, None if there is nothing yet."""
        try:
            return os.read(self.descriptor, most)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in ENDED:
                return b""
            raise


class DescriptorSink:
    """Writes to a descriptor of a pipe, a terminal or a file."""

    def __init__(self, descriptor: int, *, closes: bool) -> None:
        """With `closes`, the descriptor belongs to the sink."""
        self.descriptor, self._closes = descriptor, closes
        self._bytes_max = READY_BYTES_MAX if os.get_blocking(descriptor) else WRITE_BYTES_MAX

    async def write(self, data: bytes) -> bool:
        """Write all of it; return False if nobody reads it any longer."""
        view = memoryview(data)
        while view:
            await ready(self.descriptor, writing=True)
            try:
                view = view[os.write(self.descriptor, view[: self._bytes_max]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in ENDED:
                    return False
                raise
        return True

    def close(self) -> None:
        """End the stream for its reader."""
        self.release()

    def release(self) -> None:
        """Close the descriptor if it is the sink's own."""
        if self._closes:
            self._closes = False
            os.close(self.descriptor)


class TerminalSink(DescriptorSink):
    """Writes to the other side of a terminal, which takes a character for the end of its input."""

    def close(self) -> None:
        """End the stream for its reader."""
        with contextlib.suppress(OSError):
            os.write(self.descriptor, END_OF_INPUT)


class SocketSink(DescriptorSink):
    """Writes to a connected socket, which belongs to another object."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected.fileno(), closes=False)
        self._socket = connected

    def close(self) -> None:
        """End this direction of the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
