"""Leader election: the replicas of a service elect a leader by a lease in the store.

A process that finds no leadership key writes it under its own lease and keeps that lease alive. When the leader ends,
for any reason, its lease expires within `ttl_seconds` (plus the time the store needs to notice, half a second with
etcd), the key is deleted with it, and the processes that watch the key try to write it: one succeeds. A leader that is
asked to stop revokes its lease, so that another process leads at once.

A leader does not step down because the store is unavailable: no other process can be elected in that time, and every
write is compared with the term. It steps down when it learns that its lease has expired or that another process owns
the key. It does not step down because it is overloaded either: each keep-alive asks the store to keep the lease for
`BUSY_SECONDS_MAX`, because on an overloaded machine a successor would first have to read all state, and then be as
late.

A store that belongs to one process has no other replicas: the process that opens it leads at once, regardless of what
an earlier process left there. The same holds for the mark left by versions without elections, which is under no lease:
the newer process leads, as it did among those versions, and the older one can no longer commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from cotenant import fail_points
from cotenant.leadership.leadership_term import HeldTerm, Leader, leader_of
from cotenant.leadership.store_cache import RETRY_SECONDS, StoreCache
from cotenant.store.guarded_store import trust_of
from cotenant.store.port import Compare, Entry, LeaseLost, Store, StoreUnavailable
from cotenant.store.revision_offset import is_of_one_process
from cotenant.telemetry.plain_structlog import structlog

log = structlog.get_logger()

TTL_SECONDS = 2.0  # the minimum that etcd grants with its default election timeout
BEATS_WITHIN_TTL = 3
BUSY_SECONDS_MAX = 10.0  # a leader that makes no progress for longer is replaced


class Election:
    """One process's part in the election of a leader under `key`; `address` is where it would serve.

    `leader` is the known leader, None if there is none. `alone` says that the store belongs to this process only.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        address: str,
        *,
        ttl_seconds: float = TTL_SECONDS,
        alone: bool | None = None,
    ) -> None:
        self.key, self.address = key, address
        self.alone = is_of_one_process(store) if alone is None else alone
        self.leader: Leader | None = None
        self._store, self._ttl_seconds = store, ttl_seconds
        self._cache = StoreCache(store, key, self._on_change)
        self._held: HeldTerm | None = None
        self._known = 1  # the cache is not trusted before it has reached this revision

    async def follow(self) -> None:
        """Keep `leader` up to date until cancelled."""
        await self._cache.run()

    def check_store(self) -> None:
        """Raise if no leader can be elected because the store has regressed or was replaced.

        Raises:
            StoreRegressed, StoreReplaced: the store is not the one that was written.
        """
        if trust := trust_of(self._store):
            trust.check()

    async def changed(self) -> None:
        """Wait until the leadership changes, or may have changed."""
        await self._cache.changes()

    def _on_change(self, keys: Iterable[str]) -> None:
        entry = self._cache.entries.get(self.key)
        leader = _elected_leader(entry) if entry else None
        if (leader and leader.identity) != (self.leader and self.leader.identity):
            log.info(
                "leader_changed", key=self.key, address=leader.address if leader else "", revision=self._cache.revision
            )
        self.leader = leader
        held = self._held
        if held and self._cache.revision >= held.term and (leader is None or leader.identity != held.identity):
            held.lose(f"{leader.address} leads now" if leader else "the leadership key is gone")

    async def campaign(self) -> HeldTerm:
        """Wait until this process leads, and return its term. `follow` must run at the same time."""
        while True:
            try:
                if held := await self._try():
                    self._held = held
                    await fail_points.reach("election.won")
                    log.info("leadership_acquired", key=self.key, term=held.term)
                    return held
            except (StoreUnavailable, LeaseLost) as error:
                log.info("election_delayed", key=self.key, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            while self._cache.revision < self._known or self.leader is not None:
                await self._cache.changes()

    async def _try(self) -> HeldTerm | None:
        """Try to acquire the leadership; return None if another process has it."""
        if self.alone:
            held = HeldTerm(self._store, self.key, self.address)
            await held.renew()
            return held
        entry = await self._store.get(self.key)
        if entry and _elected_leader(entry):
            self._known = entry.mod_revision
            return None
        asked_seconds = time.monotonic()
        lease = await self._store.grant(self._ttl_seconds)
        held = HeldTerm(self._store, self.key, self.address, lease=lease)
        held.extend(asked_seconds)
        ours = False
        try:
            if await held.take([Compare(self.key, entry.mod_revision if entry else 0)]):
                await self._keep_alive(held)  # at once: starting to serve may take longer than the lease
                ours = True
        finally:
            if not ours:  # the write may still commit, but not for long
                await self._revoke(held)
        return held if ours else None

    async def hold(self, held: HeldTerm) -> str:
        """Keep a term until it is lost; return why it was lost."""
        while not held.lost:
            try:
                async with asyncio.timeout(self._ttl_seconds / BEATS_WITHIN_TTL if held.lease else None):
                    await held.over.wait()
            except TimeoutError:
                await self._keep_alive(held)
        log.warning("leadership_lost", key=self.key, term=held.term, why=held.lost)
        return held.lost

    async def _keep_alive(self, held: HeldTerm) -> None:
        assert held.lease
        asked_seconds = time.monotonic()
        try:
            await self._store.keep_alive(held.lease, for_seconds=BUSY_SECONDS_MAX)
            held.extend(asked_seconds)
        except LeaseLost:
            held.lose("its lease expired")
        except StoreUnavailable as error:
            log.info("lease_renewal_failed", key=self.key, error=str(error))

    async def resign(self, held: HeldTerm, why: str = "the process stops") -> None:
        """Give up a term, so that another process can lead at once."""
        held.lose(why)
        if self._held is held:
            self._held = None
        await self._revoke(held)

    async def _revoke(self, held: HeldTerm) -> None:
        try:
            if held.lease:
                await self._store.revoke(held.lease)
        except StoreUnavailable as error:
            log.info("lease_revocation_failed", key=self.key, error=str(error))  # it expires by itself


def _elected_leader(entry: Entry) -> Leader | None:
    """Return the elected leader; a process that owned its store alone has no address and may be long gone."""
    leader = leader_of(entry)
    return leader if leader and leader.address else None
