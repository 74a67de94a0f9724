"""Who leads: one of a service's processes, by a lease of the store's.

Whoever finds the leadership key absent writes it under a lease of its own, which it keeps alive from then on. When the
leader ends, however it does, its lease runs out within `ttl_seconds` (and what the store needs to notice, half a second
with etcd), the key goes with it, and those who watched it try to write it: one succeeds. A leader that is asked to end
revokes its lease, and another one leads at once.

A leader does not step back because the store is away: nobody else can be elected meanwhile, and whatever it writes is
compared with its term. It does once it learns that its lease is gone or that the key is another's. Nor does it because
it has more to do than it can: the store is asked to keep its lease alive for `BUSY_SECONDS_MAX` from each beat on, for
where a machine is overloaded its successor would have to read everything first, and then be as late.

A store that one process holds alone has no other replicas: whoever opens it leads at once, whatever a process before it
has left there. The same is true over what versions left that knew no elections, whose mark is under no lease: the newer
leads, as it did among them, and the older commits nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from cotenant import fail_points
from cotenant.leadership.leadership_term import Held, Leader, leader_of
from cotenant.leadership.store_cache import RETRY_SECONDS, Mirror
from cotenant.store.guarded_store import trust_of
from cotenant.store.port import Compare, Entry, LeaseLost, Store, StoreUnavailable
from cotenant.store.revision_offset import is_of_one_process

log = structlog.get_logger()

TTL_SECONDS = 2.0  # the least that etcd grants, unless its election timeout is set lower than it is by default
BEATS_WITHIN_TTL = 3
BUSY_SECONDS_MAX = 10.0  # a leader that comes to nothing for longer is to be replaced


class Election:
    """One process's part in the election of a leader under `key`; `address` is where it would serve.

    `leader` is who leads as far as is known, None where nobody does. `alone` says that the store is this process's own.
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
        self._mirror = Mirror(store, key, self._seen)
        self._held: Held | None = None
        self._known = 1  # up to which revision the mirror has to come before what it says counts

    async def follow(self) -> None:
        """Keep `leader` true, until cancelled."""
        await self._mirror.run()

    def check_store(self) -> None:
        """Raise where nobody can be elected, for the store is not the one that was written.

        Raises:
            StoreRegressed, StoreReplaced: it is not.
        """
        if trust := trust_of(self._store):
            trust.check()

    async def changed(self) -> None:
        """Wait until the leadership changes, or may have."""
        await self._mirror.changes()

    def _seen(self, keys: Iterable[str]) -> None:
        entry = self._mirror.entries.get(self.key)
        leader = _elected(entry) if entry else None
        if (leader and leader.identity) != (self.leader and self.leader.identity):
            log.info(
                "leader_seen", key=self.key, address=leader.address if leader else "", revision=self._mirror.revision
            )
        self.leader = leader
        held = self._held
        if held and self._mirror.revision >= held.term and (leader is None or leader.identity != held.identity):
            held.lose(f"{leader.address} leads now" if leader else "the leadership key is gone")

    async def win(self) -> Held:
        """Wait until this process leads, and return its office. `follow` has to go on beside it."""
        while True:
            try:
                if held := await self._try():
                    self._held = held
                    await fail_points.reach("election.won")
                    log.info("leads", key=self.key, term=held.term)
                    return held
            except (StoreUnavailable, LeaseLost) as error:
                log.info("election_delayed", key=self.key, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            while self._mirror.revision < self._known or self.leader is not None:
                await self._mirror.changes()

    async def _try(self) -> Held | None:
        """Take the office where it is free."""
        if self.alone:
            held = Held(self._store, self.key, self.address)
            await held.renew()
            return held
        entry = await self._store.get(self.key)
        if entry and _elected(entry):
            self._known = entry.mod_revision
            return None
        asked_seconds = time.monotonic()
        lease = await self._store.grant(self._ttl_seconds)
        held = Held(self._store, self.key, self.address, lease=lease)
        held.lasts(asked_seconds)
        ours = False
        try:
            if await held.take([Compare(self.key, entry.mod_revision if entry else 0)]):
                await self._keep_alive(held)  # at once: to begin to serve may take longer than a lease lasts
                ours = True
        finally:
            if not ours:  # it may be committed all the same, but not for long
                await self._revoke(held)
        return held if ours else None

    async def hold(self, held: Held) -> str:
        """Keep an office until it is lost; tells why it was."""
        while not held.lost:
            try:
                async with asyncio.timeout(self._ttl_seconds / BEATS_WITHIN_TTL if held.lease else None):
                    await held.over.wait()
            except TimeoutError:
                await self._keep_alive(held)
        log.warning("leads_no_more", key=self.key, term=held.term, why=held.lost)
        return held.lost

    async def _keep_alive(self, held: Held) -> None:
        assert held.lease
        asked_seconds = time.monotonic()
        try:
            await self._store.keep_alive(held.lease, for_seconds=BUSY_SECONDS_MAX)
            held.lasts(asked_seconds)
        except LeaseLost:
            held.lose("its lease ran out")
        except StoreUnavailable as error:
            log.info("lease_not_renewed", key=self.key, error=str(error))

    async def resign(self, held: Held, why: str = "it ends") -> None:
        """Give an office back, so that another process takes it at once."""
        held.lose(why)
        if self._held is held:
            self._held = None
        await self._revoke(held)

    async def _revoke(self, held: Held) -> None:
        try:
            if held.lease:
                await self._store.revoke(held.lease)
        except StoreUnavailable as error:
            log.info("lease_not_revoked", key=self.key, error=str(error))  # it runs out by itself


def _elected(entry: Entry) -> Leader | None:
    """Read who was elected; whoever took a store as its own was not, has no address, and may be long gone."""
    leader = leader_of(entry)
    return leader if leader and leader.address else None
