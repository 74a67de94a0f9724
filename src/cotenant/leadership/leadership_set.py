"""Leadership of several services by one process, which leads all of them or does not start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cotenant.leadership.election import Election
from cotenant.leadership.leadership_term import HeldTerm
from cotenant.rpc.task_cancellation import cancel_and_wait
from cotenant.store.port import Store

TTL_SECONDS = 5.0  # shorter store outages go unnoticed
PATIENCE_SECONDS = TTL_SECONDS + 3.0  # for the lease of a killed process; the store needs a moment to notice


class LedByAnotherProcess(Exception):
    """Another process leads on this store; the message names the service and the process's address."""


class LeadershipSet:
    """The leadership terms of several services, kept until one of them is lost."""

    def __init__(self, store: Store, address: str) -> None:
        self._store, self._address = store, address
        self._elections: list[tuple[Election, HeldTerm]] = []
        self._tasks: list[asyncio.Task[str]] = []
        self._following: list[asyncio.Task[None]] = []

    async def take(self, keys: Sequence[str]) -> list[HeldTerm]:
        """Become the leader under each key, and return the terms.

        Raises:
            LedByAnotherProcess: another process leads, and keeps leading.
            StoreUnavailable: the store cannot be reached.
        """
        await self._store.get(keys[0])
        held = []
        for key in keys:
            election = Election(self._store, key, self._address, ttl_seconds=TTL_SECONDS, alone=False)
            self._following.append(asyncio.create_task(election.follow(), name=f"{key}-follow"))
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    won = await election.campaign()
            except TimeoutError:
                there = f"at {election.leader.address}" if election.leader else "at an unknown address"
                service = key.partition("/")[0]
                raise LedByAnotherProcess(f"another process {there} already leads {service} on this store") from None
            self._elections.append((election, won))
            self._tasks.append(asyncio.create_task(election.hold(won), name=f"{key}-hold"))
            held.append(won)
        return held

    async def lost(self) -> str:
        """Wait until one of the terms is lost; return why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def close(self) -> None:
        """Resign all terms."""
        await asyncio.gather(*(election.resign(held) for election, held in self._elections))
        await cancel_and_wait(*self._following, *self._tasks)
