"""Several services' offices in one process, for whoever leads all of them or does not start at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cotenant.leadership.election import Election
from cotenant.leadership.leadership_term import Held
from cotenant.rpc.task_cancellation import end
from cotenant.store.port import Store

TTL_SECONDS = 5.0  # a store that is away for less is not noticed
PATIENCE_SECONDS = TTL_SECONDS + 3.0  # for the lease of one that was killed; the store needs a moment to notice


class AnotherLeads(Exception):
    """Another process leads on this store; the message says which, and where it serves."""


class Offices:
    """The leadership keys that were won, kept until one of them is lost."""

    def __init__(self, store: Store, address: str) -> None:
        self._store, self._address = store, address
        self._elections: list[tuple[Election, Held]] = []
        self._tasks: list[asyncio.Task[str]] = []
        self._following: list[asyncio.Task[None]] = []

    async def take(self, keys: Sequence[str]) -> list[Held]:
        """Be elected under each key.

        Raises:
            AnotherLeads: somebody else is, and stays so.
            StoreUnavailable: the store cannot be asked.
        """
        await self._store.get(keys[0])
        held = []
        for key in keys:
            election = Election(self._store, key, self._address, ttl_seconds=TTL_SECONDS, alone=False)
            self._following.append(asyncio.create_task(election.follow(), name=f"{key}-follow"))
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    won = await election.win()
            except TimeoutError:
                there = f"at {election.leader.address}" if election.leader else "that cannot be seen"
                service = key.partition("/")[0]
                raise AnotherLeads(f"another process {there} leads {service} on this store already") from None
            self._elections.append((election, won))
            self._tasks.append(asyncio.create_task(election.hold(won), name=f"{key}-hold"))
            held.append(won)
        return held

    async def lost(self) -> str:
        """Wait until one of them is lost; tells why."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def close(self) -> None:
        """Give all of them back."""
        await asyncio.gather(*(election.resign(held) for election, held in self._elections))
        await end(*self._following, *self._tasks)
