"""A bounded queue of a session's frames that either end may close."""

from __future__ import annotations

import asyncio
from collections import deque

from cotenant.v1.session_pb2 import SessionFrame

FRAMES_WAITING_MAX = 8  # the windows of a session bound them as well


class FramePipe:
    """Frames in one direction. A closed pipe still yields what was put before."""

    def __init__(self, most: int = FRAMES_WAITING_MAX) -> None:
        self._most, self._closed = most, False
        self._frames: deque[SessionFrame] = deque()
        self._changed = asyncio.Event()

    async def put(self, frame: SessionFrame) -> bool:
        """Add a frame as soon as there is space; return False if the pipe is closed."""
        while len(self._frames) >= self._most and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._closed:
            self._frames.append(frame)
            self._changed.set()
        return not self._closed

    async def get(self) -> SessionFrame | None:
        """Return the next frame; None after the last one of a closed pipe."""
        while not self._frames and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._frames:
            return None
        self._changed.set()
        return self._frames.popleft()

    def close(self) -> None:
        """Take no more frames, and wake up both ends."""
        self._closed = True
        self._changed.set()
