"""Builds that are broken on purpose, to see that they are found out.

`python -m tests.chaos.broken NAME …` is the command line of such a build.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from tests.control_plane.mutants import MUTANTS, Patch

from cotenant.cli.main import main
from cotenant.history.events import Told, Welcomed, Wrote
from cotenant.history.recording import record
from cotenant.node_agent import attempt_directory, remains
from cotenant.node_agent.attempt_directory import AttemptDirectory
from cotenant.node_agent.cgroups import Group
from cotenant.node_agent.fence import Fence
from cotenant.replicas.stores import FencedStore
from cotenant.services.queue.views import View
from cotenant.store.port import Committed, Compare, Conflict, Operation


async def unfenced(
    self: FencedStore, compares: Sequence[Compare], operations: Sequence[Operation]
) -> Committed | Conflict:
    """A leader that writes without comparing its term."""
    result = await self._store.transact(compares, operations)
    if isinstance(result, Committed):
        record(Wrote(result.revision, self._tenure.fence.key.partition("/")[0], self._tenure.identity))
    return result


def any_term(self: Fence, term: int) -> bool:
    """An agent that compares no terms."""
    record(Welcomed(self._node_id, term))
    return True


def any_epoch(self: Fence, job_id: str, epoch: int) -> bool:
    """An agent that compares no epochs."""
    record(Told(self._node_id, job_id, epoch))
    return True


def done(*_: object, **__: object) -> bool:
    """An agent that believes that nothing is left."""
    return True


def seen(self: View, tenant: str) -> bool:
    """A queue that shows everybody all jobs."""
    return True


def nothing_found(root: Path) -> Iterator[AttemptDirectory]:
    """An agent that starts again and knows of nothing that runs."""
    return iter(())


BROKEN: dict[str, tuple[Patch, ...]] = {
    "no idempotency": MUTANTS["the queue knows no request again"].patches,
    "no epochs": ((Fence, "raise_term", any_term), (Fence, "raise_epoch", any_epoch)),
    "no fences": ((FencedStore, "transact", unfenced),),
    "leaves orphans": ((remains, "end_remains", done), (Group, "remove", done)),
    "no tenants": ((View, "sees_tenant", seen),),
    "forgets attempts": ((attempt_directory, "find_directories", nothing_found),),
}


if __name__ == "__main__":
    for target, attribute, value in BROKEN[sys.argv.pop(1)]:
        mock.patch.object(target, attribute, value).start()
    sys.argv[0] = "cotenant"
    main()
