"""Cotenant: a scheduler for deep-learning training, inference and CPU jobs on a shared GPU cluster.

The names of the Python API are imported at their first use, so that `import cotenant` costs almost nothing; jobs import
`cotenant.progress` in each of their processes.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; importing `typing` would take longer than the rest

if TYPE_CHECKING:
    from cotenant.client.aio import AsyncClient, AsyncJob, AsyncJobArray, AsyncSchedule, Explanation, JobList
    from cotenant.client.blocking import Client, Job, JobArray, Schedule
    from cotenant.client.errors import (
        AlreadyExists,
        BadField,
        Conflict,
        CotenantError,
        FailedPrecondition,
        InternalError,
        InvalidArgument,
        JobCancelled,
        JobFailed,
        LimitExceeded,
        NotConfigured,
        NotFound,
        PermissionDenied,
        Unauthenticated,
        Unavailable,
        WaitTimeout,
    )
    from cotenant.client.executor import Executor
    from cotenant.client.function_pickling import CannotPickle
    from cotenant.client.mapping import RemoteError, ResultTooLarge
    from cotenant.client.plots import Plot
    from cotenant.client.remote_functions import RemoteFunction, job, map
    from cotenant.client.research import Comparison, Simulation, Trace, compare, load_trace, simulate
    from cotenant.client.schedules import ScheduleStatus
    from cotenant.client.secrets import Secret
    from cotenant.client.status import JobStatus

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncJob",
    "AsyncJobArray",
    "AsyncSchedule",
    "BadField",
    "CannotPickle",
    "Client",
    "Comparison",
    "Conflict",
    "CotenantError",
    "Executor",
    "Explanation",
    "FailedPrecondition",
    "InternalError",
    "InvalidArgument",
    "Job",
    "JobArray",
    "JobCancelled",
    "JobFailed",
    "JobList",
    "JobStatus",
    "LimitExceeded",
    "NotConfigured",
    "NotFound",
    "PermissionDenied",
    "Plot",
    "RemoteError",
    "RemoteFunction",
    "ResultTooLarge",
    "Schedule",
    "ScheduleStatus",
    "Secret",
    "Simulation",
    "Trace",
    "Unauthenticated",
    "Unavailable",
    "WaitTimeout",
    "compare",
    "job",
    "load_trace",
    "map",
    "simulate",
]

_HOMES = {  # by module: the names that it has
    "aio": ("AsyncClient", "AsyncJob", "AsyncJobArray", "AsyncSchedule", "Explanation", "JobList"),
    "blocking": ("Client", "Job", "JobArray", "Schedule"),
    "errors": (
        *("AlreadyExists", "BadField", "Conflict", "CotenantError", "FailedPrecondition", "InternalError"),
        *("InvalidArgument", "JobCancelled", "JobFailed", "LimitExceeded", "NotConfigured", "NotFound"),
        *("PermissionDenied", "Unauthenticated", "Unavailable", "WaitTimeout"),
    ),
    "executor": ("Executor",),
    "function_pickling": ("CannotPickle",),
    "mapping": ("RemoteError", "ResultTooLarge"),
    "plots": ("Plot",),
    "remote_functions": ("RemoteFunction", "job", "map"),
    "research": ("Comparison", "Simulation", "Trace", "compare", "load_trace", "simulate"),
    "schedules": ("ScheduleStatus",),
    "secrets": ("Secret",),
    "status": ("JobStatus",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cotenant' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"cotenant.client.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
