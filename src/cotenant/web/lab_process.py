"""The process of one simulation of the policy lab: it takes a snapshot, runs each policy on it, and compares them.

A pickled `lab.Request` comes on standard input, which stays open: the process ends when it closes. On standard output
go lines of an event's name and its data as JSON: `snapshot`, `progress`, and at last `result` or `failed`. The snapshot
is in memory alone, and has what the API shows to the principal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from cotenant.cli.connection import Mesh
from cotenant.cli.research.snapshot import read_snapshot
from cotenant.client.errors import CotenantError, PermissionDenied, as_api_errors
from cotenant.core.model.field_limits import shown
from cotenant.core.policy.options import BadOption
from cotenant.core.policy.profiles import PROFILES
from cotenant.rpc.access import Access
from cotenant.simulator.comparison.arms import ComparedArm
from cotenant.simulator.comparison.runner import ArmFailed, trace_of
from cotenant.simulator.comparison.summary import compare
from cotenant.simulator.scenario import Scenario
from cotenant.simulator.snapshots import Snapshot
from cotenant.simulator.traces import BadTrace
from cotenant.web.lab import INSTEAD, Choice, Event, Request, failed
from cotenant.web.lab_board import count_jobs
from cotenant.web.lab_view import IN_USE, result_view
from cotenant.web.rows import Row, to_json

NICENESS = 10  # a scheduler may run on the same machine
GRACE_SECONDS = 5  # between the limit of processor time and its enforcement
PROGRESS_SECONDS = 0.2

Tell = Callable[[Event], None]


class NoSnapshot(Exception):
    """There is nothing to simulate; the message says why."""


def main() -> None:
    """Run one simulation."""
    request: Request = pickle.load(sys.stdin.buffer)  # from the process that started this one
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (request.cpu_seconds_max, request.cpu_seconds_max + GRACE_SECONDS))
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(event: Event) -> None:
        print(event.name, event.data, flush=True)

    try:
        with as_api_errors():
            snapshot, notes, hidden = asyncio.run(_take(request.access, request.jobs_max))
        tell(Event("snapshot", to_json({"nodes": len(snapshot.nodes), "jobs": len(snapshot.jobs), "hidden": hidden})))
        tell(Event("result", to_json({**simulate(snapshot, request.choices, tell, notes), "hidden": hidden})))
    except PermissionDenied as error:
        tell(failed(f"your API token may not take a snapshot: {error.message}"))
    except CotenantError as error:
        tell(failed(f"the mesh gave no snapshot: {error.message}"))
    except (NoSnapshot, ArmFailed, BadTrace, BadOption) as error:
        tell(failed(str(error)))


def _end_with_parent() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


async def _take(access: Access, jobs_max: int) -> tuple[Snapshot, list[str], int]:
    """Return a snapshot, what it leaves out, and the number of jobs that the principal may not see."""
    notes: list[str] = []
    mesh = Mesh(lambda: access, report=notes.append)
    try:
        [jobs] = await count_jobs(mesh)
        if jobs["seen"] > jobs_max:
            raise NoSnapshot(too_many(jobs["seen"], jobs_max))
        if not jobs["seen"]:
            raise NoSnapshot("no job runs or waits that your API token may see")
        return await read_snapshot(mesh, notes.append), notes, jobs["hidden"]
    finally:
        await mesh.close()


def too_many(jobs: int, jobs_max: int) -> str:
    """Return why a snapshot is not simulated.

    >>> too_many(31_000, 20_000)[:60]
    'the snapshot has 31,000 jobs, and the lab takes 20,000: use '
    """
    return f"the snapshot has {jobs:,} jobs, and the lab takes {jobs_max:,}: {INSTEAD}"


def simulate(snapshot: Snapshot, choices: Sequence[Choice], tell: Tell, notes: Sequence[str] = ()) -> Row:
    """Return what the page shows of the policies in use and of others, from one snapshot on; once per process.

    Raises:
        BadTrace: the snapshot contradicts itself, or has no jobs.
        ArmFailed: a policy is not installed here, or failed.
    """
    with _in_memory(snapshot) as path:
        base = Scenario.of_snapshot(path)
        arms = [ComparedArm(IN_USE, base), *(ComparedArm(one.label, scenario_of(one, base)) for one in choices)]
        progress = Progress([arm.label for arm in arms], tell)
        comparison = compare(arms, drawn=True, progress=progress.runs, share=progress.share)
        return result_view(comparison, trace_of(base), snapshot, notes)


@contextlib.contextmanager
def _in_memory(snapshot: Snapshot) -> Iterator[str]:
    """Yield the path of a file that has no name anywhere, and ends with this process."""
    fd = os.memfd_create("snapshot")
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(snapshot.dump())
        file.flush()
        yield f"/proc/self/fd/{fd}"


def scenario_of(choice: Choice, base: Scenario) -> Scenario:
    """Return a scenario with other policies, which know what those in use know: estimates are those of the snapshot.

    Raises:
        NoSnapshot: there is no such profile.
    """
    if choice.kind != "profile":
        return base.choosing({choice.kind: choice.name}, {})
    if choice.name not in PROFILES:
        raise NoSnapshot(f"there is no profile {shown(choice.name)}")
    return base.deciding_by(PROFILES[choice.name])


class Progress:
    """Tells how far the runs are, some times per second."""

    def __init__(self, labels: Sequence[str], tell: Tell) -> None:
        self._labels, self._tell = labels, tell
        self._done = 0
        self._told = 0.0

    def runs(self, done: int, of: int) -> None:
        """Tell how many runs have ended."""
        self._done = done
        if done < of:
            self._say(0.0)

    def share(self, finished: float) -> None:
        """Tell which share of the present run has finished."""
        if time.monotonic() - self._told >= PROGRESS_SECONDS:
            self._say(finished)

    def _say(self, finished: float) -> None:
        self._told = time.monotonic()
        share = (self._done + finished) / len(self._labels)
        self._tell(Event("progress", to_json({"share": round(share, 3), "policy": self._labels[self._done]})))


if __name__ == "__main__":
    main()
