"""Deliberately broken builds, which the checks must detect.

`python -m tests.verification.chaos.broken NAME …` is the command line of such a build.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from tests.verification.control_plane.mutants import MUTANTS, Patch

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.cli.main import main
from cotenant.cli.mesh import problems
from cotenant.cli.mesh.problems import MeshProblem
from cotenant.cli.views import View
from cotenant.core.model import health
from cotenant.core.model.health import BootInstance, Finding, Sign
from cotenant.history.events import Told, Welcomed, Wrote
from cotenant.history.recording import record
from cotenant.leadership.fenced_store import FencedStore
from cotenant.node_agent.control import attempt_manager
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.node_agent.runtime import attempt_directory, attempt_status, orphan_processes
from cotenant.node_agent.runtime.attempt_directory import AttemptDirectory
from cotenant.node_agent.runtime.attempt_status import Status
from cotenant.node_agent.supervisor.cgroups import Group
from cotenant.services.queue.jobs import visibility
from cotenant.store.port import Committed, Compare, Conflict, Operation
from cotenant.v1 import job_pb2


async def unfenced(
    self: FencedStore, compares: Sequence[Compare], operations: Sequence[Operation]
) -> Committed | Conflict:
    """A leader that writes without comparing its term."""
    result = await self._store.transact(compares, operations)
    if isinstance(result, Committed):
        record(
            Wrote(result.revision, self._leadership_term.fence.key.partition("/")[0], self._leadership_term.identity)
        )
    return result


def accept_any_term(self: EpochFence, term: int) -> bool:
    """An agent that compares no terms."""
    record(Welcomed(self._node_id, term))
    return True


def accept_any_epoch(self: EpochFence, job_id: str, epoch: int) -> bool:
    """An agent that compares no epochs."""
    record(Told(self._node_id, job_id, epoch))
    return True


def report_nothing_left(*_: object, **__: object) -> bool:
    """An agent that considers its cleanup complete."""
    return True


def sees_all_tenants(self: visibility.View, tenant: str) -> bool:
    """A queue that shows all jobs to all callers."""
    return True


def find_no_directories(root: Path) -> Iterator[AttemptDirectory]:
    """An agent that finds no running attempts after a restart."""
    return iter(())


def no_node_problems(nodes: Sequence[View]) -> Iterator[MeshProblem]:
    """A `status` that omits nodes."""
    return iter(())


_after = health._after


def keep_finding(
    finding: Finding, sign: Sign | None, elapsed_seconds: float, era: BootInstance, *, blind: bool
) -> Finding | None:
    """An agent whose findings never end, so its node stays excluded."""
    return _after(finding, sign, elapsed_seconds, era, blind=blind) or finding


_report = attempt_status.report


def report_failed(status: Status, node_id: str) -> agent_pb2.AttemptReport:
    """An agent that reports a refused launch as the job's failure."""
    reported = _report(status, node_id)
    if reported.state == job_pb2.ATTEMPT_STATE_NOT_LAUNCHED:
        reported.state = job_pb2.ATTEMPT_STATE_FAILED
    return reported


BROKEN: dict[str, tuple[Patch, ...]] = {
    "no idempotency": MUTANTS["the queue recognizes no repeated request"].patches,
    "no epochs": ((EpochFence, "raise_term", accept_any_term), (EpochFence, "raise_epoch", accept_any_epoch)),
    "no fences": ((FencedStore, "transact", unfenced),),
    "leaves orphans": ((orphan_processes, "kill_orphans", report_nothing_left), (Group, "remove", report_nothing_left)),
    "no tenants": ((visibility.View, "sees_tenant", sees_all_tenants),),
    "fails refused launches": ((attempt_manager, "report", report_failed),),
    "omits nodes": ((problems, "_of_nodes", no_node_problems),),
    "keeps findings": ((health, "_after", keep_finding),),
    "forgets attempts": ((attempt_directory, "find_directories", find_no_directories),),
}


if __name__ == "__main__":
    for target, attribute, value in BROKEN[sys.argv.pop(1)]:
        mock.patch.object(target, attribute, value).start()
    sys.argv[0] = "cotenant"
    main()
