"""Flow control of sessions: how many bytes each side of a session may still send, and what breaks its rules."""

from __future__ import annotations

CHUNK_BYTES_MAX = 32 * 1024  # of data in one message
WINDOW_BYTES = 256 * 1024  # that a side takes before the other has to wait
WINDOW_BYTES_MAX = 4 * WINDOW_BYTES  # that a side may have been granted
TERMINAL_SIZE_MAX = 10_000  # lines, and characters in a line


class SessionBroken(Exception):
    """The other side of a session does not keep to the rules."""


class SendWindow:
    """How many bytes the other side still takes.

    >>> window = SendWindow()
    >>> window.grant(10)
    >>> window.take(7), window.take(7), window.take(7)
    (7, 3, 0)
    """

    def __init__(self) -> None:
        self.left = 0

    def grant(self, count: int) -> None:
        """Add what the other side takes in addition.

        Raises:
            SessionBroken: it takes back, or grants more than it could hold.
        """
        if count < 0 or self.left + count > WINDOW_BYTES_MAX:
            raise SessionBroken(f"a grant of {count} bytes on top of {self.left}")
        self.left += count

    def take(self, wanted: int) -> int:
        """Use some of it; return how many of the wanted bytes may be sent."""
        count = min(wanted, self.left)
        self.left -= count
        return count


class ReceiveWindow:
    """How many bytes this side still takes; it grants more when half of them were passed on.

    >>> window = ReceiveWindow(size=100)
    >>> window.receive(80)
    >>> window.passed_on(40), window.passed_on(10), window.passed_on(30)
    (0, 50, 0)
    """

    def __init__(self, size: int = WINDOW_BYTES) -> None:
        self._size = self._left = size
        self._passed = 0

    def receive(self, count: int) -> None:
        """Count what arrived.

        Raises:
            SessionBroken: it is more than was granted.
        """
        if count > min(self._left, CHUNK_BYTES_MAX) and count > 0:
            raise SessionBroken(f"{count} bytes where {min(self._left, CHUNK_BYTES_MAX)} are allowed")
        self._left -= count

    def passed_on(self, count: int) -> int:
        """Count what was passed on; return how many bytes to grant now."""
        self._passed += count
        if self._passed < self._size // 2:
            return 0
        granted, self._passed = self._passed, 0
        self._left += granted
        return granted


class InputStreams:
    """Which streams of the other side have not ended yet.

    >>> streams = InputStreams([2, 3])
    >>> streams.check(2, ends=True)
    >>> streams.check(2, ends=False)
    Traceback (most recent call last):
    cotenant.core.model.session.SessionBroken: data of the stream 2, which is not open
    """

    def __init__(self, streams: list[int]) -> None:
        self._open = set(streams)

    def check(self, stream: int, *, ends: bool) -> None:
        """Check that data of a stream may arrive.

        Raises:
            SessionBroken: there is no such stream, or it has ended.
        """
        if stream not in self._open:
            raise SessionBroken(f"data of the stream {stream}, which is not open")
        if ends:
            self._open.discard(stream)
