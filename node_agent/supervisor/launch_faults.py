"""Names the part of a launch that failed, from an error's number and from what was being done.

Loaded by the supervisor without the package around it: it imports next to nothing. The names are those of
`cotenant.core.model.lifecycle.LaunchCause`. An empty name stands for a failure of the job's own.
"""

from __future__ import annotations

import errno
import os

NOT_LAUNCHED = "NOT_LAUNCHED"  # the agent's name for the state
EXECUTING = "executing"  # a file in the attempt's directory: a program may have been executed
THE_JOBS_OWN = ""

LIMIT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})


def cause_of(error: BaseException, doing: str) -> str:
    """Return the cause for an error that came while this part of a launch was done.

    >>> cause_of(OSError(errno.EMFILE, ""), "directory"), cause_of(OSError(errno.EROFS, ""), "directory")
    ('limit', 'disk')
    >>> cause_of(OSError(errno.EROFS, ""), "cgroup"), cause_of(ValueError(), "user")
    ('cgroup', 'user')
    """
    number = number_of(error)
    if number in LIMIT_ERRORS:
        return "limit"
    if number in DISK_ERRORS or (doing == "directory" and number == errno.EROFS):
        return "disk"
    return "limit" if isinstance(error, MemoryError) else doing


def number_of(error: BaseException | None) -> int:
    """Return the error number of an error, or of the one that caused it; 0 where there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        error = error.__cause__
    return 0


def cause_of_execution(error: BaseException) -> str:
    """Return the cause for an error of execve: what the user named cannot be run, unless the node lacks something."""
    number = number_of(error)
    if number in LIMIT_ERRORS:
        return "limit"
    return "disk" if number in DISK_ERRORS else THE_JOBS_OWN


def mark_executing() -> None:
    """Note that a program may be executed from now on, for the agent that finds us dead. Raises `OSError`."""
    os.close(os.open(EXECUTING, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
