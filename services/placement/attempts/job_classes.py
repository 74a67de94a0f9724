"""Measured rates by job class; they outlive attempts and restarts of placement.

Allocators start from the rates of earlier jobs of the same class. The rates are stored by placement, so that this works
with any predictor or none. Losing the last minute of them does no harm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from cotenant.core.model.estimate import Estimate
from cotenant.core.model.job import JobSpec
from cotenant.core.policy.protocols import CpuAllocator
from cotenant.core.sizing.rate_history import RateHistories
from cotenant.core.sizing.resize import Resizes, resizable
from cotenant.services.placement.attempts.attempt_store import NOT_COMMITTED
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import OPERATIONS_MAX, Committer, TooLarge, Write
from cotenant.services.placement.cluster.live_records import JOB_CLASSES
from cotenant.store.port import Entry

log = structlog.get_logger()

SAVE_SECONDS = 30.0


class JobClasses:
    """The rates of each job class by cores, read from the store once and saved as they change."""

    def __init__(self, cluster: Cluster, committer: Committer, allocator: CpuAllocator) -> None:
        self._cluster, self._committer = cluster, committer
        self.tracks = RateHistories()
        self._used = isinstance(allocator, Resizes)
        self._read = False

    def restore(self, entries: Iterable[Entry]) -> None:
        """Restore stored rates, once: what this process has learned since is newer."""
        if not self._read:
            unread = self.tracks.restore({entry.key.removeprefix(JOB_CLASSES): entry.value for entry in entries})
            for name in unread:
                log.error("job_class_unreadable", kind=name)
        self._read = True

    def enrich(self, spec: JobSpec, estimate: Estimate) -> Estimate:
        """Return a waiting job's estimate with the rates of its class on the GPU types of this cluster added."""
        if not self._used or not resizable(spec):
            return estimate
        return self.tracks.informed(
            spec, estimate, sorted({node.shape.gpu_type for node in self._cluster.nodes.values()})
        )

    async def run(self) -> None:
        """Save changes periodically, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Save the changed classes. A class that cannot be saved is saved with its next change."""
        writes = [Write(JOB_CLASSES + name, content or None) for name, content in self.tracks.dump().items()]
        for begin in range(0, len(writes), OPERATIONS_MAX):
            try:
                await self._committer.commit(writes[begin : begin + OPERATIONS_MAX])
            except (*NOT_COMMITTED, TooLarge) as error:
                log.info("job_classes_not_saved", error=str(error))
