"""Leadership of placement: its state is loaded under a leadership term and reloaded whenever it may be stale.

While the outcome of a transaction is unknown, placement decides nothing and accepts no connections, but keeps its
state and its agents' streams until the committer has resolved the outcome. Only if another process has written
placement's keys is the whole state reloaded; agents' streams are closed then, and the agents report again when they
reconnect.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from cotenant import fail_points
from cotenant.codec import errors, specs
from cotenant.leadership.leadership_term import LeadershipTerm
from cotenant.rpc import gc_tuning
from cotenant.services.placement.agents.agent_sessions import Sessions, inventory_violations
from cotenant.services.placement.attempts.attempt_events import AttemptEvents
from cotenant.services.placement.attempts.job_classes import JobClasses
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Fenced, Halted, Outdated, TooLarge
from cotenant.services.placement.cluster.live_records import (
    ATTEMPTS,
    FORGOTTEN,
    GUARDS,
    JOB_CLASSES,
    NODES,
    LiveAttempt,
    check_amounts,
)
from cotenant.services.placement.registry.agent_registry import AgentRegistry
from cotenant.services.placement.registry.liveness import LivenessClock
from cotenant.storage.v1 import records_pb2
from cotenant.store import schema
from cotenant.store.port import Listing, NotLeader, Store, StoreUnavailable

log = structlog.get_logger()

LEADER = "placement/leader"
RETRY_SECONDS = 0.3
UNSURE_SHARE_MAX = 1 / 3  # of the time for which a new leader waits for agents that stay connected here
UNANSWERED = "the store does not answer placement; the outcome of this call is unknown until it does"

Result = TypeVar("Result")


class PlacementLeadership:
    """Loads the state under a new leadership term each time, which fences off writes of earlier terms."""

    def __init__(
        self,
        store: Store,
        leadership_term: LeadershipTerm,
        cluster: Cluster,
        committer: Committer,
        sessions: Sessions,
        events: AttemptEvents,
        registry: AgentRegistry,
        job_classes: JobClasses,
        liveness_clock: LivenessClock,
        on_serving: Callable[[bool], None],
    ) -> None:
        self._store, self._leadership_term, self._cluster, self._committer = store, leadership_term, cluster, committer
        self._sessions, self._events, self._registry, self._job_classes = sessions, events, registry, job_classes
        self._on_serving, self._liveness_clock = on_serving, liveness_clock
        committer.halted.subscribe(self.invalidate)
        committer.outcome_unknown.subscribe(self.set_outcome_unknown)
        self._doubt = asyncio.Event()
        self._deposed = False
        self._loaded = False
        self._disconnected_seconds = -math.inf
        self._outcome_unknown = False  # the outcome of a commit is unknown
        self._waiting: set[asyncio.Future[None]] = set()  # one per call waiting for a commit; set when it is unknown

    def check(self) -> None:
        """Raise unless this process leads and its state matches the store."""
        if self._deposed:
            raise errors.unavailable("another placement leads now", 0.5, errors.NOT_LEADER)
        if self._outcome_unknown:
            raise errors.unavailable("the store does not answer placement; nothing was decided", 0.5, "STORE_AWAY")
        if not self._loaded:
            raise errors.unavailable("placement is reloading its state", 0.5, "STORE_AWAY")

    async def committed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, or fail early if a commit's outcome becomes unknown; shielded work continues.

        Raises:
            Problem: the work was not committed, or its outcome is unknown.
        """
        with committing():
            return await self._while_answered(work)

    async def _while_answered(self, work: Coroutine[Any, Any, Result]) -> Result:
        working = asyncio.ensure_future(work)
        unanswered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(unanswered)
        if self._outcome_unknown:
            unanswered.set_result(None)
        try:
            await asyncio.wait((working, unanswered), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Halted(UNANSWERED)
            return working.result()
        finally:
            self._waiting.discard(unanswered)
            if not working.cancel() and not working.cancelled():
                working.exception()  # mark it as retrieved: the caller may have been cancelled at the same moment

    def set_outcome_unknown(self, error: Exception | None) -> None:
        """Stop deciding and accepting connections while a commit's outcome is unknown; None: it is resolved."""
        if error:
            self._outcome_unknown = True
            for unanswered in self._waiting:
                if not unanswered.done():
                    unanswered.set_result(None)
            self._liveness_clock.pause()
        else:
            self._outcome_unknown = False
            self._liveness_clock.resume()
        self._on_serving(error is None)

    def invalidate(self, error: Exception) -> None:
        """Mark the state as possibly stale and trigger a reload."""
        self._loaded = False
        self._outcome_unknown = False
        self._liveness_clock.pause()
        self._sessions.close_all()
        self._on_serving(False)
        self._doubt.set()

    async def reload_when_invalid(self) -> None:
        """Reload the state after each failed commit, until deposed; agents then reconnect and report again."""
        while not self._deposed:
            await self._doubt.wait()
            self._doubt.clear()
            try:
                await self.load()
                gc_tuning.refreeze()  # frees the state before it
            except NotLeader as error:
                log.error("leadership_lost", error=str(error))
                self._deposed = True
                self._events.close()
            except StoreUnavailable as error:
                log.warning("store_unavailable", error=str(error))
                self._doubt.set()
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                self._doubt.set()
                raise

    async def confirm_leadership(self) -> None:
        """Confirm that no other process has led until now, before an answer that a caller relies on for long.

        While the lease is valid no other process can lead; after that a transaction decides.

        Raises:
            Problem: another process leads, or leadership cannot be confirmed.
        """
        if time.monotonic() >= self._leadership_term.valid_until_seconds:
            await self.committed(self._committer.commit([]))

    def disconnect_agents_if_uncertain(self) -> None:
        """Disconnect agents now and then while another placement, which would count them as silent, may lead."""
        now, since = time.monotonic(), max(self._leadership_term.valid_until_seconds, self._disconnected_seconds)
        if now > since + self._registry.lost_after_seconds * UNSURE_SHARE_MAX:
            log.warning("leadership_uncertain", seconds=round(now - self._leadership_term.valid_until_seconds, 1))
            self._disconnected_seconds = now
            self._registry.disconnect_all()

    async def probe(self) -> None:
        """Read the leader key, to notice a store outage or a lost term while nothing is written."""
        try:
            fence = self._leadership_term.fence
            entry = await self._store.get(fence.key)
        except StoreUnavailable as error:
            log.info("store_unavailable", error=str(error))
            self._on_serving(False)
            return
        if fence != self._leadership_term.fence:
            return  # this process began a new term in between
        sure = self._loaded and not self._outcome_unknown
        if sure and (entry is None or entry.mod_revision != fence.mod_revision):
            self._committer.halt(Fenced("another placement has begun to lead"))
        self._on_serving(self._loaded and not self._outcome_unknown)

    async def load(self) -> None:
        """Load all state under a new term and replace the previous state.

        Raises:
            StoreUnavailable: the state cannot be read.
            NotLeader: another placement leads; this process never leads again.
        """
        term = await self._leadership_term.renew()  # writes under the old term are refused from now on
        await fail_points.reach("placement.loading")
        nodes = await self._store.list(NODES)
        guards = await self._store.list(GUARDS)
        attempts = await self._store.list(ATTEMPTS)
        job_classes = await self._store.list(JOB_CLASSES)
        forgotten = await self._store.list(FORGOTTEN)
        fresh = self._read(nodes, attempts)
        for entry in sorted(forgotten.entries, key=lambda entry: entry.mod_revision):
            fresh.forgotten[entry.key.removeprefix(FORGOTTEN)] = schema.read(records_pb2.StoredNode, entry)
        every = (*nodes.entries, *guards.entries, *attempts.entries, *job_classes.entries, *forgotten.entries)
        self._sessions.close_all()  # agents that connected in between were reconciled with the old state
        self._cluster.replace(fresh)
        self._job_classes.restore(job_classes.entries)
        self._registry.suspects.restore()
        self._committer.start(self._leadership_term.fence, {entry.key: entry.mod_revision for entry in every})
        self._events.start(max(term, attempts.revision), [live.observed() for live in fresh.attempts.values()])
        self._loaded = True
        self._liveness_clock.resume()
        self._on_serving(True)
        log.info("placement_loaded", nodes=len(nodes.entries), attempts=len(attempts.entries), term=term)

    def _read(self, nodes: Listing, attempts: Listing) -> Cluster:
        fresh = Cluster()
        now, attended = time.monotonic(), self._liveness_clock.tick()
        for entry in nodes.entries:
            stored = schema.read(records_pb2.StoredNode, entry)
            old = self._cluster.nodes.get(stored.node.id)
            with schema.reading(entry):
                if entry.key != NODES + stored.node.id:
                    raise ValueError(f"it names another node: {stored.node.id!r}")
                if wrong := next(inventory_violations("inventory", stored.node.inventory), None):
                    raise ValueError(f"{wrong.field} {wrong.description}")
                node = fresh.put_node(stored.node.id, specs.inventory_from_wire(stored.node.inventory), stored)
            node.seen_seconds = old.seen_seconds if old else now
            node.heard_seconds = old.heard_seconds if old else attended
        for entry in attempts.entries:
            record = schema.read(records_pb2.StoredAttempt, entry)
            with schema.reading(entry):
                if entry.key != ATTEMPTS + record.attempt.job_id:
                    raise ValueError(f"it names another job: {record.attempt.job_id!r}")
                allocation = tuple(specs.allocation_from_wire(part) for part in record.attempt.allocations)
                record.attempt.epoch = record.attempt.epoch or entry.mod_revision
                target = tuple(specs.allocation_from_wire(part) for part in record.resizing)
                check_amounts((*allocation, *target))
                live = LiveAttempt(record, allocation, epoch=record.attempt.epoch, target=target)
                live.end_committed = live.state.ended
                fresh.add(live)
        return fresh


@contextmanager
def committing() -> Iterator[None]:
    """Translate failed commits into errors for the caller."""
    try:
        yield
    except Fenced:
        raise errors.unavailable("another placement leads now; nothing was decided", 0.5, errors.NOT_LEADER) from None
    except Halted as error:
        raise errors.unavailable(str(error), 0.5, "STORE_AWAY") from None
    except Outdated as error:
        raise errors.unavailable(f"another queue leads now, nothing was started: {error}", 0.5, "OLD_TERM") from None
    except TooLarge as error:
        raise errors.failed_precondition("TOO_LARGE", str(error)) from None
