"""Leader election: one of several processes leads, and only that one can write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.support.etcd_server import EtcdServer

from cotenant.leadership.election import Election
from cotenant.leadership.fenced_store import FencedStore
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.store.etcd import EtcdStore
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Committed, Compare, Conflict, NotLeader, Put, Store, StoreUnavailable

TTL_SECONDS = 0.6
WAIT_SECONDS = 60.0


@asynccontextmanager
async def candidate(
    store: Store,
    key: str = "svc/leader",
    address: str = "a:1",
    *,
    alone: bool = False,
    ttl_seconds: float = TTL_SECONDS,
) -> AsyncIterator[Election]:
    """A candidate that ends as in a power cut."""
    election = Election(store, key, address, ttl_seconds=ttl_seconds, alone=alone)
    following = asyncio.create_task(election.follow())
    try:
        yield election
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110  # what is waited for wakes nobody
            await asyncio.sleep(0.005)


async def won(election: Election) -> HeldTerm:
    async with asyncio.timeout(WAIT_SECONDS):
        return await election.campaign()


async def test_one_of_many_candidates_leads_and_all_see_it() -> None:
    store = MemoryStore()
    async with candidate(store, address="a:1") as a, candidate(store, address="b:1") as b:
        waiting = {asyncio.create_task(a.campaign()): a, asyncio.create_task(b.campaign()): b}
        done, rest = await asyncio.wait(waiting, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        (first,) = done
        await until(lambda: a.leader and b.leader)
        assert a.leader == b.leader
        assert a.leader
        assert a.leader.address == waiting[first].address
        assert a.leader.term == first.result().term
        for task in rest:
            assert not task.done()
            task.cancel()


async def test_the_next_leader_follows_an_expired_lease_with_a_higher_term() -> None:
    store = MemoryStore()
    async with candidate(store, address="a:1") as a, candidate(store, address="b:1") as b:
        old = await won(a)
        waiting = asyncio.create_task(b.campaign())
        await until(lambda: b.leader)
        assert not waiting.done()
        new = await asyncio.wait_for(waiting, WAIT_SECONDS)  # the lease of `old` is not renewed
        assert new.term > old.term
        assert await a.hold(old) == "b:1 leads now" or old.lost


async def test_a_lease_that_is_kept_alive_is_not_lost() -> None:
    store = MemoryStore()
    async with candidate(store, address="a:1") as a, candidate(store, address="b:1") as b:
        held = await won(a)
        holding = asyncio.create_task(a.hold(held))
        waiting = asyncio.create_task(b.campaign())
        assert held.lease
        done, _ = await asyncio.wait([holding, waiting], timeout=3 * held.lease.ttl_seconds)
        assert not done
        for task in (holding, waiting):
            task.cancel()


async def test_a_leader_that_resigns_is_replaced_at_once() -> None:
    store = MemoryStore()
    async with candidate(store, ttl_seconds=60.0) as a, candidate(store, ttl_seconds=60.0) as b:
        held = await won(a)
        waiting = asyncio.create_task(b.campaign())
        await a.resign(held)
        assert (await asyncio.wait_for(waiting, WAIT_SECONDS)).term > held.term
        assert await a.hold(held) == "the process stops"


async def test_a_single_process_store_has_a_leader_at_once_after_a_kill() -> None:
    store = MemoryStore()
    async with candidate(store, ttl_seconds=60.0) as killed:
        await won(killed)
    async with candidate(store, alone=True) as fresh:
        async with asyncio.timeout(0.5):
            held = await fresh.campaign()
        holding = asyncio.create_task(fresh.hold(held))
        await asyncio.sleep(0)
        assert not holding.done()
        holding.cancel()


async def test_the_mark_of_a_version_without_elections_is_replaced_and_fenced() -> None:
    store = MemoryStore()
    marked = await store.transact([], [Put("svc/leader", b"0123456789abcdef")])
    async with candidate(store) as election:
        held = await won(election)
        assert held.term > marked.revision
        assert isinstance(
            await store.transact([Compare("svc/leader", marked.revision)], [Put("svc/old", b"x")]), Conflict
        )


async def test_a_deposed_leader_writes_nothing_and_learns_of_it() -> None:
    store = MemoryStore()
    async with candidate(store, address="a:1") as a, candidate(store, address="b:1") as b:
        old = await won(a)
        fenced = FencedStore(store, old)
        assert isinstance(await fenced.transact([], [Put("svc/x", b"1")]), Committed)
        new = await won(b)
        with pytest.raises(NotLeader):
            await fenced.transact([], [Put("svc/x", b"2")])
        assert old.over.is_set()
        entry = await store.get("svc/x")
        assert entry
        assert entry.value == b"1"
        assert isinstance(await FencedStore(store, new).transact([], [Put("svc/x", b"3")]), Committed)


async def test_a_failed_comparison_of_the_leader_itself_is_a_conflict() -> None:
    store = MemoryStore()
    async with candidate(store) as election:
        held = await won(election)
        fenced = FencedStore(store, held)
        assert isinstance(await fenced.transact([Compare("svc/x", 7)], [Put("svc/x", b"2")]), Conflict)
        assert not held.lost


async def test_a_renewed_term_rejects_writes_of_the_old_one() -> None:
    store = MemoryStore()
    async with candidate(store) as election:
        held = await won(election)
        old = held.fence
        assert await held.renew() == held.term > old.mod_revision
        assert isinstance(await store.transact([old], [Put("svc/x", b"late")]), Conflict)
        await until(lambda: election.leader and election.leader.term == held.term)
        assert not held.lost


class LosesAnswers(MemoryStore):
    """Commits without an answer, as long as `losing`."""

    losing = 0

    async def _submit(self, step):  # type: ignore[no-untyped-def]  # as its base has it
        result = await super()._submit(step)
        if self.losing:
            self.losing -= 1
            raise StoreUnavailable("the answer was lost")
        return result


async def test_a_candidacy_with_a_lost_answer_does_not_block_the_election() -> None:
    store = LosesAnswers()
    async with candidate(store, ttl_seconds=60.0) as election:
        winning = asyncio.create_task(election.campaign())
        store.losing = 2  # the grant's answer and that of the next attempt
        held = await asyncio.wait_for(winning, WAIT_SECONDS)
        assert not held.lost


async def test_a_term_with_a_lost_answer_is_found() -> None:
    store = LosesAnswers()
    async with candidate(store) as election:
        held = await won(election)
        old, store.losing = held.term, 1
        with pytest.raises(StoreUnavailable):
            await held.renew()
        assert await held.renew() > old + 1


async def test_a_leader_learns_from_its_watch_that_its_key_is_gone() -> None:
    store = MemoryStore()
    async with candidate(store, ttl_seconds=60.0) as election:
        held = await won(election)
        holding = asyncio.create_task(election.hold(held))
        assert held.lease
        await store.revoke(held.lease)
        assert await asyncio.wait_for(holding, WAIT_SECONDS) == "the leadership key is gone"


async def test_in_etcd_a_killed_leader_is_replaced_within_three_seconds(shared_etcd: EtcdServer) -> None:
    store, other = EtcdStore([shared_etcd.endpoint]), EtcdStore([shared_etcd.endpoint])
    try:
        async with (
            candidate(store, "etcd-svc/leader", "a:1", ttl_seconds=2.0) as a,
            candidate(other, "etcd-svc/leader", "b:1", ttl_seconds=2.0) as b,
        ):
            held = await won(a)
            assert held.lease
            assert held.lease.ttl_seconds == 2.0
            await store.keep_alive(held.lease)
            loop = asyncio.get_running_loop()
            killed = loop.time()
            new = await won(b)
            assert loop.time() - killed <= 3.0
            with pytest.raises(NotLeader):
                await FencedStore(store, held).transact([], [Put("etcd-svc/x", b"late")])
            await b.resign(new)
    finally:
        await store.close()
        await other.close()


@pytest.mark.deep
async def test_in_etcd_a_leader_that_is_busy_from_its_election_on_keeps_its_lease(shared_etcd: EtcdServer) -> None:
    store, ttl_seconds = EtcdStore([shared_etcd.endpoint]), 1.0
    try:
        async with candidate(store, "busy/leader", ttl_seconds=ttl_seconds) as election:
            held = await won(election)
            time.sleep(2.5 * ttl_seconds)  # noqa: ASYNC251  # the event loop comes to nothing, as while a leader reads
            entry = await store.get("busy/leader")
            assert entry
            assert entry.mod_revision == held.term
            assert not held.lost
            await election.resign(held)
    finally:
        await store.close()
