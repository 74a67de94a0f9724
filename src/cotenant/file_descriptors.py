"""The file descriptors of this process: its limit, how many are open, and the limit that its jobs get.

A server raises its soft limit to the hard one. A job must not inherit that: some programs loop over every possible
descriptor, and `select` breaks above 1,024. So the original soft limit is remembered here, and supervisors restore it.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

OPEN = "/proc/self/fd"
RESERVE_MIN, RESERVE_MAX = 32, 1024
RESERVE_SHARE = 0.1  # of the limit
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})

_original: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The numbers of open and allowed descriptors.

    >>> Usage(850, 1000).scarce, Usage(500, 1000).scarce, Usage(750, 1000).ample
    (True, False, False)
    """

    used: int
    limit: int

    @property
    def free(self) -> int:
        """The number that can still be opened."""
        return max(0, self.limit - self.used)

    @property
    def reserve(self) -> int:
        """The number reserved for the process's own files: connections never use these."""
        return int(min(max(RESERVE_MIN, RESERVE_SHARE * self.limit), RESERVE_MAX))

    @property
    def scarce(self) -> bool:
        """Whether the reserve is nearly reached."""
        return self.free < 2 * self.reserve

    @property
    def ample(self) -> bool:
        """Whether enough are free that a shortage is over."""
        return self.free >= 3 * self.reserve

    def __str__(self) -> str:
        """Return the usage in words."""
        return f"{self.used} of {self.limit} file descriptors are open"


def raise_limit(original: int | None = None) -> int:
    """Raise the soft limit to the hard one and return it; `original` is the soft limit that jobs get, if not ours.

    The kernel may refuse, for example in a sandbox; then the limit stays.
    """
    global _original
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if original is not None:
        _original = original
    elif _original is None:
        _original = soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


def original_limit() -> int:
    """Return the soft limit with which this process, or its parent, started: jobs get this limit."""
    return _original if _original is not None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def usage() -> Usage:
    """Return the usage. Opens no descriptor on Linux 6.2 or newer, so that it works when none is left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return Usage(os.stat(OPEN).st_size or len(os.listdir(OPEN)) - 1, limit)
    except OSError as error:
        return Usage(limit if error.errno in EXHAUSTED else 0, limit)


class Spare:
    """Reserve descriptors, released when there are no others: the process can then report the error, and stop.

    >>> spare = Spare(2)
    >>> spare.held, spare.release(), spare.held, spare.refill(), spare.held
    (2, True, 0, True, 2)
    >>> spare.close()
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._descriptors: list[int] = []
        self.refill()

    @property
    def held(self) -> int:
        """The number that is held now."""
        return len(self._descriptors)

    def release(self) -> bool:
        """Release all; return whether any was held."""
        held, self._descriptors = self._descriptors, []
        for descriptor in held:
            os.close(descriptor)
        return bool(held)

    def refill(self) -> bool:
        """Hold all of them again; if there are not enough, return False and change nothing."""
        taken: list[int] = []
        try:
            while self.held + len(taken) < self._count:
                taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            for descriptor in taken:
                os.close(descriptor)
            return False
        self._descriptors += taken
        return True

    def close(self) -> None:
        """Release all."""
        self.release()
