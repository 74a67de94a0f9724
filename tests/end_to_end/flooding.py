"""A client without a token that opens connections and leaves them open."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with an empty SETTINGS frame
CONNECT_SECONDS_MAX = 1.0


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Raise this process's descriptor limit to its maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Flood:
    """Connections that complete the HTTP/2 handshake but make no call. With `again`, lost connections are reopened."""

    def __init__(self, address: str, count: int, *, again: bool = False) -> None:
        host, _, port = address.rpartition(":")
        self._target, self._count, self._again = (host, int(port)), count, again
        self._open: set[socket.socket] = set()
        self._stop = threading.Event()
        self._all_tried = threading.Event()
        self.opened = self.lost = 0
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for connection in self._open:
            connection.close()

    def wait_until_tried(self) -> None:
        """Wait until each connection was opened or refused once."""
        assert self._all_tried.wait(60.0)

    @property
    def left(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def _run(self) -> None:
        while not self._stop.is_set():
            while len(self._open) < self._count and not self._stop.is_set():
                if self.opened >= self._count:
                    self._all_tried.set()
                    if not self._again:
                        break
                self._connect()
                if self.opened % 50 == 0:
                    self._drop_closed()
            self._drop_closed(0.1)

    def _connect(self) -> None:
        self.opened += 1
        try:
            connection = socket.create_connection(self._target, timeout=CONNECT_SECONDS_MAX)
            connection.sendall(PREFACE)
            connection.setblocking(False)
        except OSError:
            self.lost += 1
            return
        self._open.add(connection)

    def _drop_closed(self, seconds: float = 0.0) -> None:
        poll = select.poll()
        known = {connection.fileno(): connection for connection in self._open}
        for descriptor in known:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(seconds * 1000):
            connection = known[descriptor]
            try:
                gone = connection.recv(65536) == b""
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                self._open.discard(connection)
                connection.close()
                self.lost += 1
