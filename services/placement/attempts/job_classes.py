"""What is remembered of kinds of jobs, whatever becomes of their attempts, and of this process.

Allocators go on from the rates of those before; so these are kept here, under the keys of whoever orders cores, and
work with any predictor or none. Losing the last minute of them does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.sizing.rate_history import Tracks
from cotenant.core.sizing.resize import Resizes, resizable
from cotenant.services.placement.attempts.attempt_store import NOT_COMMITTED
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import OPERATIONS_MAX, Committer, TooLarge, Write
from cotenant.services.placement.cluster.live_records import KINDS
from cotenant.store.port import Entry

log = structlog.get_logger()

SAVE_SECONDS = 30.0


class Kinds:
    """The rates of each kind of job by cores, read from the store once and written as they change."""

    def __init__(self, cluster: Cluster, committer: Committer, allocator: CpuAllocator) -> None:
        self._cluster, self._committer = cluster, committer
        self.tracks = Tracks()
        self._used = isinstance(allocator, Resizes)
        self._read = False

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take in what was kept; what this process has learnt since it first did is younger."""
        if not self._read:
            unread = self.tracks.restore({entry.key.removeprefix(KINDS): entry.value for entry in entries})
            for name in unread:
                log.error("kind_unreadable", kind=name)
        self._read = True

    def informed(self, spec: JobSpec, estimate: Estimate) -> Estimate:
        """Add what is remembered of jobs like one that waits, on GPUs of the types that there are."""
        if not self._used or not resizable(spec):
            return estimate
        return self.tracks.informed(
            spec, estimate, sorted({node.shape.gpu_type for node in self._cluster.nodes.values()})
        )

    async def keep(self) -> None:
        """Write down what changes, for ever."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write down what has changed. Where it cannot be, it is written when the kind changes again."""
        writes = [Write(KINDS + name, content or None) for name, content in self.tracks.dump().items()]
        for begin in range(0, len(writes), OPERATIONS_MAX):
            try:
                await self._committer.commit(writes[begin : begin + OPERATIONS_MAX])
            except (*NOT_COMMITTED, TooLarge) as error:
                log.info("kinds_not_kept", error=str(error))
