"""Which of a process's own resources is exhausted: descriptors, memory or processes. That is nobody else's fault."""

from __future__ import annotations

import errno

RESOURCE_OF_ERROR = {
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ENOMEM: "memory",
    errno.EAGAIN: "processes",
}
MESSAGES = {
    "descriptors": "no file descriptor is left",
    "memory": "no memory is left",
    "processes": "no process or thread can be started",
}
REMEDIES = {
    "descriptors": "raise the limit (ulimit -n, or LimitNOFILE= of a unit; fs.file-max for the machine)",
    "memory": "free memory, or raise the limit of the control group that it runs in",
    "processes": "end other processes, or raise the limit (pids.max, TasksMax= of a unit, ulimit -u or kernel.pid_max)",
}


def exhausted_resource(error: BaseException) -> str:
    """Return the resource whose exhaustion caused an error: descriptors, memory or processes; "" if none.

    >>> exhausted_resource(OSError(errno.EMFILE, "")), exhausted_resource(OSError(errno.ENOSPC, ""))
    ('descriptors', '')
    >>> exhausted_resource(RuntimeError("can't start new thread"))
    'processes'
    """
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "processes"
    return RESOURCE_OF_ERROR.get(error.errno or 0, "") if isinstance(error, OSError) else ""
