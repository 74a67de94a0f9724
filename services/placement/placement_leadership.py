"""Who leads, and what is there: placement's state is read under a term, and anew whenever it may be wrong.

While it is not known what a transaction has come to, nothing new is decided and nobody is let in, but what is known and
who is there stays: the committer finds out. Only where somebody else has written is all of it read anew, and agents,
whose streams end, tell their side of it anew.
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
from cotenant.leadership.leadership_term import Tenure
from cotenant.services.placement.agents.agent_sessions import Sessions, wrong_inventory
from cotenant.services.placement.attempts.attempt_events import Feed
from cotenant.services.placement.attempts.job_classes import Kinds
from cotenant.services.placement.cluster.cluster_state import Cluster
from cotenant.services.placement.cluster.committer import Committer, Fenced, Halted, Outdated, TooLarge
from cotenant.services.placement.cluster.live_records import (
    ATTEMPTS,
    FORGOTTEN,
    GUARDS,
    KINDS,
    NODES,
    Live,
    check_amounts,
)
from cotenant.services.placement.registry.agent_registry import Registry
from cotenant.services.placement.registry.liveness import Attention
from cotenant.store import schema
from cotenant.store.port import Compare, Listing, NotLeader, Store, StoreUnavailable
from cotenant.v1 import records_pb2

log = structlog.get_logger()

LEADER = "placement/leader"
RETRY_SECONDS = 0.3
UNSURE_SHARE_MAX = 1 / 3  # of the time for which a new leader would wait for agents that stay here
UNANSWERED = "the store does not answer placement; whether this was decided will be known when it does"

Result = TypeVar("Result")


class Leadership:
    """Reads the state under a term of its own, a new one each time: what was under way under the last is refused."""

    def __init__(
        self,
        store: Store,
        tenure: Tenure,
        cluster: Cluster,
        committer: Committer,
        sessions: Sessions,
        feed: Feed,
        registry: Registry,
        kinds: Kinds,
        attention: Attention,
        on_trust: Callable[[bool], None],
    ) -> None:
        self._store, self._tenure, self._cluster, self._committer = store, tenure, cluster, committer
        self._sessions, self._feed, self._registry, self._kinds = sessions, feed, registry, kinds
        self._on_trust, self._attention = on_trust, attention
        self._doubt = asyncio.Event()
        self._deposed = False
        self._trusted = False
        self._let_go_seconds = -math.inf
        self._unanswered = False  # while it is not known what has been committed
        self._waiting: set[asyncio.Future[None]] = set()  # of those who wait for a commit, until that is so

    def check(self) -> None:
        """Raise unless what we believe is what the store holds."""
        if self._deposed:
            raise errors.unavailable("another placement leads now", 0.5, errors.NOT_LEADER)
        if self._unanswered:
            raise errors.unavailable("the store does not answer placement; nothing was decided", 0.5, "STORE_AWAY")
        if not self._trusted:
            raise errors.unavailable("placement is reading its state anew", 0.5, "STORE_AWAY")

    async def committed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for what is decided and committed, unless the store falls silent; `work` goes on then if shielded.

        Raises:
            Problem: why it is not committed, in the caller's words.
        """
        with committing():
            return await self._while_answered(work)

    async def _while_answered(self, work: Coroutine[Any, Any, Result]) -> Result:
        working = asyncio.ensure_future(work)
        unanswered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(unanswered)
        if self._unanswered:
            unanswered.set_result(None)
        try:
            await asyncio.wait((working, unanswered), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Halted(UNANSWERED)
            return working.result()
        finally:
            self._waiting.discard(unanswered)
            if not working.cancel() and not working.cancelled():
                working.exception()  # nobody else asks for it where the caller was cut off in the same moment

    async def renew(self) -> Compare:
        """Begin a new term, and return its fence: what was sent under the old one is refused from now on.

        Raises:
            StoreUnavailable, NotLeader: see `Tenure.renew`.
        """
        self._registry.term = await self._tenure.renew()
        return self._tenure.fence

    def doubt(self, error: Exception | None) -> None:
        """Decide nothing, and let nobody in, until it is known again what has been committed."""
        if error:
            self._unanswered = True
            for unanswered in self._waiting:
                if not unanswered.done():
                    unanswered.set_result(None)
            self._attention.turn_away()
        else:
            self._unanswered = False
            self._attention.turn_back()
        self._on_trust(error is None)

    def distrust(self, error: Exception) -> None:
        """Note that what we believe may differ from what the store holds."""
        self._trusted = False
        self._unanswered = False
        self._attention.turn_away()
        self._sessions.close_all()
        self._on_trust(False)
        self._doubt.set()

    async def regain(self) -> None:
        """After each failed commit read everything anew; agents then tell their side anew."""
        while not self._deposed:
            await self._doubt.wait()
            self._doubt.clear()
            try:
                await self.load()
            except NotLeader as error:
                log.error("deposed", error=str(error))
                self._deposed = True
                self._feed.close()
            except StoreUnavailable as error:
                log.warning("store_away", error=str(error))
                self._doubt.set()
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                self._doubt.set()
                raise

    async def be_sure(self) -> None:
        """Wait until it is known that nobody else has led until now, before an answer by which a caller waits for long.

        While the lease lasts nobody else can; else a transaction tells.

        Raises:
            Problem: another one leads, or that cannot be known.
        """
        if time.monotonic() >= self._tenure.sure_until_seconds:
            await self.committed(self._committer.commit([]))

    def leads_for_sure(self) -> bool:
        """Whether nobody can lead in our place for longer than a heartbeat."""
        return time.monotonic() < self._tenure.sure_until_seconds + self._registry.heartbeat_seconds

    def let_go(self) -> None:
        """Send agents away, now and then, while another placement may lead that takes them as silent."""
        now, since = time.monotonic(), max(self._tenure.sure_until_seconds, self._let_go_seconds)
        if now > since + self._registry.lost_after_seconds * UNSURE_SHARE_MAX:
            log.warning("unsure_of_the_lead", seconds=round(now - self._tenure.sure_until_seconds, 1))
            self._let_go_seconds = now
            self._registry.let_go()

    async def probe(self) -> None:
        """Find out by a look whether the store is there and we still lead, for where nothing is written."""
        try:
            fence = self._tenure.fence
            entry = await self._store.get(fence.key)
        except StoreUnavailable as error:
            log.info("store_away", error=str(error))
            self._on_trust(False)
            return
        if fence != self._tenure.fence:
            return  # a term of ours has begun meanwhile
        sure = self._trusted and not self._unanswered
        if sure and (entry is None or entry.mod_revision != fence.mod_revision):
            self._committer.halt(Fenced("another placement has begun to lead"))
        self._on_trust(self._trusted and not self._unanswered)

    async def load(self) -> None:
        """Read everything, under a new term: whatever was believed before is forgotten.

        Raises:
            StoreUnavailable: it cannot be read.
            NotLeader: another placement leads; this one never does again.
        """
        fence = await self.renew()
        await fail_points.reach("placement.loading")
        nodes = await self._store.list(NODES)
        guards = await self._store.list(GUARDS)
        attempts = await self._store.list(ATTEMPTS)
        kinds = await self._store.list(KINDS)
        forgotten = await self._store.list(FORGOTTEN)
        fresh = self._read(nodes, attempts)
        for entry in sorted(forgotten.entries, key=lambda entry: entry.mod_revision):
            fresh.forgotten[entry.key.removeprefix(FORGOTTEN)] = schema.read(records_pb2.StoredNode, entry)
        every = (*nodes.entries, *guards.entries, *attempts.entries, *kinds.entries, *forgotten.entries)
        self._sessions.close_all()  # whoever has come meanwhile was judged by the old picture
        self._cluster.replace(fresh)
        self._kinds.restore(kinds.entries)
        self._registry.suspects.restore()
        self._committer.identity = self._tenure.identity
        self._committer.start(fence, {entry.key: entry.mod_revision for entry in every})
        term = fence.mod_revision
        self._feed.start(max(term, attempts.revision), [live.attempt for live in fresh.attempts.values()])
        self._trusted = True
        self._attention.turn_back()
        self._on_trust(True)
        log.info("placement_loaded", nodes=len(nodes.entries), attempts=len(attempts.entries), term=term)

    def _read(self, nodes: Listing, attempts: Listing) -> Cluster:
        fresh = Cluster()
        now, attended = time.monotonic(), self._attention.look()
        for entry in nodes.entries:
            stored = schema.read(records_pb2.StoredNode, entry)
            old = self._cluster.nodes.get(stored.node.id)
            with schema.reading(entry):
                if entry.key != NODES + stored.node.id:
                    raise ValueError(f"it says that it is {stored.node.id!r}")
                if wrong := next(wrong_inventory("inventory", stored.node.inventory), None):
                    raise ValueError(f"{wrong.field} {wrong.description}")
                node = fresh.put_node(stored.node.id, specs.inventory_from_wire(stored.node.inventory), stored)
            node.seen_seconds = old.seen_seconds if old else now
            node.heard_seconds = old.heard_seconds if old else attended
        for entry in attempts.entries:
            record = schema.read(records_pb2.StoredAttempt, entry)
            with schema.reading(entry):
                if entry.key != ATTEMPTS + record.attempt.job_id:
                    raise ValueError(f"it says that it is of {record.attempt.job_id!r}")
                allocation = tuple(specs.allocation_from_wire(part) for part in record.attempt.allocations)
                record.attempt.epoch = record.attempt.epoch or entry.mod_revision
                target = tuple(specs.allocation_from_wire(part) for part in record.resizing)
                check_amounts((*allocation, *target))
                live = Live(record, allocation, epoch=record.attempt.epoch, target=target)
                live.end_kept = live.state.ended
                fresh.add(live)
        return fresh


@contextmanager
def committing() -> Iterator[None]:
    """Put failed commits into the caller's words."""
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
