"""Determines which part of a launch failed, from an error's number and the current step.

The supervisor loads this file by its bare name without the package; it imports next to nothing. The names are those of
`cotenant.core.model.lifecycle.LaunchCause`. An empty name is a failure of the job itself.
"""

from __future__ import annotations

import errno
import os

NOT_LAUNCHED = "NOT_LAUNCHED"  # the name of the state
SUPERVISOR_LOG = "supervisor.log"  # a file in the attempt's directory: the supervisor was started
EXECUTING = "executing"  # a file in the attempt's directory: the program may have been executed
JOB_FAULT = ""

LIMIT_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})


def cause_of(error: BaseException, step: str) -> str:
    """Return the launch cause for an error in this step of a launch.

    >>> cause_of(OSError(errno.EMFILE, ""), "directory"), cause_of(OSError(errno.EROFS, ""), "directory")
    ('limit', 'disk')
    >>> cause_of(OSError(errno.EROFS, ""), "cgroup"), cause_of(ValueError(), "user")
    ('cgroup', 'user')
    """
    number = errno_of(error)
    if number in LIMIT_ERRORS:
        return "limit"
    if number in DISK_ERRORS or (step == "directory" and number == errno.EROFS):
        return "disk"
    return "limit" if isinstance(error, MemoryError) else step


def errno_of(error: BaseException | None) -> int:
    """Return the errno of an error or of its cause; 0 if there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        error = error.__cause__
    return 0


def cause_of_execution(error: BaseException) -> str:
    """Return the launch cause for an error of execve: the job's own, unless the node lacks a resource."""
    number = errno_of(error)
    if number in LIMIT_ERRORS:
        return "limit"
    return "disk" if number in DISK_ERRORS else JOB_FAULT


def mark_executing() -> None:
    """Mark that a program may be executed from now on, for an agent that finds this process dead. Raises `OSError`."""
    os.close(os.open(EXECUTING, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
