"""The file with a supervisor's state, so that no exit status is ever lost.

The supervisor loads this file by its bare name without the package; it imports next to nothing.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from cotenant.node_agent.supervisor.plain_json import dumps
else:
    from plain_json import dumps

PAGE_BYTES = 4096


class StateFile:
    """A JSON object that is replaced atomically and is on disk when `write` returns.

    The next version is written over a spare file whose blocks were allocated beforehand, so that the end of a job can
    be recorded on a disk that the job has filled.
    """

    def __init__(self, path: str, capacity_bytes: int) -> None:
        self._path = path
        self._spare = path + ".spare"
        self._capacity_bytes = -(-capacity_bytes // PAGE_BYTES) * PAGE_BYTES

    def write(self, state: dict[str, object], *, last: bool = False) -> None:
        """Replace the content; with `last`, allocate no blocks for another version.

        Raises:
            OSError: the disk refuses; the old content stays.
        """
        content = dumps(state).encode().ljust(self._capacity_bytes)
        descriptor = os.open(self._spare, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, content)
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(self._spare, self._path)
        sync_directory(os.path.dirname(self._path))
        if not last:
            self._reserve()

    def _reserve(self) -> None:
        try:
            descriptor = os.open(self._spare, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(b" " * self._capacity_bytes)
        except OSError:
            return  # the next write must allocate its blocks, or fail


def sync_directory(path: str) -> None:
    """Flush renames in a directory to disk."""
    descriptor = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
