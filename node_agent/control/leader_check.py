"""Decides whether to obey a placement leader, and holds the lease that its answers renew."""

from __future__ import annotations

import asyncio
import time

import structlog

from cotenant.agent.v1 import agent_service_pb2 as agent_pb2
from cotenant.history.events import Came
from cotenant.history.recording import record
from cotenant.node_agent.control.epoch_fence import EpochFence
from cotenant.node_agent.supervisor.lease import Lease
from cotenant.rpc.store_marks import mark_from_wire
from cotenant.rpc.task_group import BackgroundTasks

log = structlog.get_logger()

MARK_SECONDS = 10.0  # between writes of the store's mark when nothing else is written
RETRY_SECONDS = 1.0  # between tries to write what the disk refuses


class LeaderCheck:
    """A leader is obeyed if neither its term nor its store is older than those seen before."""

    def __init__(self, node_id: str, fence: EpochFence, lease: Lease) -> None:
        self._node_id, self._fence, self._lease = node_id, fence, lease
        self._marked_seconds = 0.0  # when the store's mark was last written
        self._retrying = False  # what the disk has refused
        self._background = BackgroundTasks()

    def accepts(self, welcome: agent_pb2.Welcome) -> bool:
        """Return whether to obey this leader, and remember its term and store."""
        if not self._accepts_store(welcome):
            return False
        if self._fence.raise_term(welcome.term):
            self._background.start(self._persist())
            record(Came(self._node_id))
            return True
        log.error("old_term_refused", term=welcome.term, seen=self._fence.term, remedy=self._fence.remedy)
        return False

    def _accepts_store(self, welcome: agent_pb2.Welcome) -> bool:
        """Return whether the store behind placement is the known one and not older than its last seen revision."""
        shown = mark_from_wire(welcome.store)
        if shown is None:
            return True  # placement runs an older release
        if verdict := self._fence.check_store(shown, tuple(welcome.store.supersedes)):
            log.error("store_rejected", reason=verdict.mismatch.value, why=verdict.text, remedy=self._fence.remedy)
            return False
        self._fence.record_store(shown)
        return True

    def note(self, response: agent_pb2.ConnectResponse) -> None:
        """Remember the store's mark of a message; it is written with orders, and else from time to time."""
        if shown := mark_from_wire(response.store):
            self._fence.record_store(shown)
            now = time.monotonic()
            if response.assignments or response.acks or now > self._marked_seconds + MARK_SECONDS:
                self._marked_seconds = now
                self._background.start(self._persist())

    def acknowledged(self, sent_seconds: float) -> None:
        """Renew the lease: placement has answered a message sent at this time, in seconds since boot."""
        try:
            self._lease.renew(sent_seconds)
        except OSError as error:
            log.error("lease_renewal_failed", error=str(error))

    async def _persist(self) -> None:
        """Write what is pending; try again what the disk refuses: an agent that forgot it obeys an older leader."""
        while not self._retrying:
            try:
                await self._fence.flush()
                break
            except OSError as error:  # the term stays valid in memory
                log.error("term_write_failed", term=self._fence.term, error=str(error), retry_seconds=RETRY_SECONDS)
            self._retrying = True
            await asyncio.sleep(RETRY_SECONDS)
            self._retrying = False

    async def close(self) -> None:
        """Cancel writes in flight, and end the lease."""
        await self._background.close()
        self._lease.close()
