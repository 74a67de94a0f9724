from __future__ import annotations

import asyncio

from cotenant.core.jobs import JobSpec, Role
from cotenant.services.queue.keeper import JOBS, Keeper
from cotenant.services.queue.records import new_record
from cotenant.services.queue.state import LOADED_AT_ONCE, State
from cotenant.store.memory import MemoryStore
from cotenant.store.port import Put


async def test_others_go_on_while_many_jobs_are_read() -> None:
    """Among them who keeps the leader's lease alive: else it would be lost before all jobs are read, for ever."""
    store, state, chunks = MemoryStore(), State(), 5
    for number in range(chunks * LOADED_AT_ONCE):
        record = new_record(f"{number:06}", JobSpec(roles=(Role(),)), "eve", "")
        await store.transact([], [Put(JOBS + record.id, record.stored.SerializeToString())])
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    await asyncio.sleep(0)
    turns = 0
    await Keeper(store, state).load()
    task.cancel()
    assert turns >= 3 * chunks  # while they are understood, while their gates are, and while they are taken in
    assert len(state.records) == chunks * LOADED_AT_ONCE
