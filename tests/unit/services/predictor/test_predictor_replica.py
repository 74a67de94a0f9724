"""Replicated predictors: all answer, the leader learns, and its successor continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from tests.unit.services.predictor.conftest import QUICK, Served, query, run
from tests.unit.services.predictor.test_follower import RUNS, SECONDS_MAX, knows, until

from cotenant.leadership.election import Election
from cotenant.leadership.replica import Replica
from cotenant.rpc.channel import connect
from cotenant.rpc.server import Server
from cotenant.services.predictor.api.server import OBSERVATION_SERVICE, SERVICE
from cotenant.services.predictor.predictor_replica import LEADER, PredictorReplica
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Store


@dataclass
class Part(Served):
    """A replica and its parts that tests use."""

    replica: Replica
    running: asyncio.Task[None]

    async def end(self) -> None:
        """Stop the replica."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.replica.resign()


@asynccontextmanager
async def replica(store: Store) -> AsyncIterator[Part]:
    async with AsyncExitStack() as stack:
        server = Server()
        address = f"127.0.0.1:{server.bind()}"
        election = Election(store, LEADER, address, ttl_seconds=60.0, alone=False)
        made = PredictorReplica(store, QUICK)
        replica = Replica(
            server, store, election, (SERVICE, OBSERVATION_SERVICE), "", made.lead, read=made.read, patient=True
        )
        await replica.start()
        await server.start()
        stack.push_async_callback(replica.close)
        stack.push_async_callback(server.stop, 0)
        part = Part(connect(address), replica, asyncio.create_task(replica.run()))
        stack.push_async_callback(part.channel.close)
        stack.push_async_callback(part.end)
        yield part


async def test_all_replicas_answer_and_the_leader_learns() -> None:
    store = MemoryStore()
    async with replica(store) as leads, replica(store) as follows:
        await until(lambda: leads.replica.leads)
        await follows.until(serving=True)
        assert (await follows.observe(*RUNS)).accepted == 3
        await knows(leads)
        await knows(follows)
        assert (await leads.estimate(query()))[0] == (await follows.estimate(query()))[0]
        assert not follows.replica.leads


async def test_the_next_leader_continues_from_all_saved_models() -> None:
    store = MemoryStore()
    async with replica(store) as first, replica(store) as second:
        await until(lambda: first.replica.leads)
        await second.until(serving=True)
        await first.observe(*RUNS)
        await knows(second)
        before = (await second.estimate(query()))[0]
        await first.end()
        async with asyncio.timeout(SECONDS_MAX):
            assert (await second.observe(run("later", seconds=105))).accepted == 1
        after = (await second.estimate(query()))[0]
        assert second.replica.leads
        assert before.source == "history: the median of 3 similar runs"
        assert after.source == "history: the median of 4 similar runs"
        assert (await first.estimate(query()))[0].predictable


async def test_estimates_are_answered_without_a_leader() -> None:
    store = MemoryStore()
    async with replica(store) as first, replica(store) as second:
        await until(lambda: first.replica.leads)
        await first.observe(*RUNS)
        await knows(second)
        second.replica._election.leader = None
        assert (await second.estimate(query()))[0].predictable
